"""Load a trained model for evaluation; all weights come from the checkpoint, otherwise loading fails.

Our own checkpoints are read at any layout directly into this rank's shard. A Hugging Face folder is first converted
into a temporary folder by the importer, which compares the outputs of both implementations.
"""

import dataclasses
import hashlib
import json
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

from ..checkpoint import (
    METADATA,
    TOKENIZER_FOLDER,
    CheckpointError,
    CheckpointMetadata,
    CheckpointReader,
    check_files,
    find_damage,
    read_metadata,
)
from ..checkpoint.hf_config import config_from_hf, read_hf_config
from ..checkpoint.hugging_face import import_hugging_face
from ..checkpoint.metadata import is_hugging_face
from ..checkpoint.model_tensors import config_of
from ..checkpoint.reshard import find_checkpoint
from ..config import TransformerConfig
from ..config.data import TokenizerConfig
from ..config.family import family_of
from ..data.tokenizer import Tokenizer, load_published_tokenizer
from ..launcher import World, world_from_outside
from ..models import build_model
from ..parallel import ParallelContext, make_context, padding_of

USER_ERROR = 2  # exit code of a rank for an error that the user must correct, as in cli/entry_point.py
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
TIMEOUT = timedelta(minutes=30)  # of a collective: a rank that waits longer fails
_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "encoder.json")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """This rank's shard of a trained model, and its origin.

    Args:
        model: a `GPT` or `BERT` in evaluation mode, without gradients.
        tokenizer: the tokenizer saved with the checkpoint; None if there is none.
        checkpoint_id: hash of the weights' checksums and the model's configuration. It depends neither on the path nor
            on the layout of this run, but on the tp_size with which the checkpoint was written.
        path: the checkpoint or Hugging Face folder that was read.
        step: number of optimizer steps taken; 0 for a Hugging Face model.
    """

    model: nn.Module
    config: TransformerConfig
    tokenizer: Tokenizer | None
    checkpoint_id: str
    path: Path
    step: int


def evaluation_groups(tp_size: int, dp_size: int, device_type: str = "cpu", pad_heads: bool = False) -> ParallelContext:
    """Create this rank's parallel context; with several ranks, join the process group of the environment.

    Args:
        device_type: `cuda` uses the GPU of the local rank and nccl, `cpu` uses gloo.
        pad_heads: see `Layout`.

    Raises:
        ValueError: the number of ranks that were started is not tp_size x dp_size, or a rank does not see the GPUs of
            its node's ranks.

    Communicates:
        as `make_context`.
    """
    world = world_from_outside() or World()
    if world.size != tp_size * dp_size:
        raise ValueError(
            f"the world size must be `parallel.tp_size` x `parallel.dp_size` ({tp_size} x {dp_size}), "
            f"but {world.size} ranks were started"
        )
    if device_type == "cuda":
        if torch.cuda.device_count() < world.local_size:
            raise ValueError(
                f"every rank must see the GPUs of all {world.local_size} ranks of its node, but sees "
                f"{torch.cuda.device_count()} (Slurm: --gpus-per-node, not --gpus-per-task)"
            )
        torch.cuda.set_device(world.local_rank)
    if world.size == 1:
        return ParallelContext()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=TIMEOUT)
    return make_context({"data": dp_size, "tensor": tp_size}, device_type, TIMEOUT, pad_heads=pad_heads)


