"""GPT-2 of transformers: names, configuration and tokenizer."""

import re

from ...config import TransformerConfig
from ..hugging_face import QKV_BIAS, QKV_TRANSPOSED, SAME, TRANSPOSED, USED_ROWS, HuggingFaceModel, TensorPair, module
from .family import FAMILY

(END_OF_TEXT,) = FAMILY.corpus.special_tokens
PUBLISHED_VOCABULARY, PUBLISHED_END = 50257, 50256


def _token_ids(ids: dict[str, int] | None, config: TransformerConfig) -> dict[str, int | None]:
    """The tokenizer's end-of-text, or the published id where the vocabulary is the published one."""
    published = PUBLISHED_END if config.vocab_size == PUBLISHED_VOCABULARY else None
    end = published if ids is None else ids.get(END_OF_TEXT)
    return {"bos_token_id": end, "eos_token_id": end}


GPT2 = HuggingFaceModel(
    model_type="gpt2",
    model_class="GPT2LMHeadModel",
    settings={"family": "gpt", "norm_order": "pre"},
    keys={
        "vocab_size": "vocab_size",
        "n_positions": "max_position_embeddings",
        "n_embd": "hidden_size",
        "n_layer": "num_layers",
        "n_head": "num_attention_heads",
        "n_inner": "ffn_hidden_size",
        "activation_function": "gelu",
        "layer_norm_epsilon": "layer_norm_eps",
        "resid_pdrop": "hidden_dropout",
        "attn_pdrop": "attention_dropout",
        "embd_pdrop": "embedding_dropout",
        "initializer_range": "initializer_std",
    },
    prefix="transformer.",
    layers="transformer.h",
    outer=(
        TensorPair("transformer.wte.weight", "transformer.word_embedding.weight", USED_ROWS),
        TensorPair("transformer.wpe.weight", "transformer.position_embedding", SAME),
        *module("transformer.ln_f", "transformer.final_norm"),
    ),
    layer=(
        *module("ln_1", "attention_norm"),
        TensorPair("attn.c_attn.weight", "attention.qkv.weight", QKV_TRANSPOSED),
        TensorPair("attn.c_attn.bias", "attention.qkv.bias", QKV_BIAS),
        *module("attn.c_proj", "attention.output", TRANSPOSED),
        *module("ln_2", "mlp_norm"),
        *module("mlp.c_fc", "mlp.up", TRANSPOSED),
        *module("mlp.c_proj", "mlp.down", TRANSPOSED),
    ),
    aliases={"lm_head.weight": "transformer.wte.weight"},
    ignored=re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"),  # the causal mask and its -1e4
    token_ids=_token_ids,
    positions="transformer.wpe.weight",
    readouts=("transformer.final_norm.",),
)
MODELS = (GPT2,)
