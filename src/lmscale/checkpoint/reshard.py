"""Convert a checkpoint to a different layout or vocabulary padding, weights and optimizer state, bitwise."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .atomic_folder import atomic_folder, check_target
from .checkpoint import Checkpoint, CheckpointReader
from .errors import CheckpointError
from .find import latest_checkpoint
from .metadata import CheckpointMetadata
from .offline import write_offline
from .tokenizer_files import TOKENIZER_FOLDER, find_tokenizer

# Tensors with one row per id, padded with zeros.
VOCABULARY = ("transformer.word_embedding.weight", "lm_head.bias")


def reshard(
    source: str | Path,
    target: str | Path,
    tp_size: int,
    vocab_multiple: int | None = None,
    tokenizer: str | Path | None = None,
) -> Path:
    """Rewrite a checkpoint for `tp_size` tensor ranks; memory holds one tensor.

    Only the layout and the requested padding change; step, counters and data order are kept.

    Args:
        source: a checkpoint, or a run folder (its latest one).
        target: a folder that does not exist yet, in which `step_<n>.ckpt` is created.
        vocab_multiple: the new `model.vocab_multiple`; None keeps it.
        tokenizer: tokenizer files to store with the checkpoint; None copies the source's `tokenizer/` if it exists.

    Returns:
        the new checkpoint.

    Raises:
        ValueError: the source cannot be used, `tp_size` does not divide the model, the target exists, or the disk is
            full.
    """
    checkpoint = Checkpoint.open(latest_checkpoint(source))
    checkpoint.check_intact()
    config, metadata = checkpoint.model_config(), checkpoint.metadata
    if vocab_multiple is not None:
        config = dataclasses.replace(config, vocab_multiple=vocab_multiple)
    config.check_tensor_parallel(tp_size)
    files = find_tokenizer(tokenizer, checkpoint.path.parent / TOKENIZER_FOLDER, config)
    entries = {}
    for key, entry in metadata.tensors.items():
        shape = entry.shape
        if key.partition("/")[2] in VOCABULARY:
            shape = (config.padded_vocab_size, *shape[1:])
        entries[key] = dataclasses.replace(entry, shape=shape, pieces=())
    changed = dataclasses.replace(
        metadata, layout={"tp_size": tp_size, "dp_size": 1}, model=config.to_dict(), tensors=entries, files={}
    )
    check_target(target, sum(entry.num_bytes for entry in entries.values()))
    with checkpoint.reader() as reader, atomic_folder(target) as folder:
        written = write_offline(folder, changed, tp_size, _read_all(reader, changed, config.vocab_size))
        if files is not None:
            files.copy_to(folder / TOKENIZER_FOLDER)
    return Path(target) / written.name


def _read_all(reader: CheckpointReader, changed: CheckpointMetadata, vocab_size: int) -> Iterator[tuple[str, Tensor]]:
    for key, entry in sorted(changed.tensors.items()):
        shape = reader.checkpoint.metadata.tensors[key].shape
        if entry.shape == shape:
            yield key, reader.read(key)
            continue
        if reader.read(key, vocab_size, shape[0]).any():
            raise CheckpointError(f"{key}: the rows of the padded vocabulary must be zero, but are not")
        tensor = torch.zeros(entry.shape, dtype=entry.dtype)
        tensor[:vocab_size] = reader.read(key, 0, vocab_size)
        yield key, tensor
