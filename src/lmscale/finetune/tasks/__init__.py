"""Readers of the benchmarks: official files or hub splits to examples."""

from collections.abc import Callable

from ...finetune_config import TaskConfig
from ..examples import Example, RowAccount, SpanExample, list_some
from .mnli import read_mnli
from .qqp import read_qqp
from .race import read_race
from .squad import read_squad

Reader = Callable[[TaskConfig, str, RowAccount], list[Example]]
READERS: dict[str, Reader] = {
    "mnli": read_mnli,
    "qqp": read_qqp,
    "race": read_race,
    "squad_v1": read_squad,
    "squad_v2": read_squad,
}


def read_examples(task: TaskConfig, place: str) -> tuple[list[Example], RowAccount]:
    """Every usable example of a place, in its order, and what was left out.

    Raises:
        ValueError: missing columns, rows that cannot be (all of one kind named with their places), ids twice, labels
            for some of the examples only, or no example at all.
    """
    account = RowAccount(place)
    examples = READERS[task.name](task, place, account)
    account.check()
    seen: dict[str, int] = {}
    for number, example in enumerate(examples, start=1):
        first = seen.setdefault(example.id, number)
        if first != number:
            raise ValueError(
                f"{place}: the ids of examples must differ, but {example.id!r} is there twice, examples {first} and "
                f"{number}"
            )
    if not examples:
        raise ValueError(f"{place} must have an example at least, but has none")
    bare = [str(number) for number, example in enumerate(examples, start=1) if not _is_labelled(example)]
    if 0 < len(bare) < len(examples):
        raise ValueError(
            f"{place}: all examples must have a label or none, but {len(bare)} of {len(examples)} have none: examples "
            f"{list_some(bare)}"
        )
    return examples, account


def _is_labelled(example: Example) -> bool:
    return example.is_labelled if isinstance(example, SpanExample) else example.label is not None


__all__ = ["READERS", "read_examples"]
