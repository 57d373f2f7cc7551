"""The finetuning tasks: how each is read, encoded, scored and named."""

from ...config.checks import list_some
from ...config.finetune import TaskConfig
from ..examples import Example, RowReport, SpanExample
from ..pairs import encode_choices, encode_pairs
from ..windows import encode_windows
from .benchmark import Benchmark, HeadKind, accuracy
from .pair_tables import MNLI_LABELS, QQP_LABELS, name_mnli, read_mnli, read_qqp, read_table, score_mnli, score_qqp
from .race import LETTERS, read_race, score_race
from .squad import read_squad

_CLASSES = HeadKind.CLASSIFICATION
BENCHMARKS = {
    "mnli": Benchmark("mnli/accuracy", read_mnli, encode_pairs, _CLASSES, MNLI_LABELS, score_mnli, name_mnli),
    "qqp": Benchmark("qqp/accuracy", read_qqp, encode_pairs, _CLASSES, QQP_LABELS, score_qqp, lambda _: "QQP.tsv"),
    "squad_v1": Benchmark("squad_v1/f1", read_squad, encode_windows, HeadKind.SPAN),
    "squad_v2": Benchmark("squad_v2/f1", read_squad, encode_windows, HeadKind.SPAN),
    "race": Benchmark("race/accuracy", read_race, encode_choices, HeadKind.CHOICE, tuple(LETTERS), score_race),
}


def benchmark_of(task: TaskConfig) -> Benchmark:
    """Return the benchmark of a task's name, or of the columns and labels of a user table."""
    if task.columns is None:
        return BENCHMARKS[task.name]
    metric = objective_of(task.name)
    return Benchmark(
        metric,
        read_table,
        encode_pairs,
        _CLASSES,
        tuple(task.labels),
        lambda chosen, labels, _: {metric: accuracy(chosen, labels)},
        lambda _: f"{task.name}.tsv",
    )


def objective_of(task_name: str) -> str:
    """Return the metric that a search and the median over seeds compare."""
    return BENCHMARKS[task_name].objective if task_name in BENCHMARKS else f"{task_name}/accuracy"


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
