"""A trained model, loaded at any layout; all weights come from the checkpoint, otherwise loading fails.

Our own checkpoints are read directly into this rank's shard. A Hugging Face folder is first converted into a temporary
folder by the importer, which compares the outputs of both implementations.
"""

import dataclasses
import hashlib
import json
import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .checkpoint import METADATA, TOKENIZER_FOLDER, Checkpoint, CheckpointMetadata, find_given
from .config import TransformerConfig
from .data.tokenizer import Tokenizer, load_tokenizer_at
from .hugging_face.conversion import describe_hugging_face, import_hugging_face
from .hugging_face.files import HuggingFaceReader
from .kernels import PLAIN, Kernels
from .models import build_model
from .parallel import ParallelContext, padding_of
from .runtime.ranks import Ranks
from .runtime.world import World, world_from_outside

_ALONE = Ranks()
_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "encoder.json")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """This rank's shard of a trained model, and its origin.

    Args:
        model: a `GPT` or `BERT` in evaluation mode, without gradients.
        checkpoint_id: hash of the weights' checksums and the model's configuration. It depends neither on the path nor
            on the layout of this run, but on the tp_size with which the checkpoint was written.
        path: the checkpoint or Hugging Face folder that was read.
        step: number of optimizer steps taken; 0 for a Hugging Face model.
    """

    model: nn.Module
    checkpoint_id: str
    path: Path
    step: int


def load_model(
    path: str | Path,
    context: ParallelContext,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ranks: Ranks = _ALONE,
    adapt: Callable[[TransformerConfig], TransformerConfig] | None = None,
    kernels: Kernels = PLAIN,
) -> LoadedModel:
    """Load this rank's shard of the model at `path`, with its weights rounded to `dtype`.

    Args:
        path: one of our checkpoints at any layout, a run folder (its latest checkpoint), or a folder of a Hugging Face
            GPT-2, BERT or Megatron-BERT.
        dtype: type of weights and arithmetic.
        ranks: all ranks of `context`.
        adapt: returns the configuration to build, of the same sizes but for the rows of its vocabulary.
        kernels: see `build_model`.

    Raises:
        AgreedError: the checkpoint is missing, damaged, incomplete, or not written by lmscale.
        ValueError: `context.tp_size` does not divide the model, or `ranks` are not those of `context`.

    Communicates:
        all-gathers of short texts over all ranks.
    """
    if ranks.size != context.tp_size * context.dp_size:  # one alone would wait for no other rank, and agree with none
        raise ValueError(f"`ranks` must be the {context.tp_size * context.dp_size} of `context`, but are {ranks.size}")
    # All ranks take that of the first one: a training may be saving another meanwhile.
    folder = ranks.broadcast(ranks.agree(partial(find_given, "ckpt", path), first_rank_only=True))
    load = _load_ours if (folder / METADATA).is_file() else _load_hugging_face
    return load(folder, context, ranks, adapt, {"dtype": dtype, "device": device, "kernels": kernels})


def describe_checkpoint(path: str | Path, key: str = "ckpt") -> tuple[TransformerConfig, Path]:
    """Read the configuration of the model at `path`, of its weights only names and sizes; returns it and its tokenizer
    folder.

    Raises:
        CheckpointError: as `load_model`, for errors in the metadata and for files of a wrong length.
        ValueError: the model is finetuned, or its masked-LM head is missing or untrained.
    """
    found = find_given(key, path)
    if not (found / METADATA).is_file():
        with HuggingFaceReader(found, key) as reader:
            return describe_hugging_face(reader, key), found
    checkpoint = Checkpoint.open(found)
    checkpoint.check_files()
    if "finetune" in checkpoint.metadata.state:
        raise ValueError(f"`{key}` must be a pretrained model, but {found} is finetuned")
    if any(name.startswith("lm_head.") for name in checkpoint.metadata.run.get("initialized", ())):
        raise ValueError(f"`{key}` must have a trained masked-LM head, but {found} has one that its import has drawn")
    return checkpoint.model_config(), found.parent / TOKENIZER_FOLDER


def load_saved_tokenizer(folder: Path, config: TransformerConfig) -> Tokenizer | None:
    """Load the tokenizer in `folder`; None if there is none.

    Raises:
        ValueError: a file cannot be read.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return load_tokenizer_at(folder, config.family)


def check_saved_tokenizer(key: str, path: str, folder: Path, config: TransformerConfig, used: Tokenizer) -> None:
    """Check that the model at `path`, whose tokenizer is in `folder`, was trained with the one `used`.

    Raises:
        ValueError: it has none there, or one that encodes otherwise.
    """
    own = load_saved_tokenizer(folder, config)
    if own is None:
        raise ValueError(f"`{key}` must have its tokenizer beside it, but there is none in {folder}")
    if not own.encodes_as(used):
        raise ValueError(
            f"`{key}` must have the tokenizer of the run, but that in {folder} differs; tokenizer.path= or "
            f"data=indexed with its tokenizer trains {path}'s students"
        )


def _load_ours(
    path: Path, context: ParallelContext, ranks: Ranks, adapt: Callable[..., Any] | None, options: dict[str, Any]
) -> LoadedModel:
    def open_intact() -> tuple[Checkpoint, TransformerConfig]:
        checkpoint = Checkpoint.open(path)
        checkpoint.check_intact(ranks.rank, ranks.size)
        return checkpoint, checkpoint.model_config()

    checkpoint, config = ranks.agree(open_intact)
    config = config if adapt is None else adapt(config)
    config.check_tensor_parallel(context.tp_size, context.pad_heads)
    model = build_model(config, context, seed=None, **options)
    ranks.agree(lambda: _load_weights(model, checkpoint, context))
    metadata = checkpoint.metadata
    return LoadedModel(model.eval().requires_grad_(False), _identify(metadata), path, metadata.step)


def _load_hugging_face(
    path: Path, context: ParallelContext, ranks: Ranks, adapt: Callable[..., Any] | None, options: dict[str, Any]
) -> LoadedModel:
    """Convert on the first rank of each host into a temporary folder, which all ranks of the host read."""
    is_first = (world_from_outside() or World()).local_rank == 0
    with ExitStack() as stack:

        def convert() -> Path:
            folder = tempfile.TemporaryDirectory(prefix="lmscale_import_", ignore_cleanup_errors=True)
            return import_hugging_face(path, Path(stack.enter_context(folder)) / "model")

        written = ranks.agree(convert if is_first else lambda: None)
        places = ranks.gather((socket.gethostname(), written))
        written = next(place for host, place in places if host == socket.gethostname() and place is not None)
        loaded = _load_ours(written, context, ranks, adapt, options)
        ranks.gather(None)  # all ranks have finished reading
        return dataclasses.replace(loaded, path=path)


def _load_weights(model: nn.Module, checkpoint: Checkpoint, context: ParallelContext) -> None:
    """Read every parameter; raises an error for a finetuned checkpoint, which lacks the model's heads."""
    tensors, padding = checkpoint.metadata.tensors, padding_of(model)
    for name, param in model.named_parameters():
        entry = tensors.get(f"model/{name}")
        if entry is not None and param.shard.shard_dim == 0 and param.shard.full_shape[0] > entry.shape[0]:
            padding[name] = param.shard.full_shape[0] - entry.shape[0]  # more rows of padding for the vocabulary
    with checkpoint.reader(padding) as reader:
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
