"""Which tensor of Hugging Face's GPT-2, BERT and Megatron-BERT is which of ours, as one table for both directions.

A row names a tensor of theirs, the tensor of ours it comes from, and the *view* of ours that has its elements in their
order. Reading the view exports, writing through it imports, so the two cannot disagree. Linears: ours are [out, in] as
BERT's are; GPT-2's `Conv1D` is [in, out]. QKV: our rows are [head, (q, k, v), d]; GPT-2 has [Q, K, V] in one tensor,
BERT has three. Rows of the padded vocabulary are ours alone. Every view is a permutation, so gradients map the same.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ..config import NormOrder, TransformerConfig
from .errors import CheckpointError


@dataclass(frozen=True)
class Layout:
    """A view of our tensor, and the first and last of its dimensions that are one in theirs."""

    view: Callable[[Tensor, TransformerConfig], Tensor]
    merged: tuple[int, int] = (0, 0)


def _by_head(tensor: Tensor, config: TransformerConfig) -> Tensor:
    return tensor.view(config.num_attention_heads, 3, config.head_size, *tensor.shape[1:])  # [n, 3, d, ...]


def _one_of_qkv(index: int, tensor: Tensor, config: TransformerConfig) -> Tensor:
    return _by_head(tensor, config)[:, index]  # [n, d, ...]


SAME = Layout(lambda tensor, config: tensor)
TRANSPOSED = Layout(lambda tensor, config: tensor.T)
USED_ROWS = Layout(lambda tensor, config: tensor[: config.vocab_size])
QUERY, KEY, VALUE = (Layout(partial(_one_of_qkv, index), (0, 1)) for index in range(3))
QKV_BIAS = Layout(lambda tensor, config: _by_head(tensor, config).transpose(0, 1), (0, 2))  # [3, n, d]
QKV_TRANSPOSED = Layout(lambda tensor, config: _by_head(tensor, config).permute(3, 1, 0, 2), (1, 3))  # [h, 3, n, d]


@dataclass(frozen=True)
class Row:
    """One tensor of theirs; its name, the name of ours, and how the two lie."""

    theirs: str
    ours: str
    layout: Layout

    def to_theirs(self, ours: Tensor, config: TransformerConfig) -> Tensor:
        """Their tensor from our whole one (a copy where the order differs)."""
        return self.layout.view(ours, config).flatten(*self.layout.merged)

    def copy_to_ours(self, theirs: Tensor, ours: Tensor, config: TransformerConfig) -> None:
        """Write their tensor into the places of our whole one that it fills."""
        view = self.layout.view(ours, config)
        view.copy_(theirs.view(view.shape))


def _pair(theirs: str, ours: str, weight: Layout = SAME) -> list[Row]:
    """A module's weight and bias."""
    return [Row(f"{theirs}.weight", f"{ours}.weight", weight), Row(f"{theirs}.bias", f"{ours}.bias", SAME)]


@dataclass(frozen=True)
class Family:
    """A model of transformers and its tensors.

    Args:
        model_type, config_class, model_class: as transformers names them.
        prefix: of the tensors that the plain model (without heads) has too, and saves without it.
        layers: their name of the list of layers; ours is `transformer.layers`.
        outer, layer: rows outside the layers, and of each layer below its index.
        aliases: tensors that must equal another one where a file has both.
        ignored: buffers in files of older versions, which hold constants.
    """

    model_type: str
    config_class: str
    model_class: str
    prefix: str
    layers: str
    outer: tuple[Row, ...]
    layer: tuple[Row, ...]
    aliases: dict[str, str]
    ignored: re.Pattern

    def rows(self, config: TransformerConfig) -> list[Row]:
        """Every row of a model, those of one tensor of ours side by side."""
        rows = list(self.outer)
        for index in range(config.num_layers):
            rows += [
                Row(f"{self.layers}.{index}.{row.theirs}", f"transformer.layers.{index}.{row.ours}", row.layout)
                for row in self.layer
            ]
        return sorted(rows, key=lambda row: row.ours)

    def full_name(self, name: str) -> str:
        """A name in a file as the model with heads has it: with the prefix, and LayerNorm's as they are today."""
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        return name if name.startswith((self.prefix, "lm_head.", "cls.")) else self.prefix + name


