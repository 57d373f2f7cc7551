"""The parameters of a model and of one rank: their sizes, which tensor ranks share them, and the gradient buffer."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ..config import Layout, TransformerConfig
from ..partition import BufferPlan, plan_buffer

_WHOLE_MODEL = Layout()
_recent = lru_cache(maxsize=64)  # every count of a plan asks for its parameters


class Parameter(NamedTuple):
    """One parameter of a rank.

    Args:
        part: of the model, for tables.
        size: elements on the rank.
        is_sharded: it is cut over the tensor ranks; else every one of them holds it whole.
    """

    part: str
    size: int
    is_sharded: bool = False


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a whole model and of one rank.

    Args:
        total: of the whole model, everything counted once.
        sharded_per_rank: one rank's part of the tensors cut over the tensor ranks, in which the last ranks may have
            dummy heads; the first has none.
        replicated: of the tensors that every tensor rank holds whole.
        parts: of the whole model, by part; they sum to `total`.
    """

    total: int
    sharded_per_rank: int
    replicated: int
    parts: dict[str, int]

    @property
    def per_rank(self) -> int:
        """Parameters of one rank."""
        return self.sharded_per_rank + self.replicated


@_recent
def rank_parameters(config: TransformerConfig, layout: Layout, stage: int = 0) -> tuple[Parameter, ...]:
    """Every parameter that a rank owns, in the model's order.

    Of several stages the first has the embeddings and the last what follows the layers. The copy of the word embedding
    in the last is left out (`copied_parameters`).

    With f = 4h a layer has 12 h^2 + 13 h. GPT: v h + S h + L (12 h^2 + 13 h) + 2 h. BERT adds token types 2 h,
    pooler h^2 + h, masked-LM dense h^2 + h with LayerNorm 2 h and decoder bias v, sentence order 2 h + 2. The output
    projection is the word embedding. Pre- and post-norm have two LayerNorms (2 h each) per layer and one outside the
    layers: after the stack (pre) or after the embeddings (post).

    Cut over the tensor ranks: word embedding, QKV (weight and bias), attention output weight, MLP in (weight and bias),
    MLP out weight, decoder bias. Every other tensor is replicated, among them the biases of the two row-parallel
    linears.

    Raises:
        ValueError: `layout.tp_size` does not divide the model.

    Source: section 3; Tables 1, 2 and 4.
    """
    p, h = layout.tp_size, config.hidden_size
    config.check_tensor_parallel(p, layout.pad_heads)
    f, v, a = config.ffn_size // p, config.padded_vocab_size // p, config.padded_width(p) // p
    family, placement = config.traits, config.placement
    norm = 2 * [Parameter("layer norms", h)]
    attention = [Parameter("attention", size, True) for size in (3 * a * h, 3 * a, h * a)]
    qk_norm = 2 * [Parameter("layer norms", config.head_size)] if config.qk_norm else []
    mlp = [Parameter("mlp", size, True) for size in (f * h, f, f * h)]
    found = []
    if stage == 0:
        found.append(Parameter("position embedding", config.max_position_embeddings * h))
        if family.num_token_types:
            found.append(Parameter("token-type embedding", family.num_token_types * h))
        found += [Parameter("word embedding", v * h, True), *placement.after_embedding * norm]
    for of_layer in stage_placements(config, layout, stage):
        norms = len(of_layer.before + of_layer.after) * norm
        found += [*norms, *attention, Parameter("attention", h), *qk_norm, *norms, *mlp, Parameter("mlp", h)]
    if stage == layout.pp_size - 1:
        found += [*placement.after_stack * norm, *(Parameter(*each) for each in family.head.parameters(h, v))]
    return tuple(found)


@lru_cache(maxsize=4096)
def num_rank_parameters(config: TransformerConfig, layout: Layout, stage: int = 0) -> int:
    """Elements of `rank_parameters` together, for searches over many layouts."""
    return sum(each.size for each in rank_parameters(config, layout, stage))


def copied_parameters(config: TransformerConfig, layout: Layout, stage: int) -> int:
    """Elements of the copy of the word embedding that a rank of the last of several stages holds."""
    is_copy = layout.pp_size > 1 and stage == layout.pp_size - 1
    return config.padded_vocab_size // layout.tp_size * config.hidden_size if is_copy else 0


@_recent
def distinct_stages(config: TransformerConfig, layout: Layout) -> tuple[int, ...]:
    """The stages to look at for the largest cost: of equal ones the first, which keeps most micro-batches."""
    found = {}
    for stage in range(layout.pp_size):
        kind = stage == 0, stage == layout.pp_size - 1, *map(id, stage_placements(config, layout, stage))
        found.setdefault(kind, stage)
    return tuple(found.values())


def stage_placements(config: TransformerConfig, layout: Layout, stage: int) -> list[Any]:
    """The `NormPlacement` of each layer of a stage."""
    layers = config.stages(layout.pp_size)[stage]
    return _layer_placements(config)[layers.start : layers.stop]


@_recent
def _layer_placements(config: TransformerConfig) -> list[Any]:
    placement = config.placement  # may depend on the depth
    return [placement.of_layer(index, config.num_layers) for index in range(config.num_layers)]


@_recent
def count_parameters(config: TransformerConfig, layout: Layout = _WHOLE_MODEL) -> ParameterCount:
    """Count a model exactly, and what a rank of its largest stage owns.

    Raises:
        ValueError: `layout.tp_size` does not divide the model.
    """
    parts, by_rank = Counter(), Counter()
    for part, size, _ in rank_parameters(config, _WHOLE_MODEL):
        parts[part] += size
    stages = (rank_parameters(config, layout, stage) for stage in range(layout.pp_size))
    for _, size, is_sharded in max(stages, key=lambda parameters: sum(each.size for each in parameters)):
        by_rank[is_sharded] += size
    return ParameterCount(parts.total(), by_rank[True], by_rank[False], dict(parts))


@_recent
def rank_buffer(config: TransformerConfig, layout: Layout, on_gpu: bool, stage: int = 0) -> BufferPlan:
    """The gradient buffer of `rank_parameters`."""
    p, sizes = layout.tp_size, [each.size for each in rank_parameters(config, layout, stage)]
    row_lengths = config.hidden_size, config.padded_width(p) // p, config.ffn_size // p
    return plan_buffer(sizes, row_lengths, layout.dp_size, layout.cuts_optimizer, on_gpu)
