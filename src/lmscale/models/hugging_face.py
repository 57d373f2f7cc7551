"""How a family describes its equal model in transformers, and the correspondence of their tensors.

The table of tensors serves both directions.

A pair names a tensor of theirs, the tensor of ours it comes from, and the *view* of ours that has its elements in their
order. Reading the view exports, writing through it imports, so the two cannot disagree. Linears: ours are [out, in] as
BERT's are; GPT-2's `Conv1D` is [in, out]. QKV: our rows are [head, (q, k, v), d]; GPT-2 has [Q, K, V] in one tensor,
BERT has three. Rows of the padded vocabulary are ours alone. Every view is a permutation, so gradients map the same.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from ..config import TransformerConfig
from ..config.family import BUILT_IN, family_of, load
from .parametrization import scaled


@dataclass(frozen=True)
class View:
    """A view of our tensor, and the first and last of its dimensions that are merged in theirs."""

    of: Callable[[Tensor, TransformerConfig], Tensor]
    merged: tuple[int, int] = (0, 0)


def _by_head(tensor: Tensor, config: TransformerConfig) -> Tensor:
    return tensor.view(config.num_attention_heads, 3, config.head_size, *tensor.shape[1:])  # [n, 3, d, ...]


def _one_of_qkv(index: int, tensor: Tensor, config: TransformerConfig) -> Tensor:
    return _by_head(tensor, config)[:, index]  # [n, d, ...]


SAME = View(lambda tensor, config: tensor)
TRANSPOSED = View(lambda tensor, config: tensor.T)
USED_ROWS = View(lambda tensor, config: tensor[: config.vocab_size])
QUERY, KEY, VALUE = (View(partial(_one_of_qkv, index), (0, 1)) for index in range(3))
QKV_BIAS = View(lambda tensor, config: _by_head(tensor, config).transpose(0, 1), (0, 2))  # [3, n, d]
QKV_TRANSPOSED = View(lambda tensor, config: _by_head(tensor, config).permute(3, 1, 0, 2), (1, 3))  # [h, 3, n, d]


@dataclass(frozen=True)
class TensorPair:
    """One of their tensors: its name, the name of ours, and the view that maps one to the other."""

    theirs: str
    ours: str
    view: View

    def to_theirs(self, ours: Tensor, config: TransformerConfig) -> Tensor:
        """Their tensor from our unsharded one (a copy if the order differs)."""
        return self.view.of(ours, config).flatten(*self.view.merged)

    def copy_to_ours(self, theirs: Tensor, ours: Tensor, config: TransformerConfig) -> None:
        """Write their tensor into the corresponding part of our unsharded one."""
        view = self.view.of(ours, config)
        view.copy_(theirs.view(view.shape))


def module(theirs: str, ours: str, weight: View = SAME) -> list[TensorPair]:
    """The pairs of a module's weight and bias."""
    return [
        TensorPair(f"{theirs}.weight", f"{ours}.weight", weight),
        TensorPair(f"{theirs}.bias", f"{ours}.bias", SAME),
    ]


