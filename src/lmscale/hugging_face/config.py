"""A model's `config.json` of Hugging Face and our `TransformerConfig`: every key mapped, or refused by its name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint.errors import CheckpointError
from ..config import TransformerConfig
from ..config.family import family_of
from ..models.hugging_face import HuggingFaceModel, model_of, models_by_type

# transformers has more names than functions; gelu_10 and quick_gelu are others.
_TANH = ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh")
GELU_FORMS = dict.fromkeys(_TANH, "tanh") | dict.fromkeys(("gelu", "gelu_python"), "erf")
GELU_NAMES = {"tanh": "gelu_new", "erf": "gelu"}

# Keys that change what the model computes, with the only value that ours computes.
_FIXED: dict[str, Any] = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "tie_word_embeddings": True,
    "position_embedding_type": "absolute",
    "pruned_heads": {},
}
# Keys that do not change what it computes: names, ids, other tasks' heads, generation, how it is run.
_WITHOUT_EFFECT = set(
    """_name_or_path architectures model_type torch_dtype dtype transformers_version use_cache bos_token_id eos_token_id
    pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix task_specific_params finetuning_task
    problem_type id2label label2id classifier_dropout summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout gradient_checkpointing chunk_size_feed_forward output_attentions
    output_hidden_states output_past return_dict cross_attention_hidden_size directionality pooler_fc_size
    pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
    _num_labels num_labels n_special predict_special_tokens vocab_size_or_config_json_file tokenizer_type cls_token_id
    mask_token_id unk_token_id _attn_implementation _attn_implementation_autoset attn_implementation torchscript
    tf_legacy_loss use_bfloat16 xla_device use_return_dict tie_encoder_decoder
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    eos_token_ids exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p""".split()
)
# Sizes whose default in transformers is one model's.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "max_position_embeddings",
    "ffn_hidden_size",
    "num_layers",
    "num_attention_heads",
)

_VARIED = ("num_layers", "vocab_size", "max_position_embeddings")  # in which a model for comparison differs


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """The values of a `config.json`.

    Raises:
        CheckpointError: it is missing or no JSON object.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__})") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, but holds {values!r}"[:200])
    return values


def hf_model(values: dict[str, Any]) -> HuggingFaceModel:
    """Return the model that a `config.json` describes.

    Raises:
        CheckpointError: it is not GPT-2, BERT or Megatron-BERT.
    """
    models, found = models_by_type(), values.get("model_type")
    if found not in list(models):
        raise CheckpointError(f"`model_type` of config.json must be one of {', '.join(models)}, but is {found!r}")
    return models[found]


def type_of_tensors(names: set[str]) -> str | None:
    """Return the model type that files of 2019 leave out, by the names of the tensors; None if it is unknown."""
    for found, model in models_by_type().items():
        if {f"{model.layers}.0.{row.theirs}" for row in model.layer} <= {model.full_name(name) for name in names}:
            return found
    return None


def with_defaults(values: dict[str, Any]) -> Any:
    """transformers' configuration object of these values, with its defaults for what they leave out."""
    import transformers

    kind = transformers.CONFIG_MAPPING[hf_model(values).model_type]
    try:
        return kind.from_dict(values)
    except Exception as error:  # its validation has error classes of several libraries
        raise CheckpointError(f"config.json has a wrong value: {' '.join(str(error).split())}"[:300]) from None


