"""A trained model ready to be evaluated: every weight is one that a checkpoint holds, or there is no model.

Checkpoints of ours are read at any layout straight into this rank's shard. A Hugging Face folder is converted first,
into a temporary folder, by the importer, which runs both implementations and compares them.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ..checkpoint import (
    METADATA,
    TOKENIZER_FOLDER,
    CheckpointError,
    CheckpointMetadata,
    CheckpointReader,
    find_damage,
    read_metadata,
)
from ..checkpoint.hf_config import config_from_hf, read_hf_config
from ..checkpoint.hugging_face import import_hugging_face
from ..checkpoint.reshard import find_checkpoint
from ..config import TransformerConfig
from ..config.data import TokenizerConfig
from ..config.family import family_of
from ..data.tokenizer import Tokenizer, load_published_tokenizer
from ..models import build_model
from ..parallel import ParallelContext, choose_communicator

TIMEOUT = timedelta(minutes=30)  # of a collective: a rank that waits longer ends with an error
_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "encoder.json")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """This rank's shard of a trained model, and where it came from.

    Args:
        model: a `GPT` or `BERT` in evaluation mode, without gradients.
        tokenizer: the one whose files lie beside the checkpoint; None where there are none.
        checkpoint_id: hash of the weights' checksums and of the model's configuration. It does not depend on where the
            checkpoint lies or how it is read; the same weights written at another tp_size have another one.
        path: the checkpoint or the Hugging Face folder that was read.
        step: optimizer steps done; 0 for a Hugging Face model.
    """

    model: nn.Module
    config: TransformerConfig
    tokenizer: Tokenizer | None
    checkpoint_id: str
    path: Path
    step: int


def evaluation_groups(tp_size: int, dp_size: int, device_type: str = "cpu") -> ParallelContext:
    """This rank's place in the grid; joins the process group of the environment where there are several ranks.

    Args:
        device_type: `cuda` takes the GPU of the local rank and talks over nccl, `cpu` over gloo.

    Raises:
        ValueError: the world of the environment (`WORLD_SIZE`) is not tp_size x dp_size.

    Communicates:
        makes the groups of the grid, tensor ranks next to each other as in training, and on a CPU what they
        communicate through (`choose_communicator`).
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != tp_size * dp_size:
        raise ValueError(
            f"the world size must be `parallel.tp_size` x `parallel.dp_size` ({tp_size} x {dp_size}), "
            f"but {world_size} ranks were started"
        )
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if world_size == 1:
        return ParallelContext()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=TIMEOUT)
    mesh = init_device_mesh(device_type, (dp_size, tp_size), mesh_dim_names=("data", "tensor"))
    return ParallelContext(
        tp_rank=mesh.get_local_rank("tensor"),
        tp_size=tp_size,
        dp_rank=mesh.get_local_rank("data"),
        dp_size=dp_size,
        tp_group=mesh.get_group("tensor"),
        dp_group=mesh.get_group("data"),
        tp_communicator=choose_communicator(mesh.get_group("tensor"), TIMEOUT),
    )


