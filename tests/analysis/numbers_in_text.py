"""Which numbers a Markdown text states, and which records stand behind them.

What stands in brackets with the words "not recorded" may stand without. Any other measured number has a comment in its
block (paragraph, list item, table) that names record and metric:

    <!-- numbers: soak_cpu.json: sum kills/rank .* | kills/job; demo.json: gpt/after -->

After the file come regular expressions for whole names of metrics, each alone or after `sum`, `largest` (of absolute
values) or `number` (of metrics). A number is proved where one of those values, in some decimal unit, rounds to it. The
record `ledger` has the paper's value of every entry by its id, and ours as `ours/id`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

COMMENT = re.compile(r"<!-- numbers: (.*?) -->", re.S)
# Not part of a word or a version; thousands may have commas, a unit may be attached, a range has two numbers.
NUMBER = re.compile(
    r"(?:(?<![\w.,-])|(?<=\d-)|(?<=\W-))"
    r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?:(?!\w|\.\d)|(?=(?:x|s|ms|h|k|MB|GB|MiB|GiB)\b))"
)
# What is not prose: code in fences and inline, comments, targets of links, headings.
SKIPPED = re.compile(r"`[^`]*`|<!--.*?-->|\]\([^)]*\)|^#[^\n]*$|\([^()]*not recorded[^()]*\)", re.S | re.M)
# Names of places and things, not quantities.
NAMES = re.compile(
    r"\b(?:[Ss]ections?|[Tt]ables?|[Ff]igures?|[Aa]ppendix|Python|SQuAD|ZeRO stage|Megatron-LM v|issue|arXiv:)"
    r" ?[\d.]+(?:(?:, | and |-)[\d.]+)*"
)
SCALES = (1, 100, 1e3, 1e-3, 1e-6, 1e-9)


@dataclass(frozen=True)
class Stated:
    """A number in a text, and the block it stands in."""

    text: str
    block: str

    def is_proved_by(self, values: list[float]) -> bool:
        """Whether one of the values, in some decimal unit, rounds to what is shown."""
        shown = self.text.replace(",", "")
        decimals = len(shown.partition(".")[2])
        if float(shown) == 0:
            return 0 in values  # anything small rounds to it
        return any(round(abs(value) * scale, decimals) == float(shown) for value in values for scale in SCALES)


def blocks(text: str) -> Iterator[str]:
    """Paragraphs, tables and single list items, fences taken out first."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    yield from (block for block in re.split(r"\n\s*\n|\n(?=\s*- )", text) if block.strip())


def stated_numbers(text: str, facts: Mapping[str, str] = {}) -> list[Stated]:
    """Every number of a text's prose and tables, without names and without the passages that are keys of `facts`."""
    found = []
    for block in blocks(text):
        prose = SKIPPED.sub(" ", block)
        prose = " ".join(prose.split())
        for fact in facts:
            prose = prose.replace(fact, " ")
        found += [Stated(match[0], block) for match in NUMBER.finditer(NAMES.sub(" ", prose))]
    return found


def values_named(block: str, records: Mapping[str, dict[str, Any]]) -> list[float]:
    """The values that the comments of a block name.

    Raises:
        ValueError: a record or a metric that is not there.
    """
    values = []
    for comment in COMMENT.findall(block):
        for source in comment.split(";"):
            file, _, patterns = " ".join(source.split()).partition(": ")
            if file not in records:
                raise ValueError(f"`numbers` must name a record, but there is no {file!r}")
            for pattern in patterns.split(" | "):
                values.append(_value(records[file]["metrics"], pattern.strip(), file))
    return [value for each in values for value in each]


def _value(metrics: dict[str, dict[str, Any]], pattern: str, file: str) -> list[float]:
    aggregate, _, rest = pattern.partition(" ")
    name = rest if aggregate in ("sum", "largest", "number") else pattern
    found = [entry["value"] for metric, entry in metrics.items() if re.fullmatch(name, metric)]
    if not found:
        raise ValueError(f"`numbers` must name a metric, but {file} has no {name!r}")
    if name == pattern:
        return found
    return [{"sum": sum, "largest": lambda values: max(map(abs, values)), "number": len}[aggregate](found)]


def unproved(text: str, records: Mapping[str, dict[str, Any]], facts: Mapping[str, str] = {}) -> list[str]:
    """The numbers of a text that no record named beside them bears, each with the beginning of its block."""
    return [
        f"{number.text} in: {' '.join(number.block.split())[:90]}"
        for number in stated_numbers(text, facts)
        if not number.is_proved_by(values_named(number.block, records))
    ]


def notebook_texts(path) -> tuple[list[str], list[str]]:
    """The Markdown cells of a notebook, and the printed outputs of its code cells without tags."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    prose = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    outputs = []
    for cell in cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            text = output.get("text") or data.get("text/html") or data.get("text/plain") or ""
            outputs.append(re.sub(r"<style.*?</style>|<[^>]*>", " ", "".join(text), flags=re.S))
    return prose, outputs