def load_model(
    path: str | Path,
    context: ParallelContext,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """Load this rank's shard of the model at `path`, with its weights rounded to `dtype`.

    Args:
        path: one of our checkpoints at any layout, a run folder (its latest checkpoint), or a folder of a Hugging Face
            GPT-2, BERT or Megatron-BERT.
        dtype: type of weights and arithmetic.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, incomplete, or not written by lmscale; raised on all ranks.
        ValueError: `context.tp_size` does not divide the model.

    Communicates:
        all-gathers of short texts over all ranks.
    """
    path = Path(path)
    checkpoint = find_checkpoint(path)
    if not (checkpoint / METADATA).is_file() and is_hugging_face(path):
        return _load_hugging_face(path, context, dtype, device)
    if not path.exists():
        raise CheckpointError(f"`ckpt` must be a checkpoint, a run folder or a Hugging Face folder, but {path} is not")
    return _load_ours(checkpoint, context, dtype, device)


def describe_checkpoint(path: str | Path) -> tuple[TransformerConfig, Path]:
    """Read the configuration of the model at `path` without its weights; returns it and its tokenizer folder.

    Raises:
        CheckpointError: as `load_model`, for errors in the metadata.
    """
    if not Path(path).exists():
        kinds = "a checkpoint, a run folder or a Hugging Face folder"
        raise CheckpointError(f"`ckpt` must be {kinds}, but {path} does not exist")
    checkpoint = find_checkpoint(path)
    if not (checkpoint / METADATA).is_file() and is_hugging_face(Path(path)):
        return config_from_hf(read_hf_config(checkpoint / "config.json"), None), checkpoint
    metadata = read_metadata(checkpoint)
    check_files(checkpoint, metadata)
    return config_of(checkpoint, metadata), checkpoint.parent / TOKENIZER_FOLDER


def load_saved_tokenizer(folder: Path, config: TransformerConfig) -> Tokenizer | None:
    """Load the tokenizer in `folder`; None if there is none.

    Raises:
        ValueError: a file cannot be read.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    kind = family_of(config.family).corpus.tokenizer
    return load_published_tokenizer(TokenizerConfig(kind, path=str(folder)), config.family)


def _load_ours(path: Path, context: ParallelContext, dtype: torch.dtype, device: torch.device | str) -> LoadedModel:
    metadata, config = agree(lambda: _check(path, context), context)
    config.check_tensor_parallel(context.tp_size, context.pad_heads)
    model = build_model(config, context, seed=None, dtype=dtype, device=device)
    agree(lambda: _load_weights(model, path, context), context)
    tokenizer = load_saved_tokenizer(path.parent / TOKENIZER_FOLDER, config)
    return LoadedModel(model.eval().requires_grad_(False), config, tokenizer, _identify(metadata), path, metadata.step)


def _load_hugging_face(
    path: Path, context: ParallelContext, dtype: torch.dtype, device: torch.device | str
) -> LoadedModel:
    """Convert on the first rank of each host into a temporary folder, which all ranks of the host read."""
    is_first = (world_from_outside() or World()).local_rank == 0
    folder = tempfile.mkdtemp(prefix="lmscale_import_") if is_first else None
    try:
        convert = (lambda: import_hugging_face(path, Path(folder) / "model")) if is_first else lambda: None
        written = agree(convert, context)
        places = gather((socket.gethostname(), written), context)
        written = next(place for host, place in places if host == socket.gethostname() and place is not None)
        loaded = _load_ours(written, context, dtype, device)
        gather(None, context)  # all ranks have finished reading
        return dataclasses.replace(loaded, path=path)
    finally:
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)


def _check(path: Path, context: ParallelContext) -> tuple[CheckpointMetadata, TransformerConfig]:
    """Verify this rank's share of the files; returns the metadata and the model's configuration."""
    metadata = read_metadata(path)
    rank = context.dp_rank * context.tp_size + context.tp_rank
    damage = find_damage(path, metadata, rank, context.tp_size * context.dp_size)
    if damage is not None:
        raise CheckpointError(f"checkpoint {path.name} is damaged: {damage}")
    return metadata, config_of(path, metadata)


def _load_weights(model: nn.Module, path: Path, context: ParallelContext) -> None:
    """Read every parameter; raises an error for a finetuned checkpoint, which lacks the model's heads."""
    with CheckpointReader(path, padding_of(model)) as reader:
        for name, param in model.named_parameters():
            reader.read_into(f"model/{name}", param.data, context.tp_rank)


def _identify(metadata: CheckpointMetadata) -> str:
    """Return 16 digits of the sha256 of the model's configuration and the weights' checksums."""
    weights = {
        key: [str(entry.dtype), entry.shape, [(piece.start, piece.stop, piece.checksum) for piece in entry.pieces]]
        for key, entry in metadata.tensors.items()
        if key.startswith("model/")
    }
    text = json.dumps([metadata.model, weights], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def agree(action: Callable[[], T], context: ParallelContext) -> T:
    """Run `action()` on every rank; if it fails on any, raise the error of the lowest such rank on all ranks.

    Raises:
        CheckpointError: `action` has raised a ValueError or an OSError on some rank.

    Communicates:
        all-gathers of one short text over all ranks.
    """
    result, problem = None, None
    try:
        result = action()
    except (ValueError, OSError) as error:
        problem = f"{error}"
    problem = next((text for text in gather(problem, context) if text is not None), None)
    if problem is not None:
        raise CheckpointError(problem)
    return result


def gather(item: T, context: ParallelContext) -> list[T]:
    """All-gather a small item; returns those of all ranks, ordered by rank.

    Communicates:
        one object per rank over the world.
    """
    items = [item] * (context.tp_size * context.dp_size)
    if len(items) > 1:
        dist.all_gather_object(items, item)
    return items
