"""Models of Hugging Face read and written: tensor by tensor, at any layout of ours, compared before they get a name."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import (
    TOKENIZER_FOLDER,
    Checkpoint,
    CheckpointError,
    CheckpointMetadata,
    CheckpointReader,
    TensorEntry,
    latest_checkpoint,
    write_offline,
)
from ..checkpoint.atomic_folder import atomic_folder, check_target
from ..checkpoint.model_tensors import Shape, meta_model, model_shapes
from ..checkpoint.tensor_file import num_bytes
from ..checkpoint.tokenizer_files import find_tokenizer
from ..config import TransformerConfig
from ..config.checks import list_some
from ..models import build_model
from ..models.hugging_face import TensorPair, model_of
from ..parallel import ParallelContext
from .compare import compare_models
from .config import config_from_hf, config_to_hf, generation_to_hf, hf_model, read_hf_config
from .files import HuggingFaceReader, write_hf_files
from .finetuned_head import FinetunedHead, PublishedHead
from .model_card import CARD, losses_of, model_card

_log = logging.getLogger(__name__)


def export_hugging_face(
    source: str | Path,
    target: str | Path,
    dtype: torch.dtype = torch.float32,
    max_file_bytes: int = 5 * 10**9,
    tokenizer: str | Path | None = None,
    head: PublishedHead | None = None,
) -> Path:
    """Write a checkpoint of ours as `GPT2LMHeadModel`, `BertForPreTraining` or `MegatronBertForPreTraining`.

    A finetuned one becomes `BertForSequenceClassification` and so on.

    Memory holds two layers at most, or two copies of the largest tensor.

    Args:
        source: a checkpoint of any layout, or a run folder (its newest one).
        target: a folder that does not exist yet.
        dtype: type of the written weights, rounded to nearest.
        tokenizer: its files or folder; None takes `tokenizer/` beside the source, if it is there.
        head: of a finetuned checkpoint.

    Raises:
        ValueError: the source cannot be used or has no counterpart; what was written does not compute the same.
    """
    checkpoint = Checkpoint.open(latest_checkpoint(source))
    checkpoint.check_intact()
    own_config, path, metadata = checkpoint.model_config(), checkpoint.path, checkpoint.metadata
    model, config = model_of(own_config), own_config.as_standard()
    build, settings, max_length = meta_model, {}, None
    if head is not None:
        model = model.with_head(head.kind)
        build, max_length = head.build, head.max_seq_length
        settings = head.settings | {"architectures": [model.model_class]}
    files = find_tokenizer(tokenizer, path.parent / TOKENIZER_FOLDER, config)
    dtype_name = str(dtype).removeprefix("torch.")
    token_ids = model.token_ids(files.ids if files else None, config)
    published = config_to_hf(config, dtype_name, token_ids, **settings)
    if head is not None:
        _set_dropout(head, published, model.model_class)
    generation = generation_to_hf(config, token_ids)
    our_shapes = model_shapes(config, build)
    pairs = [pair for pair in model.pairs(config) if pair.ours in our_shapes]
    # Those of the heads: the rest has been checked.
    missing = sorted(f"model/{name}" for name in our_shapes if f"model/{name}" not in metadata.tensors)
    if missing:
        raise CheckpointError(f"checkpoint {path.name} lacks {list_some(missing)}")
    for name, (shape, _) in our_shapes.items():
        found = metadata.tensors[f"model/{name}"].shape
        if found != shape:
            raise CheckpointError(f"checkpoint {path.name}: model/{name} must be {shape}, but is {found}")
    shapes = {pair.theirs: (_their_shape(pair, our_shapes, config), dtype) for pair in pairs}
    check_target(target, sum(num_bytes(*entry) for entry in shapes.values()))
    with _FoldedReader(checkpoint, own_config) as reader, atomic_folder(target) as folder:
        write_hf_files(folder, shapes, _read_theirs(reader, pairs, config, dtype), max_file_bytes)
        published.save_pretrained(folder)
        if generation is not None:
            generation.save_pretrained(folder)
        if files is not None:
            files.copy_to(folder, max_length)
        with HuggingFaceReader(folder, model=model) as written:
            compare_models(reader, written, config, rounded_to=dtype, build=build)
        about = dtype_name, Path(target).name, files is not None, losses_of(checkpoint)
        card = model_card(metadata, config, model.model_class, *about, head)
        (folder / CARD).write_text(card, encoding="utf-8")
    return Path(target)


def _their_shape(pair: TensorPair, our_shapes: dict[str, Shape], config: TransformerConfig) -> tuple[int, ...]:
    return tuple(pair.to_theirs(torch.empty(our_shapes[pair.ours][0], device="meta"), config).shape)


def _set_dropout(head: PublishedHead, published: Any, model_class: str) -> None:
    if hasattr(published, "classifier_dropout"):
        published.classifier_dropout = head.dropout
    elif head.dropout not in (None, published.hidden_dropout_prob):
        _log.info(
            "%s has no dropout of its own before the head (here %g): trained further, it takes hidden_dropout (%g); "
            "its outputs in evaluation are the same",
            *(model_class, head.dropout, published.hidden_dropout_prob),
        )


class _FoldedReader(CheckpointReader):
    """Reads weights with the multipliers of their parametrization in them, which transformers does not have."""

    def __init__(self, checkpoint: Checkpoint, config: TransformerConfig) -> None:
        super().__init__(checkpoint)
        self.config, self.fold = config, model_of(config).fold

    def read(self, key: str, first: int = 0, last: int | None = None) -> Tensor:
        """Read a logical tensor; what is read by rows has no multiplier."""
        return self.fold(key.removeprefix("model/"), super().read(key, first, last), self.config)


def _read_theirs(
    reader: CheckpointReader, pairs: list[TensorPair], config: TransformerConfig, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name, group in itertools.groupby(pairs, key=lambda pair: pair.ours):
        ours = reader.read(f"model/{name}")
        for pair in group:
            yield pair.theirs, pair.to_theirs(ours, config).to(dtype)


def import_hugging_face(
    source: str | Path,
    target: str | Path,
    tp_size: int = 1,
    vocab_multiple: int | None = None,
    tokenizer: str | Path | None = None,
    initialize_missing_heads: bool = False,
    seed: int = 1234,
    head: FinetunedHead | None = None,
) -> Path:
    """Write a folder of Hugging Face's GPT-2, BERT or Megatron-BERT as a checkpoint of ours at step 0, weights alone.

    Half types become fp32, which holds them exactly. Memory holds two layers at most, or the word embedding twice.

    Args:
        target: a folder that does not exist yet; `step_0.ckpt` is made in it, and `tokenizer/` where one is known.
        vocab_multiple: see `TransformerConfig`; None: its default.
        tokenizer: its files or folder; None takes those of `source`, if any.
        initialize_missing_heads: draw heads that the source lacks from `seed`, as a new model's would be.
        head: of a finetuned source.

    Returns:
        the checkpoint.

    Raises:
        ValueError: a key of the configuration or a tensor that has no place in ours, one that is missing, a target
            that exists, a full disk, or weights that do not compute the same here.
    """
    model, build, state = None, meta_model, {}
    if head is not None:
        model = hf_model(read_hf_config(Path(source) / "config.json")).with_head(head.kind)
        build, state = head.build, {"finetune": {"kind": head.kind, "classes": list(head.classes)}}
    with HuggingFaceReader(source, model=model) as reader:
        config = config_from_hf(reader.values, vocab_multiple)
        config.check_tensor_parallel(tp_size)
        our_shapes, pairs, fresh = _match_tensors(reader, config, build, initialize_missing_heads)
        files = find_tokenizer(tokenizer, Path(source), config)
        entries = {f"model/{name}": _entry(reader, pairs, name, *found) for name, found in our_shapes.items()}
        metadata = CheckpointMetadata(
            step=0,
            layout={"tp_size": tp_size, "dp_size": 1},
            model=config.to_dict(),
            tensors=entries,
            files={},
            optimizer={},
            run={"converted_from": str(source), "model_type": reader.model.model_type, "initialized": sorted(fresh)},
            state=state,
        )
        check_target(target, sum(entry.num_bytes for entry in entries.values()))
        with atomic_folder(target) as folder:
            heads = _draw_heads(config, fresh, seed) if fresh else {}
            written = write_offline(folder, metadata, tp_size, _read_ours(reader, pairs, entries, heads, config))
            with Checkpoint.open(written).reader() as ours:
                compare_models(ours, reader, config, drawn=fresh, build=build)
            if files is not None:
                files.copy_to(folder / TOKENIZER_FOLDER)
    return Path(target) / written.name


def describe_hugging_face(reader: HuggingFaceReader, key: str) -> TransformerConfig:
    """The configuration of a model that `import_hugging_face` takes, heads included; reads no weights.

    Args:
        key: of the folder in the configuration, for messages.

    Raises:
        ValueError: as `import_hugging_face`, but with the key, and not for weights that compute otherwise.
    """
    config = config_from_hf(reader.values)
    try:
        _match_tensors(reader, config)
    except CheckpointError as error:
        raise CheckpointError(f"`{key}` must be a whole pretrained model, but {error}") from None
    return config


def _entry(
    reader: HuggingFaceReader, pairs: list[TensorPair], name: str, shape: tuple[int, ...], dim: int | None
) -> TensorEntry:
    found = [reader.dtype(pair.theirs) for pair in pairs if pair.ours == name and pair.theirs in reader.names()]
    return TensorEntry(shape, functools.reduce(torch.promote_types, found, torch.float32), dim)


def _match_tensors(
    reader: HuggingFaceReader,
    config: TransformerConfig,
    build: Callable[..., Any] = meta_model,
    may_initialize: bool = False,
) -> tuple[dict[str, Shape], list[TensorPair], set[str]]:
    """Check that every tensor of theirs has a place in ours with the right shape, and the other way round.

    Returns:
        our shapes, the pairs, and our names of the tensors that must be initialized.
    """
    if config.num_layers > len(reader.names()):  # before the names are listed: it may be a billion
        key = reader.model.their_key("num_layers")
        raise CheckpointError(
            f"`{key}` of config.json must be at most the {len(reader.names())} tensors of {reader.folder}, "
            f"but is {config.num_layers}"
        )
    our_shapes = model_shapes(config, build)
    pairs = [pair for pair in reader.model.pairs(config) if pair.ours in our_shapes]
    known = {pair.theirs for pair in pairs} | reader.check_aliases()
    unexpected = sorted(reader.name_in_file(name) for name in reader.names() - known)
    if unexpected:
        raise CheckpointError(f"{reader.folder}: no tensor of ours takes {list_some(unexpected)}")
    missing = [pair for pair in pairs if pair.theirs not in reader.names()]
    # A head that is there in part is a damaged model, not a plain one.
    whole = tuple(
        head for head in reader.model.new_heads if all(pair in missing for pair in pairs if pair.ours.startswith(head))
    )
    lost = sorted(pair.theirs for pair in missing if not pair.ours.startswith(whole))
    if lost:
        raise CheckpointError(f"{reader.folder} lacks {list_some(lost)}")
    if missing and not may_initialize:
        names = list_some(sorted(pair.theirs for pair in missing))
        raise CheckpointError(
            f"{reader.folder} lacks the heads {names}; src/convert.py with initialize_missing_heads=true begins them "
            "anew, untrained"
        )
    for pair in pairs:
        if pair in missing:
            continue
        expected = _their_shape(pair, our_shapes, config)
        if reader.shape(pair.theirs) != expected:
            name = reader.name_in_file(pair.theirs)
            raise CheckpointError(f"tensor {name} must be {expected}, but is {reader.shape(pair.theirs)}")
    return our_shapes, pairs, {pair.ours for pair in missing}


def _read_ours(
    reader: HuggingFaceReader,
    pairs: list[TensorPair],
    entries: dict[str, TensorEntry],
    heads: dict[str, Tensor],
    config: TransformerConfig,
) -> Iterator[tuple[str, Tensor]]:
    for name, group in itertools.groupby(pairs, key=lambda pair: pair.ours):
        if name in heads:
            yield f"model/{name}", heads[name]
            continue
        entry = entries[f"model/{name}"]
        ours = torch.zeros(entry.shape, dtype=entry.dtype)
        for pair in group:
            pair.copy_to_ours(reader.read(pair.theirs), ours, config)
        yield f"model/{name}", ours


def _draw_heads(config: TransformerConfig, names: set[str], seed: int) -> dict[str, Tensor]:
    """The heads of a new BERT with this seed, which are those of one with a single layer."""
    model = build_model(replace(config, num_layers=1), ParallelContext(), seed=seed)
    return {name: param.detach() for name, param in model.named_parameters() if name in names}
