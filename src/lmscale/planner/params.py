"""Number of parameters of a model, and of one tensor rank."""

from dataclasses import dataclass

from ..config import TransformerConfig


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


def count_parameters(config: TransformerConfig, tp_size: int = 1, pad_heads: bool = False) -> ParameterCount:
    """Count a model exactly, by formula.

    With f = 4h a layer has 12 h^2 + 13 h. GPT: v h + S h + L (12 h^2 + 13 h) + 2 h. BERT adds token types 2 h,
    pooler h^2 + h, masked-LM dense h^2 + h with LayerNorm 2 h and decoder bias v, sentence order 2 h + 2. The output
    projection is the word embedding. Pre- and post-norm have two LayerNorms (2 h each) per layer and one outside the
    layers: after the stack (pre) or after the embeddings (post).

    Cut over the tensor ranks: word embedding, QKV (weight and bias), attention output weight, MLP in (weight and bias),
    MLP out weight, decoder bias. Every other tensor is replicated, among them the biases of the two row-parallel
    linears.

    Args:
        config: sizes; v is `padded_vocab_size`.
        tp_size: tensor ranks.
        pad_heads: see `Layout`.

    Raises:
        ValueError: `tp_size` does not divide the model.

    Source: section 3; Tables 1, 2 and 4.
    """
    if tp_size != 1:
        config.check_tensor_parallel(tp_size, pad_heads)
    h, f, v, num_layers = config.hidden_size, config.ffn_size, config.padded_vocab_size, config.num_layers
    sharded = {
        "word embedding": v * h,
        "attention": num_layers * (3 * h * h + 3 * h + h * h),
        "mlp": num_layers * (h * f + f + f * h),
    }
    replicated = {
        "position embedding": config.max_position_embeddings * h,
        "attention": num_layers * h,
        "mlp": num_layers * h,
        "layer norms": (config.placement.num_layer_norms * num_layers + config.placement.num_outer_norms) * 2 * h,
    }
    family = config.traits
    if family.num_token_types:
        replicated["token-type embedding"] = family.num_token_types * h
    for part, size, is_sharded in family.head.parameters(h, v):
        counts = sharded if is_sharded else replicated
        counts[part] = counts.get(part, 0) + size
    parts = {name: sharded.get(name, 0) + replicated.get(name, 0) for name in sharded | replicated}
    num_sharded, num_replicated = sum(sharded.values()), sum(replicated.values())
    of_dummies = num_layers * (4 * h + 3) * (config.padded_width(tp_size) - h)
    per_rank = (num_sharded + of_dummies) // tp_size
    return ParameterCount(num_sharded + num_replicated, per_rank, num_replicated, parts)


def parameter_sizes(config: TransformerConfig, tp_size: int, pad_heads: bool = False) -> list[int]:
    """Elements of each parameter of a rank, in the order in which the backward pass finishes their gradients.

    From the heads to the embeddings; the bias of a linear layer before its weight, except in column-parallel layers at
    `tp_size` above 1, which return both gradients at once, the weight's first; the word embedding last, since it is the
    output projection too.

    Raises:
        ValueError: `tp_size` does not divide the model.
    """
    config.check_tensor_parallel(tp_size, pad_heads)
    h, f, v = config.hidden_size, config.ffn_size // tp_size, config.padded_vocab_size // tp_size
    a = config.padded_width(tp_size) // tp_size
    up, qkv, norm = [f, f * h], [3 * a, 3 * a * h], [h, h]
    mlp, attention = [h, f * h, *(up[::-1] if tp_size > 1 else up)], [h, h * a]
    attention += qkv[::-1] if tp_size > 1 else qkv
    family, placement, layers = config.traits, config.placement, []
    heads = [size for _, size, _ in family.head.parameters(h, v)]
    for of_layer in reversed(config.layer_placements):
        before, after = len(of_layer.before) * norm, len(of_layer.after) * norm
        layers += [*after, *mlp, *before, *after, *attention, *before]
    around = [*placement.after_stack * norm, *layers, *placement.after_embedding * norm]
    types = [family.num_token_types * h] if family.num_token_types else []
    return [*heads, *around, config.max_position_embeddings * h, *types, v * h]


def parameters_in_order(config: TransformerConfig, tp_size: int) -> list[tuple[int, bool]]:
    """Elements of each parameter of a rank, in the model's order, in which owners are assigned (ZeRO stage 1).

    Returns:
        elements, and whether every tensor rank holds the whole parameter. The order within the heads is that of the
        backward pass.
    """
    h, f, v = config.hidden_size, config.ffn_size // tp_size, config.padded_vocab_size // tp_size
    a, family, placement = config.padded_width(tp_size) // tp_size, config.traits, config.placement
    norm = [(h, True), (h, True)]
    norms = len(placement.before + placement.after) * norm
    attention = [(3 * a * h, False), (3 * a, False), (h * a, False), (h, True)]
    mlp = [(f * h, False), (f, False), (f * h, False), (h, True)]
    types = [(family.num_token_types * h, True)] if family.num_token_types else []
    embeddings = [(config.max_position_embeddings * h, True), *types, (v * h, False)]
    layers = config.num_layers * [*norms, *attention, *norms, *mlp]
    heads = [(size, not is_sharded) for _, size, is_sharded in family.head.parameters(h, v)]
    return [*embeddings, *placement.after_embedding * norm, *layers, *placement.after_stack * norm, *heads]
