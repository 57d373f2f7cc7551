"""LAMBADA's passages: read them, split off the last words, tokenize; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..data.tokenizer import Tokenizer
from ..text.whole_file import TextFile, text_of_json

# English function words. Models often predict them, but passages of LAMBADA rarely end in one (37 of 2,577 lines). The
# list is ours; Radford et al. 2019 (section 3.3) do not publish theirs.
STOP_WORDS = frozenset(
    """
    a about above across after again against all almost along already also although always am among an and another any
    anyone anything are around as at away back be because been before behind being below beneath beside between beyond
    both but by can cannot could despite did do does doing done down during each either else enough even ever every
    everyone everything few for from further had has have having he hence her here hers herself him himself his how
    however i if in inside instead into is it its itself just least less many may me might mine more most much must my
    myself near neither never no nobody none nor not nothing now of off often on once one only onto or other others
    ought our ours ourselves out outside over own perhaps quite rather really same shall she should since so some
    someone something sometimes soon still such than that the their theirs them themselves then there therefore these
    they this those though through throughout thus till to together too toward towards under unless until up upon us
    very was we were what whatever when where whether which while who whom whose why will with within without would yet
    you your yours yourself yourselves
    """.split()
)


@dataclass(frozen=True)
class Passage:
    """One item: its line number, the tokens of the context, and the tokens of the word to predict.

    Args:
        num_dropped: first tokens of the passage that the context lacks, because the model could not read them.
    """

    line: int
    context: tuple[int, ...]
    word: tuple[int, ...]
    num_dropped: int = 0


def read_passages(file: TextFile, form: str) -> list[tuple[str, str]]:
    """Read the (passage, last word) of each line; only spaces around the passage are stripped.

    Args:
        form: `openai` (JSON lines with `text`, raw text as published by GPT-2's authors) or `original` (one passage per
            line, tokenized into words and lower-cased).

    Raises:
        ValueError: a line has a different form or fewer than two words.
    """
    found = []
    for where, line in file.lines:
        is_json = line.lstrip().startswith("{")
        if line.strip() and is_json != (form == "openai"):
            other = "openai" if is_json else "original"
            raise ValueError(f"`task.form` must match the file, but is {form}, and {where} looks like {other}")
        text = _text_of_json(line, where) if is_json else line
        words = text.rsplit(None, 1)
        if len(words) < 2:
            raise ValueError(f"`task.path` must have a passage of two words or more on each line, but {where} has none")
        found.append((words[0].strip(), words[1]))
    return found


def encode_passages(pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[Passage]:
    """Tokenize each passage, and its last word with a leading space.

    Source: NVIDIA/Megatron-LM v1.0, `tasks/zeroshot_gpt2/datasets.py`. Tokenizing the whole text at once gives other
        tokens for 2 of 2,577 lines of the data set.
    """
    contexts = tokenizer.encode_batch([passage for passage, _ in pairs])
    words = tokenizer.encode_batch([f" {word}" for _, word in pairs])
    items = enumerate(zip(contexts, words, strict=True), start=1)
    return [Passage(line, tuple(context), tuple(word)) for line, (context, word) in items]


def fit_passages(passages: Sequence[Passage], max_positions: int, name: str, truncate_left: bool) -> list[Passage]:
    """Return the passages that the model reads.

    Args:
        name: name of the file, for messages.
        truncate_left: a passage that is too long loses its first tokens.

    Raises:
        ValueError: a passage is too long; the message names the first. With `truncate_left`, a word is.
    """
    found = []
    for passage in passages:
        length, where = len(passage.context) + len(passage.word) - 1, f"{name}, line {passage.line}"
        if length > max_positions and not truncate_left:
            raise ValueError(
                f"a passage must be at most the model's positions ({max_positions}) long, but {where} has {length} "
                "tokens to read; task.truncate_left=true drops the first tokens of such passages and counts them"
            )
        num_free = max_positions - len(passage.word) + 1
        if num_free < 1:
            raise ValueError(
                f"a word must leave a position of the model's ({max_positions}) to its context, but that of {where} "
                f"has {len(passage.word)} tokens"
            )
        context = passage.context[-num_free:]
        found.append(replace(passage, context=context, num_dropped=len(passage.context) - len(context)))
    return found


def stop_word_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of tokens that are a complete stop word with a leading space."""
    forms = [f" {form}" for word in sorted(STOP_WORDS) for form in (word, word.capitalize())]
    return sorted(ids[0] for ids in tokenizer.encode_batch(forms) if len(ids) == 1)


def _text_of_json(line: str, where: str) -> str:
    text = text_of_json(line, "text", '`task.path` must have {"text": ...}', where)
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # JSON can escape lone surrogates
        raise ValueError(f"`task.path` must have valid Unicode on each line, but {where} has half a surrogate pair")
    return text
