"""The finetuning tasks: how each is read, encoded, scored and named."""

from functools import partial

from ...config.checks import list_some
from ...config.finetune import TaskConfig
from ..examples import Example, RowReport, SpanExample
from ..pairs import encode_choices, encode_pairs
from ..windows import encode_windows
from .benchmark import Benchmark, HeadKind
from .race import LETTERS, read_race, score_race
from .squad import read_squad
from .tables import read_table, scores_of_table

BENCHMARKS = {
    "squad_v1": Benchmark(read_squad, encode_windows, HeadKind.SPAN),
    "squad_v2": Benchmark(read_squad, encode_windows, HeadKind.SPAN),
    "race": Benchmark(read_race, encode_choices, HeadKind.CHOICE, tuple(LETTERS), score_race),
}


def benchmark_of(task: TaskConfig) -> Benchmark:
    """Return the benchmark of a task's name, or of its table."""
    if task.name in BENCHMARKS:
        return BENCHMARKS[task.name]
    head = HeadKind.CLASSIFICATION if task.labels is not None else HeadKind.REGRESSION
    return Benchmark(read_table, encode_pairs, head, tuple(task.labels or ()), partial(scores_of_table, task))


def read_examples(task: TaskConfig, place: str) -> tuple[list[Example], RowReport]:
    """Read every usable example of a file or split in order, and a report of faulty rows.

    Raises:
        ValueError: columns are missing, rows are invalid (all of one kind are listed), ids repeat, only some examples
            have labels, or there is no example.
    """
    report = RowReport(place)
    examples = benchmark_of(task).read(task, place, report)
    report.check()
    seen: dict[str, int] = {}
    for number, example in enumerate(examples, start=1):
        first = seen.setdefault(example.id, number)
        if first != number:
            raise ValueError(
                f"{place}: the ids of examples must differ, but {example.id!r} is there twice, examples {first} and "
                f"{number}"
            )
    if not examples:
        raise ValueError(f"{place} must have at least one example, but has none")
    bare = [str(number) for number, example in enumerate(examples, start=1) if not _is_labelled(example)]
    if 0 < len(bare) < len(examples):
        raise ValueError(
            f"{place}: all examples must have a label or none, but {len(bare)} of {len(examples)} have none: examples "
            f"{list_some(bare)}"
        )
    return examples, report


def _is_labelled(example: Example) -> bool:
    return example.is_labelled if isinstance(example, SpanExample) else example.label is not None