def config_from_hf(values: dict[str, Any], vocab_multiple: int | None = None) -> TransformerConfig:
    """Our configuration of a model of Hugging Face.

    Where a value is what None stands for in ours (epsilon, GELU, MLP width), it becomes None, so that a round trip
    gives an equal configuration.

    Args:
        values: content of its `config.json`.
        vocab_multiple: rows of the vocabulary are padded to a multiple of this; None: our default.

    Raises:
        CheckpointError: a key whose value ours cannot compute with, an unknown one, or a missing size.
    """
    model = hf_model(values)
    num_types = family_of(model.settings["family"]).num_token_types
    fixed = _FIXED | ({"type_vocab_size": num_types} if num_types else {})
    published = with_defaults(values)
    if hasattr(published, "n_positions"):
        fixed |= {"n_ctx": published.n_positions}  # another name of it in old files
    known = {*model.keys, *fixed, *_WITHOUT_EFFECT}
    if unknown := [f"`{key}` ({values[key]!r})" for key in values if key not in known]:
        raise CheckpointError(f"config.json has keys not known here: {', '.join(unknown)}; delete those without effect")
    for key in values:
        if key in fixed and values[key] not in (fixed[key], None):
            raise CheckpointError(f"`{key}` of config.json must be {fixed[key]!r}, but is {values[key]!r}")
    ours = {name: getattr(published, key) for key, name in model.keys.items()}
    for field in _SIZES:
        key = model.their_key(field)
        if key not in values and ours[field] is not None:
            raise CheckpointError(f"`{key}` of config.json must be given, but is not there")
    if ours["gelu"] not in GELU_FORMS:
        activation, forms = model.their_key("gelu"), ", ".join(GELU_FORMS)
        raise CheckpointError(f"`{activation}` of config.json must be one of {forms}, but is {ours['gelu']!r}")
    ours["gelu"] = GELU_FORMS[ours["gelu"]]
    if vocab_multiple is not None:
        ours["vocab_multiple"] = vocab_multiple
    try:
        return _shortest(TransformerConfig(**model.settings, **ours))
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from None


def _shortest(config: TransformerConfig) -> TransformerConfig:
    """The same configuration with None wherever that means the value it has."""
    for name in ("ffn_hidden_size", "layer_norm_eps", "gelu", "embedding_dropout"):
        shorter = replace(config, **{name: None})
        same = (shorter.ffn_size, shorter.norm_eps, shorter.gelu_form, shorter.input_dropout)
        if same == (config.ffn_size, config.norm_eps, config.gelu_form, config.input_dropout):
            config = shorter
    return config


def config_to_hf(config: TransformerConfig, dtype: str, token_ids: dict[str, int | None], **settings: Any) -> Any:
    """transformers' configuration object of our model; every value that has a default in ours is written out.

    Args:
        dtype: torch's name of the type of the weights, such as `float32`.
        token_ids: `bos_token_id`, `eos_token_id`, `pad_token_id` as far as the family has them.
        settings: keys of a finetuned model.

    Raises:
        CheckpointError: transformers has no such model: a GPT with post-norm, a BERT whose embeddings have a dropout
            of their own.
    """
    import transformers

    model = model_of(config)
    if "embedding_dropout" not in model.keys.values() and config.input_dropout != config.hidden_dropout:
        raise CheckpointError(
            f"`embedding_dropout` of a {config.family.upper()} must equal hidden_dropout ({config.hidden_dropout}) for "
            f"Hugging Face, but is {config.input_dropout}"
        )
    ours = config.to_dict() | {
        "ffn_hidden_size": config.ffn_size,
        "gelu": GELU_NAMES[config.gelu_form],
        "layer_norm_eps": config.norm_eps,
        "embedding_dropout": config.input_dropout,
    }
    values = {key: ours[name] for key, name in model.keys.items()}
    kind = transformers.CONFIG_MAPPING[model.model_type]
    return kind(**{"architectures": [model.model_class], "dtype": dtype} | values | token_ids | settings)


def generation_to_hf(config: TransformerConfig, token_ids: dict[str, int | None]) -> Any:
    """transformers' generation configuration of a short GPT, which ends a text at the last position; else None.

    The pipeline adds 256 tokens to a prompt where no length is set, and a model with fewer positions fails.
    """
    import transformers

    if not config.traits.is_causal or config.max_position_embeddings > 256:
        return None
    return transformers.GenerationConfig(**token_ids, max_length=config.max_position_embeddings)


def small_hf_model(values: dict[str, Any], model: HuggingFaceModel, sizes: TransformerConfig) -> Any:
    """transformers' model of a `config.json` with other numbers of layers, words and positions, on the meta device."""
    import torch
    import transformers

    small = {model.their_key(field): getattr(sizes, field) for field in _VARIED}
    small |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": False}
    published = with_defaults({**values, **small})
    published._attn_implementation = "eager"
    with torch.device("meta"):
        return getattr(transformers, model.model_class)(published).eval()
