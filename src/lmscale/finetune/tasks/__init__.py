"""Readers of the benchmarks: official files or hub splits to examples."""

from collections.abc import Callable

from ...finetune_config import TaskConfig
from ..examples import Example, RowAccount
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
        ValueError: missing columns, rows that cannot be (all of one kind named with their places), ids twice, or no
            example at all.
    """
    account = RowAccount(place)
    examples = READERS[task.name](task, place, account)
    account.check()
    seen: set[str] = set()
    for example in examples:
        if example.id in seen:
            raise ValueError(f"{place}: the ids of examples must differ, but {example.id!r} is there twice")
        seen.add(example.id)
    if not examples:
        raise ValueError(f"{place} must have an example at least, but has none")
    return examples, account


__all__ = ["READERS", "read_examples"]