@dataclass(frozen=True)
class TaskHead:
    """A head of transformers for finetuning tasks, whose linear layer is our `head`.

    Args:
        suffix: of the class, after the name of the model.
        linear: their name of the layer.
        has_choices: inputs are [b, c, s], with c sequences per item.
        has_pooler: it reads the pooler's output; without it, files of older versions may still have a pooler.
    """

    suffix: str
    linear: str
    has_choices: bool = False
    has_pooler: bool = True


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model of transformers and its tensors.

    Args:
        model_type, model_class: as transformers names them.
        settings: fields of `TransformerConfig` that the class implies.
        keys: their configuration key -> our field.
        prefix: of the tensors that the plain model (without heads) has too, and saves without it.
        layers: their name of the list of layers; ours is `transformer.layers`.
        outer, layer: pairs outside the layers, and of each layer below its index; those of all heads, of which a model
            has some.
        aliases: tensors that must equal another one if a file has both; all have a row per token id.
        ignored: constant buffers in files of older versions.
        new_heads: our prefixes that the file of a plain model lacks and that can be initialized for training.
        token_ids: function of the tokenizer's ids (None without one) and our config: the ids in its configuration.
        positions: their position embedding.
        readouts: our prefixes of what takes the output factor of a parametrization in its place.
        task_heads: heads for finetuning by the kind of task.
        head: that of this model; None: those of pretraining.
    """

    model_type: str
    model_class: str
    settings: dict[str, Any]
    keys: dict[str, str]
    prefix: str
    layers: str
    outer: tuple[TensorPair, ...]
    layer: tuple[TensorPair, ...]
    aliases: dict[str, str]
    ignored: re.Pattern
    token_ids: Callable[[dict[str, int] | None, TransformerConfig], dict[str, int | None]]
    positions: str
    readouts: tuple[str, ...]
    new_heads: tuple[str, ...] = ()
    task_heads: dict[str, TaskHead] = field(default_factory=dict)
    head: TaskHead | None = None

    def with_head(self, kind: str) -> "HuggingFaceModel":
        """The model with the head of a kind of task beside those of pretraining.

        Raises:
            ValueError: transformers has no such head.
        """
        head = self.task_heads.get(kind)
        if head is None:
            raise ValueError(f"a finetuned model must be a BERT for Hugging Face, but is a {self.model_type}")
        name = self.model_class.partition("For")[0] + head.suffix
        pooler = "" if head.has_pooler else rf"|{re.escape(self.prefix)}pooler\..*"
        ignored, outer = re.compile(self.ignored.pattern + pooler), (*self.outer, *module(head.linear, "head"))
        return replace(self, model_class=name, outer=outer, ignored=ignored, head=head)

    def kind_of(self, architectures: Any) -> str | None:
        """The kind of task of a `config.json` with these `architectures`; None: none of `task_heads`."""
        return next((kind for kind in self.task_heads if architectures == [self.with_head(kind).model_class]), None)

    def pairs(self, config: TransformerConfig) -> list[TensorPair]:
        """All pairs of a model, those of the same tensor of ours adjacent."""
        pairs = list(self.outer)
        for index in range(config.num_layers):
            pairs += [
                TensorPair(f"{self.layers}.{index}.{pair.theirs}", f"transformer.layers.{index}.{pair.ours}", pair.view)
                for pair in self.layer
            ]
        return sorted(pairs, key=lambda pair: pair.ours)

    def fold(self, name: str, ours: Tensor, config: TransformerConfig) -> Tensor:
        """Our tensor with the multipliers of `model.parametrization`, which theirs does not have, in its values.

        The model of `config.as_standard()` with all tensors folded computes the same.
        """
        rules = config.scaling
        if ".attention.qkv." in name and rules.attention_factor != 1.0:
            ours = ours.clone()
            _one_of_qkv(0, ours, config).mul_(rules.attention_factor)
        if ".attention.output." in name or ".mlp.down." in name:
            return scaled(ours, rules.residual_factor)
        return scaled(ours, rules.output_factor) if name.startswith(self.readouts) else ours

    def full_name(self, name: str) -> str:
        """A file's tensor name as in the model with heads: with the prefix, and with current LayerNorm names."""
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        heads = {f"{head.linear}." for head in self.task_heads.values()}
        return name if name.startswith((self.prefix, "lm_head.", "cls.", *heads)) else self.prefix + name

    def their_key(self, field: str) -> str:
        """Their configuration key for a field of `TransformerConfig`."""
        return next(key for key, name in self.keys.items() if name == field)


def models_by_type() -> dict[str, HuggingFaceModel]:
    """Every model of transformers that a built-in family converts, by its `model_type`."""
    modules = [load(path) for path in (family_of(name).hugging_face for name in BUILT_IN) if path]
    return {model.model_type: model for module in modules for model in module.MODELS}


def model_of(config: TransformerConfig) -> HuggingFaceModel:
    """The model of transformers that is equal to ours.

    Raises:
        ValueError: there is none, for the family, its norm placement or its `qk_norm`.
    """
    path = config.traits.hugging_face
    if path is None:
        raise ValueError(
            f"`family` must be one that Hugging Face has here ({', '.join(BUILT_IN)}), but is {config.family}"
        )
    for model in load(path).MODELS:
        if model.settings["norm_order"] == config.norm_order:
            if config.qk_norm:
                raise ValueError("`qk_norm` must be false for Hugging Face, whose GPT-2 and BERT lack it, but is true")
            return model
    orders = " or ".join(model.settings["norm_order"] for model in load(path).MODELS)
    kind = config.family.upper()
    raise ValueError(f"`norm_order` of a {kind} must be {orders} for Hugging Face, but is {config.norm_order}")
