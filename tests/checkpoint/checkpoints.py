"""Random models as our checkpoints with optimizer moments, and as transformers' folders."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sharding import random_model, small_config
from torch import Tensor, nn

from lmscale.checkpoint import METADATA, Checkpoint, CheckpointMetadata, TensorEntry, write_offline
from lmscale.checkpoint import metadata as metadata_module
from lmscale.config import TransformerConfig
from lmscale.hugging_face import conversion
from lmscale.hugging_face.config import config_to_hf
from lmscale.hugging_face.files import HuggingFaceReader
from lmscale.models import build_model
from lmscale.parallel import ParallelContext

GPT, BERT, MEGATRON_BERT = "GPT2LMHeadModel", "BertForPreTraining", "MegatronBertForPreTraining"

# The three models that transformers has too.
FAMILIES = {
    GPT: {"family": "gpt", "norm_order": "pre"},
    BERT: {"family": "bert", "norm_order": "post"},
    MEGATRON_BERT: {"family": "bert", "norm_order": "pre"},
}


class Trap:
    """Unpickling this creates a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


def family_config(name: str, **changes) -> TransformerConfig:
    return small_config(
        **{**FAMILIES[name], "num_layers": 3, "hidden_dropout": 0.2, "attention_dropout": 0.3, **changes}
    )


def save_random(folder: Path, config: TransformerConfig, tp_size: int = 2, step: int = 7) -> tuple[Path, dict]:
    """The checkpoint's path, and its logical tensors by key; padded rows are zero."""
    model = random_model(config, ParallelContext()).float()
    generator = torch.Generator().manual_seed(step)
    tensors: dict[str, Tensor] = {}
    entries: dict[str, TensorEntry] = {}
    for name, param in model.named_parameters():
        for kind in ("model", "exp_avg", "exp_avg_sq"):
            value = param.detach().clone() if kind == "model" else torch.randn(param.shape, generator=generator)
            if param.shape[0] == config.padded_vocab_size:
                value[config.vocab_size :] = 0.0
            tensors[f"{kind}/{name}"] = value
            entries[f"{kind}/{name}"] = TensorEntry(tuple(value.shape), value.dtype, param.shard.shard_dim)
    metadata = CheckpointMetadata(
        step,
        {"tp_size": tp_size, "dp_size": 2},
        config.to_dict(),
        entries,
        {},
        {"num_updates": 7},
        {"name": "run"},
        {"order": 3},
    )
    return write_offline(folder, metadata, tp_size, sorted(tensors.items())), tensors


def read_all(path: Path) -> dict[str, Tensor]:
    with Checkpoint.open(path).reader() as reader:
        return {key: reader.read(key) for key in reader.checkpoint.metadata.tensors}


def change_metadata(path: Path, change: Callable[[dict], object]) -> None:
    """Wrong metadata with a correct checksum: a mistake of a program, or intent, but no damage of a disk."""
    values = json.loads((path / METADATA).read_text())
    values.pop("checksum")
    change(values)
    (path / METADATA).write_text(json.dumps({"checksum": metadata_module._checksum(values)} | values))


def without_layout(path: Path) -> dict:
    """The metadata of a checkpoint without the locations of its tensors."""
    values = vars(Checkpoint.open(path).metadata)
    return {key: value for key, value in values.items() if key not in ("layout", "tensors", "files")}


def padded(tensors: dict[str, Tensor], old: TransformerConfig, new: TransformerConfig) -> dict[str, Tensor]:
    """The tensors with the padding of another configuration."""
    result = {}
    for key, value in tensors.items():
        if value.shape[0] == old.padded_vocab_size:
            result[key] = torch.zeros(new.padded_vocab_size, *value.shape[1:], dtype=value.dtype)
            result[key][: old.vocab_size] = value[: old.vocab_size]
        else:
            result[key] = value
    return result


def with_multiple(config: TransformerConfig, vocab_multiple: int) -> TransformerConfig:
    return dataclasses.replace(config, vocab_multiple=vocab_multiple)


def load_ours(path: Path, context: ParallelContext | None = None) -> nn.Module:
    """The model of a checkpoint, this rank's shard of it."""
    context = context or ParallelContext()
    with Checkpoint.open(path).reader() as reader:
        model = build_model(TransformerConfig.from_dict(reader.checkpoint.metadata.model), context, seed=None).eval()
        for name, param in model.named_parameters():
            reader.read_into(f"model/{name}", param.data, context.tp_rank)
    return model


def weights_of(path: Path) -> dict[str, Tensor]:
    return {key: value for key, value in read_all(path).items() if key.startswith("model/")}


def their_weights(folder: Path) -> dict[str, Tensor]:
    with HuggingFaceReader(folder) as reader:
        return {name: reader.read(name) for name in reader.names()}


def save_theirs(folder: Path, name: str, **changes) -> nn.Module:
    """A random transformers model saved by transformers."""
    torch.manual_seed(5)
    published = config_to_hf(family_config(name, **changes), "float32", {})
    for key in ("bos_token_id", "eos_token_id"):
        setattr(published, key, None)
    model = getattr(transformers, name)(published).eval()
    with torch.no_grad():
        for param in model.parameters():  # biases and LayerNorms too
            param.normal_(std=0.3)
    model.save_pretrained(folder)
    return model


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(values))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def spoil(monkeypatch: pytest.MonkeyPatch, spoilt: str) -> None:
    """Let the conversion read a wrong number in the last row of a published tensor."""
    original = conversion._read_theirs

    def change(*arguments):
        for name, tensor in original(*arguments):
            if name == spoilt:
                tensor = tensor.clone()
                tensor[-1] += 0.1
            yield name, tensor

    monkeypatch.setattr(conversion, "_read_theirs", change)


def flip_a_byte(file: Path, place: int = -3) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
