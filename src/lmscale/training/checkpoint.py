"""Checkpoints: one safetensors file a tensor rank and JSON metadata, in a directory that appears only when complete.

    step_120.ckpt/
      tp_0_of_2.safetensors   "model/<name>", "exp_avg/<name>", ...: shards, written without gathering
      tp_1_of_2.safetensors
      metadata.json           step, layout, model, shapes and shard dimensions, counters, file sizes

Nothing in it is code: safetensors and JSON only. A reader at another layout takes the slices it needs.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..parallel import ParallelContext, ShardSpec

FORMAT_VERSION = 1
METADATA = "metadata.json"
_NAME = re.compile(r"step_(\d+)\.ckpt")


def checkpoint_name(step: int) -> str:
    """Directory name of the checkpoint after `step` optimizer steps."""
    return f"step_{step}.ckpt"


def checkpoint_step(path: Path) -> int:
    """The step in the name of a checkpoint that `list_checkpoints` has found."""
    return int(_NAME.fullmatch(path.name).group(1))


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest step first. Unfinished ones have another name and are not listed."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / METADATA).is_file()]
    return sorted(found, key=checkpoint_step)


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The JSON metadata of a checkpoint.

    Raises:
        ValueError: `path` is not a checkpoint, of another format version, or one of its files is missing or truncated.
    """
    path = Path(path)
    if not (path / METADATA).is_file():
        raise ValueError(f"`resume` must name a checkpoint directory with {METADATA}, but {path} has none")
    try:
        metadata = json.loads((path / METADATA).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"checkpoint {path.name}: {METADATA} is not JSON ({error})") from None
    if metadata.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"checkpoint {path.name}: format_version must be {FORMAT_VERSION}, but is {metadata.get('format_version')}"
        )
    for name, size in metadata["files"].items():
        actual = (path / name).stat().st_size if (path / name).is_file() else "missing"
        if actual != size:
            raise ValueError(f"checkpoint {path.name}: {name} must have {size} bytes, but is {actual}")
    return metadata


def check_model(metadata: dict[str, Any], model: dict[str, Any], path: str | Path) -> None:
    """Refuse a checkpoint of another model, listing every difference at once.

    Raises:
        ValueError: any of the sizes, the norm order or the numerics that define the function differ. Dropout,
            recompute and the attention kernel may be changed freely.
    """
    free = {"hidden_dropout", "attention_dropout", "embedding_dropout", "recompute", "attention"}
    free |= {"initializer_std", "scale_residual_init"}  # of the beginning, which is past
    saved = metadata["model"]
    differences = [
        f"{key} is {model.get(key)!r} here and {saved.get(key)!r} there"
        for key in sorted((saved.keys() | model.keys()) - free)
        if saved.get(key) != model.get(key)
    ]
    if differences:
        raise ValueError(f"checkpoint {Path(path).name} is of another model: {'; '.join(differences)}")


def save_checkpoint(checkpoint: dict[str, Any], path: str | Path, module: Any, context: ParallelContext) -> None:
    """Write Lightning's checkpoint dict; called by every rank.

    Data rank 0 of each tensor rank writes its shard; rank 0 adds the metadata, syncs everything to disk and renames.

    Communicates:
        barriers over the world.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.unfinished")
    is_writer, is_first = context.dp_rank == 0, context.dp_rank == 0 and context.tp_rank == 0
    if is_first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    _barrier()
    optimizer = checkpoint.pop("optimizer_states")[0]
    tensors = {f"model/{name}": tensor for name, tensor in checkpoint.pop("state_dict").items()}
    tensors |= optimizer["tensors"]
    if is_writer:
        name = f"tp_{context.tp_rank}_of_{context.tp_size}.safetensors"
        save_file({key: t.detach().contiguous().cpu() for key, t in tensors.items()}, temporary / name)
        _sync_to_disk(temporary / name)
    _barrier()
    if is_first:
        specs = {name: p.shard for name, p in module.model.named_parameters()}
        metadata = {
            "format_version": FORMAT_VERSION,
            "step": module.completed_steps,
            "layout": {"tp_size": context.tp_size, "dp_size": context.dp_size},
            "model": module.config.to_dict(),
            "tensors": {key: _describe(t, specs[key.split("/", 1)[1]]) for key, t in tensors.items()},
            "files": {f.name: f.stat().st_size for f in sorted(temporary.glob("*.safetensors"))},
            "optimizer": optimizer["counters"],
            "run": module.run.to_dict(),
            "lightning": checkpoint,
        }
        (temporary / METADATA).write_text(json.dumps(metadata, indent=1), encoding="utf-8")
        _sync_to_disk(temporary / METADATA)
        _sync_to_disk(temporary)
        shutil.rmtree(path, ignore_errors=True)  # the same step saved twice: the newer one stands
        os.rename(temporary, path)
        _sync_to_disk(path.parent)
    _barrier()


def load_checkpoint(path: str | Path, module: Any, context: ParallelContext) -> dict[str, Any]:
    """Read this rank's part of a checkpoint into the dict Lightning expects; called by every rank.

    Raises:
        ValueError: see `read_metadata` and `check_model`.
    """
    path = Path(path)
    metadata = read_metadata(path)
    check_model(metadata, module.config.to_dict(), path)
    tensors = read_shard(path, metadata, context)
    model = {key.removeprefix("model/"): t for key, t in tensors.items() if key.startswith("model/")}
    rest = {key: t for key, t in tensors.items() if not key.startswith("model/")}
    return metadata["lightning"] | {
        "state_dict": model,
        "optimizer_states": [{"tensors": rest, "counters": metadata["optimizer"]}],
    }


def read_shard(path: Path, metadata: dict[str, Any], context: ParallelContext) -> dict[str, Tensor]:
    """Tensors of one rank at any layout, read slice by slice from the files of the layout that wrote them.

    Args:
        context: its tp_rank and tp_size say which slice; nothing is communicated.
    """
    old_size = metadata["layout"]["tp_size"]
    names = [f"tp_{rank}_of_{old_size}.safetensors" for rank in range(old_size)]
    opened = {}
    result = {}
    for key, entry in metadata["tensors"].items():
        dim = entry["shard_dim"]
        pieces = []
        if dim is None:
            ranges = [(0, slice(None))]
        else:
            first, last = context.start(entry["shape"][dim]), context.start(entry["shape"][dim])
            last += context.shard(entry["shape"][dim])
            part = entry["shape"][dim] // old_size
            ranges = [
                (rank, slice(max(first - rank * part, 0), min(last - rank * part, part)))
                for rank in range(first // part, -(-last // part))
            ]
        for rank, piece in ranges:
            if rank not in opened:
                opened[rank] = safe_open(path / names[rank], framework="pt")
            view = opened[rank].get_slice(key)
            pieces.append(view[:] if dim is None else view[(slice(None),) * dim + (piece,)])
        result[key] = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)
    return result


def remove_checkpoint(path: str | Path) -> None:
    """Delete a checkpoint so that a half-deleted one never looks complete: rename first."""
    path = Path(path)
    doomed = path.with_name(f".{path.name}.deleting")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _describe(tensor: Tensor, spec: ShardSpec) -> dict[str, Any]:
    return {
        "shape": list(spec.full_shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shard_dim": spec.shard_dim,
    }


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
