"""How many parameters a model has, and how many of them one tensor rank holds."""

from dataclasses import dataclass

from ..config import NormOrder, TransformerConfig

NUM_TOKEN_TYPES = 2  # BERT's sentence A and sentence B


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a whole model and of one rank's share of it.

    Args:
        total: of the whole model, everything counted once.
        sharded_per_rank: of the tensors cut over the tensor ranks, the part of one rank.
        replicated: of the tensors every tensor rank holds whole.
        parts: the whole model's by part; they sum to `total`.
    """

    total: int
    sharded_per_rank: int
    replicated: int
    parts: dict[str, int]

    @property
    def per_rank(self) -> int:
        """Parameters one rank holds."""
        return self.sharded_per_rank + self.replicated


def count_parameters(config: TransformerConfig, tp_size: int = 1) -> ParameterCount:
    """Count a BERT or GPT exactly, by formula.

    With f = 4h a layer has 12 h^2 + 13 h. GPT: v h + S h + L (12 h^2 + 13 h) + 2 h. BERT besides: token types 2 h,
    pooler h^2 + h, masked-LM dense h^2 + h with LayerNorm 2 h and decoder bias v, sentence order 2 h + 2. The output
    projection is the word embedding. Both norm orders have one LayerNorm (2 h) outside the layers: after the stack
    (pre) or after the embeddings (post).

    Cut over the tensor ranks: word embedding, QKV (weight and bias), attention output weight, MLP in (weight and bias),
    MLP out weight, decoder bias. Every other tensor is replicated, among them the biases of the two row-parallel
    linears.

    Args:
        config: sizes; v is `padded_vocab_size`.
        tp_size: tensor ranks.

    Raises:
        ValueError: `tp_size` does not divide the model.

    Source: section 3; Tables 1, 2 and 4.
    """
    if tp_size != 1:
        config.check_tensor_parallel(tp_size)
    h, f, v, num_layers = config.hidden_size, config.ffn_size, config.padded_vocab_size, config.num_layers
    layer_norm = 2 * h
    sharded = {
        "word embedding": v * h,
        "attention": num_layers * (3 * h * h + 3 * h + h * h),
        "mlp": num_layers * (h * f + f + f * h),
    }
    replicated = {
        "position embedding": config.max_position_embeddings * h,
        "attention": num_layers * h,
        "mlp": num_layers * h,
        "layer norms": (2 * num_layers + 1) * layer_norm,
    }
    if config.architecture == "bert":
        sharded["masked-LM head"] = v
        replicated["token-type embedding"] = NUM_TOKEN_TYPES * h
        replicated["pooler"] = h * h + h
        replicated["masked-LM head"] = h * h + h + layer_norm
        replicated["sentence-order head"] = 2 * h + 2
    parts = {name: sharded.get(name, 0) + replicated.get(name, 0) for name in sharded | replicated}
    num_sharded, num_replicated = sum(sharded.values()), sum(replicated.values())
    return ParameterCount(num_sharded + num_replicated, num_sharded // tp_size, num_replicated, parts)


def parameter_sizes(config: TransformerConfig, tp_size: int) -> list[int]:
    """Elements of each parameter of a rank, in the order in which the backward pass finishes their gradients.

    From the heads to the embeddings; a linear's bias before its weight, but where f belongs to the linear, which makes
    both at once, the weight first; the word embedding last, for it is the output projection too.

    Raises:
        ValueError: `tp_size` does not divide the model.
    """
    config.check_tensor_parallel(tp_size)
    h, f, v = config.hidden_size, config.ffn_size // tp_size, config.padded_vocab_size // tp_size
    up, qkv, norm = [f, f * h], [3 * h // tp_size, 3 * h * h // tp_size], [h, h]
    mlp, attention = [h, f * h, *(up[::-1] if tp_size > 1 else up)], [h, h * h // tp_size]
    attention += qkv[::-1] if tp_size > 1 else qkv
    is_bert, is_post = config.architecture == "bert", config.norm_order is NormOrder.POST
    heads = [v, *norm, h, h * h, 2, 2 * h, h, h * h] if is_bert else []  # masked LM, sentence order, pooler
    layer = [*norm, *mlp, *norm, *attention] if is_post else [*mlp, *norm, *attention, *norm]
    layers = config.num_layers * layer
    types = [NUM_TOKEN_TYPES * h] if is_bert else []
    around = [*layers, *norm] if is_post else [*norm, *layers]
    return [*heads, *around, *types, config.max_position_embeddings * h, v * h]
