"""Our tensors under the names and in the layouts of Hugging Face's GPT-2, BERT and Megatron-BERT.

Every step is a permutation, so the same function maps weights and gradients.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    MegatronBertConfig,
    MegatronBertForPreTraining,
)

from lmscale.config import NormOrder, TransformerConfig

GPT2_NAMES = {
    "transformer.word_embedding.weight": "transformer.wte.weight",
    "transformer.position_embedding": "transformer.wpe.weight",
    "transformer.final_norm": "transformer.ln_f",
}
GPT2_LAYER_NAMES = {
    "attention_norm": "ln_1",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
BERT_NAMES = {
    "transformer.word_embedding.weight": "bert.embeddings.word_embeddings.weight",
    "transformer.position_embedding": "bert.embeddings.position_embeddings.weight",
    "transformer.token_type_embedding": "bert.embeddings.token_type_embeddings.weight",
    "transformer.embedding_norm": "bert.embeddings.LayerNorm",  # post
    "transformer.final_norm": "bert.encoder.ln",  # pre
    "pooler": "bert.pooler.dense",
    "lm_head.bias": "cls.predictions.bias",
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.norm": "cls.predictions.transform.LayerNorm",
    "order_head": "cls.seq_relationship",
}
BERT_LAYER_NAMES = {
    "attention.output": "attention.output.dense",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
POST_NORM_NAMES = {"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"}
PRE_NORM_NAMES = {"attention_norm": "attention.ln", "mlp_norm": "ln"}


def to_transformers(tensors: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Rename and lay out whole tensors (tp_size 1) as the published model of `config` has them.

    Linears: ours are [out, in] as in BERT; GPT-2's Conv1D is [in, out]. QKV: our rows are [head, (q, k, v), d]; GPT-2
    has [Q; K; V] in one tensor, BERT three. Padded vocabulary rows are left out.
    """
    mapped = {}
    for name, tensor in tensors.items():
        if name in ("transformer.word_embedding.weight", "lm_head.bias"):
            tensor = tensor[: config.vocab_size]
        if not name.startswith("transformer.layers."):
            mapped[_rename(name, GPT2_NAMES if config.architecture == "gpt" else BERT_NAMES)] = tensor
            continue
        _, _, index, part = name.split(".", 3)
        mapped.update(_map_in_layer(part, tensor, index, config))
    return mapped


def _map_in_layer(part: str, tensor: Tensor, index: str, config: TransformerConfig) -> dict[str, Tensor]:
    kind = part.rsplit(".", 1)[1]  # weight or bias
    if part.startswith("attention.qkv"):
        by_head = tensor.view(config.num_attention_heads, 3, config.head_size, *tensor.shape[1:])
        q, k, v = (by_head[:, i].reshape(-1, *tensor.shape[1:]) for i in range(3))
        if config.architecture == "gpt":
            fused = torch.cat([q, k, v])
            return {f"transformer.h.{index}.attn.c_attn.{kind}": fused.T if kind == "weight" else fused}
        own = f"bert.encoder.layer.{index}.attention.self"
        return {f"{own}.query.{kind}": q, f"{own}.key.{kind}": k, f"{own}.value.{kind}": v}
    if config.architecture == "gpt":
        # A LayerNorm's weight has one dimension, and .T would warn.
        return {f"transformer.h.{index}.{_rename(part, GPT2_LAYER_NAMES)}": tensor.T if tensor.ndim == 2 else tensor}
    norms = POST_NORM_NAMES if config.norm_order is NormOrder.POST else PRE_NORM_NAMES
    return {f"bert.encoder.layer.{index}.{_rename(part, BERT_LAYER_NAMES | norms)}": tensor}


def _rename(name: str, names: Mapping[str, str]) -> str:
    if name in names:
        return names[name]
    owner, kind = name.rsplit(".", 1)
    return f"{names[owner]}.{kind}"


def published_model(config: TransformerConfig) -> nn.Module:
    """The untrained published model with the sizes of `config`: GPT-2, BERT (post) or Megatron-BERT (pre), no dropout.

    GELU and epsilon are written out as published and not taken from `config`, so that a wrong default of ours shows.
    """
    if config.architecture == "gpt":
        sizes = GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_position_embeddings,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_attention_heads,
            activation_function="gelu_new",
            layer_norm_epsilon=1e-5,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=None,  # the published ids lie outside a small vocabulary
            eos_token_id=None,
            attn_implementation="eager",
        )
        return GPT2LMHeadModel(sizes)
    is_post = config.norm_order is NormOrder.POST
    sizes = (BertConfig if is_post else MegatronBertConfig)(
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        intermediate_size=config.ffn_size,
        hidden_act="gelu",
        layer_norm_eps=1e-12 if is_post else 1e-5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    return (BertForPreTraining if is_post else MegatronBertForPreTraining)(sizes)


def load_published(config: TransformerConfig, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The published model with our weights in it, in their dtype; every parameter of either side has a partner."""
    model = published_model(config).to(next(iter(tensors.values())).dtype)
    parameters, mapped = dict(model.named_parameters()), to_transformers(tensors, config)
    assert set(parameters) == set(mapped)
    with torch.no_grad():
        for name, param in parameters.items():
            assert param.shape == mapped[name].shape, name
            param.copy_(mapped[name])
    return model
