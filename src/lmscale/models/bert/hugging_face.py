"""BERT and Megatron-BERT of transformers: names, configuration and tokenizer."""

import re
from functools import partial

from ...config import TransformerConfig
from ..hugging_face import KEY, QUERY, SAME, USED_ROWS, VALUE, HuggingFaceModel, TaskHead, TensorPair, module

_KEYS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "ffn_hidden_size",
    "hidden_act": "gelu",
    "layer_norm_eps": "layer_norm_eps",
    "hidden_dropout_prob": "hidden_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "initializer_std",
}
_OUTER = (
    TensorPair("bert.embeddings.word_embeddings.weight", "transformer.word_embedding.weight", USED_ROWS),
    TensorPair("bert.embeddings.position_embeddings.weight", "transformer.position_embedding", SAME),
    TensorPair("bert.embeddings.token_type_embeddings.weight", "transformer.token_type_embedding", SAME),
    *module("bert.pooler.dense", "pooler"),
    TensorPair("cls.predictions.bias", "lm_head.bias", USED_ROWS),
    *module("cls.predictions.transform.dense", "lm_head.dense"),
    *module("cls.predictions.transform.LayerNorm", "lm_head.norm"),
    *module("cls.seq_relationship", "order_head"),
)
_LAYER = (
    *(
        TensorPair(f"attention.self.{name}.{kind}", f"attention.qkv.{kind}", view)
        for kind in ("weight", "bias")
        for name, view in (("query", QUERY), ("key", KEY), ("value", VALUE))
    ),
    *module("attention.output.dense", "attention.output"),
    *module("intermediate.dense", "mlp.up"),
    *module("output.dense", "mlp.down"),
)
_ALIASES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_IGNORED = re.compile(r"bert\.embeddings\.(position_ids|token_type_ids)")  # 0, 1, 2, ... and zeros


def _token_ids(ids: dict[str, int] | None, config: TransformerConfig) -> dict[str, int | None]:
    """The tokenizer's padding, or the published id."""
    return {"pad_token_id": 0 if ids is None else ids.get("[PAD]")}


_model = partial(
    HuggingFaceModel,
    keys=_KEYS,
    prefix="bert.",
    layers="bert.encoder.layer",
    aliases=_ALIASES,
    ignored=_IGNORED,
    new_heads=("pooler.", "lm_head.", "order_head."),
    token_ids=_token_ids,
    positions="bert.embeddings.position_embeddings.weight",
    readouts=("lm_head.norm.", "order_head.weight", "head.weight"),
    task_heads={
        "classification": TaskHead("ForSequenceClassification", "classifier"),
        "regression": TaskHead("ForSequenceClassification", "classifier"),
        "choice": TaskHead("ForMultipleChoice", "classifier", has_choices=True),
        "span": TaskHead("ForQuestionAnswering", "qa_outputs", has_pooler=False),
    },
)
POST_NORM = _model(
    model_type="bert",
    model_class="BertForPreTraining",
    settings={"family": "bert", "norm_order": "post"},
    outer=(*_OUTER, *module("bert.embeddings.LayerNorm", "transformer.embedding_norm")),
    layer=(
        *_LAYER,
        *module("attention.output.LayerNorm", "attention_norm"),
        *module("output.LayerNorm", "mlp_norm"),
    ),
)
PRE_NORM = _model(
    model_type="megatron-bert",
    model_class="MegatronBertForPreTraining",
    settings={"family": "bert", "norm_order": "pre"},
    outer=(*_OUTER, *module("bert.encoder.ln", "transformer.final_norm")),
    layer=(*_LAYER, *module("attention.ln", "attention_norm"), *module("ln", "mlp_norm")),
)
MODELS = (POST_NORM, PRE_NORM)
