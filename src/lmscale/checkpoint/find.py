"""Find checkpoints: their names, those of a folder, and what the path of a key leads to."""

import json
import re
from pathlib import Path

from .errors import CheckpointError
from .metadata import METADATA

PUBLISHED_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # of a Hugging Face model in one file
REPLACED = ".replaced"  # ends the name of a complete checkpoint while a new one of the same step takes its place
_NAME = re.compile(rf"step_(\d+)\.ckpt({re.escape(REPLACED)})?")


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint after `step` optimizer steps."""
    return f"step_{step}.ckpt"


def checkpoint_step(path: Path) -> int | None:
    """Return the step in the directory name of a checkpoint; None for any other name."""
    found = _NAME.fullmatch(path.name)
    return found and int(found.group(1))


def list_checkpoints(folder: str | Path) -> list[Path]:
    """List the checkpoints in `folder`, by ascending step.

    Unfinished checkpoints have other names. One that was being replaced is listed if its successor is missing. A
    directory without metadata is listed, because only complete checkpoints get such a name; `Checkpoint.open`
    reports what is wrong with it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = {}
    for path in sorted(folder.iterdir(), reverse=True):  # replaced ones first
        step = checkpoint_step(path)
        if step is not None and path.is_dir():
            found[step] = path
    return [path for _, path in sorted(found.items())]


def latest_checkpoint(path: str | Path) -> Path:
    """Find the checkpoint at `path`: the path itself, or the latest one in a run folder or a folder of checkpoints.

    A path that is neither is returned unchanged; opening it reports the error.
    """
    path = Path(path)
    if (path / METADATA).is_file():
        return path
    found = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    return found[-1] if found else path


def find_given(key: str, path: str | Path, kinds: str = "a checkpoint, a run folder or a Hugging Face folder") -> Path:
    """Return the checkpoint or the Hugging Face model to which the path of a key leads, without reading either.

    Raises:
        CheckpointError: it does not; the message names the key.
    """
    try:
        found = latest_checkpoint(path)
        if not is_hugging_face(found):
            check_is_checkpoint(found)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"`{key}` must be {kinds}, but {error}") from None
    return found


def check_is_checkpoint(path: Path) -> None:
    """Check that `path` is a checkpoint of this package, and otherwise report what it seems to be.

    Raises:
        CheckpointError: it is a file, a directory without `metadata.json`, or not an lmscale checkpoint.
    """
    if path.is_file():
        raise CheckpointError(f"{path.name} is a file, not a directory; pickled files are never read")
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist")
    if (path / METADATA).is_file():
        return
    if (path / ".metadata").exists() or any(path.glob("*.distcp")):
        what = "a torch.distributed.checkpoint directory, whose pickles could run code; they are not read"
    elif is_hugging_face(path):
        what = f"a Hugging Face model; import it: python src/convert.py source={path} target=NEW_FOLDER"
    else:
        other = ", and its config.json is not one of Hugging Face" if (path / "config.json").is_file() else ""
        what = f"not a checkpoint: it has no {METADATA}{other}"
    raise CheckpointError(f"{path} is {what}")


def is_hugging_face(path: Path) -> bool:
    """Whether a folder has a config.json of transformers: with a model type, or (files of 2019) beside weights."""
    try:
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    names = (f"{name}{index}" for name in PUBLISHED_WEIGHTS for index in ("", ".index.json"))
    return isinstance(values, dict) and ("model_type" in values or any((path / name).is_file() for name in names))