def load_model(
    path: str | Path,
    context: ParallelContext,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """This rank's shard of the model at `path`, with exactly the weights that are there, rounded to `dtype`.

    Args:
        path: a checkpoint of ours at any layout, a run folder (its newest checkpoint), or a folder with a Hugging Face
            GPT-2, BERT or Megatron-BERT.
        dtype: of weights and arithmetic.

    Raises:
        CheckpointError: nothing is there, it is damaged, incomplete, or of something else. The same on all ranks.
        ValueError: `context.tp_size` does not divide the model.

    Communicates:
        a few short texts a rank over the world.
    """
    path = Path(path)
    checkpoint = find_checkpoint(path)
    if not (checkpoint / METADATA).is_file() and _is_hugging_face(path):
        return _load_hugging_face(path, context, dtype, device)
    if not path.exists():
        raise CheckpointError(f"`ckpt` must be a checkpoint, a run folder or a Hugging Face folder, but {path} is not")
    return _load_ours(checkpoint, context, dtype, device)


def find_config(path: str | Path) -> TransformerConfig | None:
    """The configuration of a checkpoint of ours, without reading its weights; None for a Hugging Face folder.

    Raises:
        CheckpointError: see `load_model`, as far as the metadata tell.
    """
    checkpoint = find_checkpoint(path)
    if not (checkpoint / METADATA).is_file() and _is_hugging_face(Path(path)):
        return None
    return _config_of(checkpoint, read_metadata(checkpoint))


def describe_checkpoint(path: str | Path) -> tuple[TransformerConfig, Path]:
    """The model at `path`, without reading its weights, and the folder where its tokenizer would be.

    Raises:
        CheckpointError: see `load_model`, as far as the metadata tell.
    """
    config, checkpoint = find_config(path), find_checkpoint(path)
    if config is None:
        return config_from_hf(read_hf_config(checkpoint / "config.json"), None), checkpoint
    return config, checkpoint.parent / TOKENIZER_FOLDER


def find_tokenizer_beside(folder: Path, config: TransformerConfig) -> Tokenizer | None:
    """The tokenizer whose files lie in `folder`, or None.

    Raises:
        ValueError: files that cannot be read.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    kind = family_of(config.family).corpus.tokenizer
    return load_published_tokenizer(TokenizerConfig(kind, path=str(folder)), config.family)


def _load_ours(path: Path, context: ParallelContext, dtype: torch.dtype, device: torch.device | str) -> LoadedModel:
    metadata, config = _agree(lambda: _check(path, context), context)
    config.check_tensor_parallel(context.tp_size)
    model = build_model(config, context, seed=None, dtype=dtype, device=device)
    _agree(lambda: _fill(model, path, context), context)
    tokenizer = find_tokenizer_beside(path.parent / TOKENIZER_FOLDER, config)
    return LoadedModel(model.eval().requires_grad_(False), config, tokenizer, _identify(metadata), path, metadata.step)


def _load_hugging_face(
    path: Path, context: ParallelContext, dtype: torch.dtype, device: torch.device | str
) -> LoadedModel:
    """The first rank of each host converts into a folder of that host, which all its ranks read and which then goes."""
    is_first = int(os.environ.get("LOCAL_RANK", "0")) == 0 or not dist.is_initialized()
    folder = tempfile.mkdtemp(prefix="lmscale_import_") if is_first else None
    try:
        convert = (lambda: import_hugging_face(path, Path(folder) / "model")) if is_first else lambda: None
        written = _agree(convert, context)
        places = _gather((socket.gethostname(), written), context)
        written = next(place for host, place in places if host == socket.gethostname() and place is not None)
        loaded = _load_ours(written, context, dtype, device)
        _gather(None, context)  # nobody reads any more
        return dataclasses.replace(loaded, path=path)
    finally:
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)


def _is_hugging_face(path: Path) -> bool:
    """Whether a folder has transformers' `config.json`; a run folder has another of that name."""
    try:
        return "model_type" in json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _check(path: Path, context: ParallelContext) -> tuple[CheckpointMetadata, TransformerConfig]:
    """The metadata and the model they name, after every byte of this rank's share agreed with its checksum."""
    metadata = read_metadata(path)
    rank = context.dp_rank * context.tp_size + context.tp_rank
    damage = find_damage(path, metadata, rank, context.tp_size * context.dp_size)
    if damage is not None:
        raise CheckpointError(f"checkpoint {path.name} is damaged: {damage}")
    return metadata, _config_of(path, metadata)


def _config_of(path: Path, metadata: CheckpointMetadata) -> TransformerConfig:
    try:
        return TransformerConfig.from_dict(metadata.model)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path.name}: {METADATA} names a model that cannot be ({error})") from None


def _fill(model: nn.Module, path: Path, context: ParallelContext) -> None:
    """Read every parameter, and refuse a checkpoint whose tensors are not exactly those of the model."""
    parameters = dict(model.named_parameters())
    with CheckpointReader(path) as reader:
        entries = reader.metadata.tensors
        there = {key.removeprefix("model/") for key in entries if key.startswith("model/")}
        for problem, names in (("lacks", parameters.keys() - there), ("has no place for", there - parameters.keys())):
            if names:
                whose = f"checkpoint {path.name}" if problem == "lacks" else f"the model of checkpoint {path.name}"
                raise CheckpointError(f"{whose} {problem} {min(names)} ({len(names)} such tensors)")
        for name, param in parameters.items():
            entry, spec = entries[f"model/{name}"], param.shard
            if (entry.shape, entry.shard_dim) != (tuple(spec.full_shape), spec.shard_dim):
                raise CheckpointError(
                    f"checkpoint {path.name}: {name} must be {tuple(spec.full_shape)}, cut along {spec.shard_dim}, "
                    f"but is {entry.shape}, cut along {entry.shard_dim}"
                )
            reader.read_into(f"model/{name}", param.data, context.tp_rank)


def _identify(metadata: CheckpointMetadata) -> str:
    """sha256 over the model's configuration and the checksums of the weights' pieces, 16 digits of it."""
    weights = {
        key: [str(entry.dtype), entry.shape, [(piece.start, piece.stop, piece.checksum) for piece in entry.pieces]]
        for key, entry in metadata.tensors.items()
        if key.startswith("model/")
    }
    text = json.dumps([metadata.model, weights], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _agree(action: Callable[[], T], context: ParallelContext) -> T:
    """`action()` on every rank; where it fails on one, the first one's error is raised on all of them."""
    result, problem = None, None
    try:
        result = action()
    except (ValueError, OSError) as error:
        problem = f"{error}"
    problem = next((text for text in _gather(problem, context) if text is not None), None)
    if problem is not None:
        raise CheckpointError(problem)
    return result


def _gather(item: T, context: ParallelContext) -> list[T]:
    """Every rank's small item by rank, on all ranks."""
    items = [item] * (context.tp_size * context.dp_size)
    if len(items) > 1:
        dist.all_gather_object(items, item)
    return items