# What a file of a plain model lacks and training can begin anew.
HEADS = ("pooler.", "lm_head.", "order_head.")

_GPT2 = Family(
    model_type="gpt2",
    config_class="GPT2Config",
    model_class="GPT2LMHeadModel",
    prefix="transformer.",
    layers="transformer.h",
    outer=(
        Row("transformer.wte.weight", "transformer.word_embedding.weight", USED_ROWS),
        Row("transformer.wpe.weight", "transformer.position_embedding", SAME),
        *_pair("transformer.ln_f", "transformer.final_norm"),
    ),
    layer=(
        *_pair("ln_1", "attention_norm"),
        Row("attn.c_attn.weight", "attention.qkv.weight", QKV_TRANSPOSED),
        Row("attn.c_attn.bias", "attention.qkv.bias", QKV_BIAS),
        *_pair("attn.c_proj", "attention.output", TRANSPOSED),
        *_pair("ln_2", "mlp_norm"),
        *_pair("mlp.c_fc", "mlp.up", TRANSPOSED),
        *_pair("mlp.c_proj", "mlp.down", TRANSPOSED),
    ),
    aliases={"lm_head.weight": "transformer.wte.weight"},
    ignored=re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"),  # the causal mask and its -1e4
)

_BERT_OUTER = (
    Row("bert.embeddings.word_embeddings.weight", "transformer.word_embedding.weight", USED_ROWS),
    Row("bert.embeddings.position_embeddings.weight", "transformer.position_embedding", SAME),
    Row("bert.embeddings.token_type_embeddings.weight", "transformer.token_type_embedding", SAME),
    *_pair("bert.pooler.dense", "pooler"),
    Row("cls.predictions.bias", "lm_head.bias", USED_ROWS),
    *_pair("cls.predictions.transform.dense", "lm_head.dense"),
    *_pair("cls.predictions.transform.LayerNorm", "lm_head.norm"),
    *_pair("cls.seq_relationship", "order_head"),
)
_BERT_LAYER = (
    *(
        Row(f"attention.self.{name}.{kind}", f"attention.qkv.{kind}", layout)
        for kind in ("weight", "bias")
        for name, layout in (("query", QUERY), ("key", KEY), ("value", VALUE))
    ),
    *_pair("attention.output.dense", "attention.output"),
    *_pair("intermediate.dense", "mlp.up"),
    *_pair("output.dense", "mlp.down"),
)
_BERT_ALIASES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_BERT_IGNORED = re.compile(r"bert\.embeddings\.(position_ids|token_type_ids)")  # 0, 1, 2, ... and zeros

_POST_NORM = Family(
    model_type="bert",
    config_class="BertConfig",
    model_class="BertForPreTraining",
    prefix="bert.",
    layers="bert.encoder.layer",
    outer=(*_BERT_OUTER, *_pair("bert.embeddings.LayerNorm", "transformer.embedding_norm")),
    layer=(
        *_BERT_LAYER,
        *_pair("attention.output.LayerNorm", "attention_norm"),
        *_pair("output.LayerNorm", "mlp_norm"),
    ),
    aliases=_BERT_ALIASES,
    ignored=_BERT_IGNORED,
)
_PRE_NORM = Family(
    model_type="megatron-bert",
    config_class="MegatronBertConfig",
    model_class="MegatronBertForPreTraining",
    prefix="bert.",
    layers="bert.encoder.layer",
    outer=(*_BERT_OUTER, *_pair("bert.encoder.ln", "transformer.final_norm")),
    layer=(*_BERT_LAYER, *_pair("attention.ln", "attention_norm"), *_pair("ln", "mlp_norm")),
    aliases=_BERT_ALIASES,
    ignored=_BERT_IGNORED,
)
FAMILIES = {family.model_type: family for family in (_GPT2, _POST_NORM, _PRE_NORM)}


def family_of(config: TransformerConfig) -> Family:
    """The model of transformers that computes what ours does.

    Raises:
        CheckpointError: there is none (a GPT with LayerNorm after the residual additions).
    """
    if config.architecture == "bert":
        return _POST_NORM if config.norm_order is NormOrder.POST else _PRE_NORM
    if config.norm_order is NormOrder.POST:
        raise CheckpointError("`norm_order` of a GPT must be pre for Hugging Face's GPT-2, but is post")
    return _GPT2
