"""Published models with our weights, by the converter's table of names."""

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

from lmscale.config import TransformerConfig
from lmscale.models.hugging_face import model_of


def to_transformers(tensors: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Full tensors (tp_size 1), weights or gradients, with the published model's names and layouts."""
    rows = model_of(config).rows(config)
    assert {row.ours for row in rows} == set(tensors)
    return {row.theirs: row.to_theirs(tensors[row.ours], config) for row in rows}


def published_model(config: TransformerConfig) -> nn.Module:
    """The untrained published model with the sizes of `config`: GPT-2, BERT (post) or Megatron-BERT (pre), no dropout.

    GELU and epsilon are the published ones, not taken from `config`, so that a wrong default of ours is detected.
    """
    if config.family == "gpt":
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
            bos_token_id=None,  # the published ids exceed a small vocabulary
            eos_token_id=None,
            attn_implementation="eager",
        )
        return GPT2LMHeadModel(sizes)
    is_post = config.norm_order == "post"
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
    """The published model with our weights, in their dtype; every parameter of either side must have a counterpart."""
    model = published_model(config).to(next(iter(tensors.values())).dtype)
    parameters, mapped = dict(model.named_parameters()), to_transformers(tensors, config)
    assert set(parameters) == set(mapped)
    with torch.no_grad():
        for name, param in parameters.items():
            assert param.shape == mapped[name].shape, name
            param.copy_(mapped[name])
    return model
