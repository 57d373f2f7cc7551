"""Where a task's rows are: a path, or a split of the Hugging Face hub, whose rows are read here."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..config.finetune import FROM_HUB, FinetuneConfig, TaskConfig
from ..data.sources import load_dataset
from ..results import check_no_record
from ..runtime.world import world_from_outside
from ..text.tables import check_columns


def is_on_hub(place: str) -> bool:
    """Return whether a path denotes a split on the hub."""
    return place.startswith(FROM_HUB)


def check_values(values: dict[str, Any]) -> None:
    """Check a configuration in plain values, for the jobs of a sweep: its values, its paths and its run folder.

    Raises:
        ValueError: anything invalid, in one line.
    """
    run = FinetuneConfig.from_dict(values)
    if not is_finished(run):
        check_unused(run)
        check_places(run)


def is_finished(run: FinetuneConfig) -> bool:
    """Whether the run folder has the record of this very configuration, and the checkpoint that it was to save.

    The content of its data files and of its checkpoint is not compared. A job whose ranks others have started does not
    count as finished, because they might not all see the folder.
    """
    if world_from_outside() is not None:
        return False
    folder, saves = Path(run.run_dir), run.trainer.save and run.trainer.num_epochs > 0
    try:
        record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        is_same = record["config"]["digest"] == run.digest()
    except (OSError, ValueError, LookupError, TypeError):  # none, damaged, or of an earlier version
        return False
    return is_same and (not saves or any(folder.glob("checkpoints/step_*.ckpt")))


def check_unused(run: FinetuneConfig) -> None:
    """Check that the run folder has neither a record nor a checkpoint: `ckpt=RUN` takes the latest one, which could be
    an earlier run's.

    Raises:
        ValueError: it has one.
    """
    check_no_record(run.run_dir)
    left = sorted(Path(run.run_dir).glob("checkpoints/step_*.ckpt"))
    if left:
        raise ValueError(
            f"`hydra.run.dir` must be a folder without the checkpoints of another run, but {run.run_dir} has "
            f"{left[-1].name}"
        )


def check_places(run: FinetuneConfig) -> None:
    """Check that the checkpoint and the data of a finetuning exist, without torch.

    Raises:
        ValueError: one does not exist; the message names the key.
    """
    places = {"task.train": run.task.train} if run.trainer.num_epochs else {}
    for name, place in run.task.scored_sets().items():
        places[f"task.{'validation' if name in run.task.validation else 'test'}.{name}"] = place
    for key, place in places.items():
        if not is_on_hub(place) and not os.path.exists(place):
            raise ValueError(f"`{key}` must be a file or folder, or hub:<split>, but {place} does not exist")
    if not os.path.exists(run.ckpt):
        raise ValueError(f"`ckpt` must be a checkpoint or a run folder, but {run.ckpt} does not exist")


def hub_rows(
    task: TaskConfig, place: str, needed: tuple[str, ...], label: str = "", classes: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, row) of a split on the hub or in its cache; `task.hub_name` may also be a local folder.

    Args:
        label: column whose numbers are indices into `classes`.

    Raises:
        ValueError: the split cannot be loaded, lacks columns, or has the classes in a different order.
    """
    table = load_hub(task, place)
    source = "/".join(part for part in (task.hub_name, task.hub_subset, place.removeprefix(FROM_HUB)) if part)
    check_columns(source, table.column_names, needed)
    names = getattr(table.features.get(label), "names", None) or []
    if names != [*classes] and sorted(names) == sorted(classes):
        raise ValueError(f"{source}: the classes of `{label}` must be {', '.join(classes)}, but are {', '.join(names)}")
    for number, row in enumerate(table):
        yield f"row {number}", row


def load_hub(task: TaskConfig, place: str) -> Any:
    """Load the split of a data set, as `load_dataset`."""
    return load_dataset("task.hub_name", task.hub_name, task.hub_subset, place.removeprefix(FROM_HUB))


def fingerprint(task: TaskConfig, place: str) -> str:
    """Hash the content of a file, folder or split, so that changed data are encoded again."""
    if is_on_hub(place):
        return load_hub(task, place)._fingerprint
    digest, path = hashlib.sha256(), Path(place)
    # RACE's middle and high name the level; the suffix of a file determines how its bytes become rows.
    digest.update((path.name if path.is_dir() else "".join(path.suffixes[-2:])).encode())
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(repr((file.relative_to(path).as_posix(), file.stat().st_size)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
