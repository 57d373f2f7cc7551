"""What a model of Hugging Face must not bring, and mistakes that the comparison after a conversion must see."""

import dataclasses
import json
import pickle
from pathlib import Path

import pytest
import torch
from checkpoints import (
    BERT,
    GPT,
    MEGATRON_BERT,
    Trap,
    edit_config,
    edit_tensors,
    family_config,
    save_random,
    save_theirs,
    spoil,
    their_weights,
)
from torch.nn import functional
from transformers.activations import ACT2FN

from lmscale.checkpoint import Checkpoint, CheckpointError
from lmscale.config import TransformerConfig
from lmscale.hugging_face import config as hf_config
from lmscale.hugging_face import conversion as hf_conversion
from lmscale.hugging_face.conversion import export_hugging_face, import_hugging_face


@pytest.mark.parametrize(
    "name, key, value, message",
    [
        (GPT, "scale_attn_weights", False, "`scale_attn_weights` of config.json must be True, but is False"),
        (GPT, "scale_attn_by_inverse_layer_idx", True, "must be False, but is True"),
        (GPT, "reorder_and_upcast_attn", True, "must be False, but is True"),
        (GPT, "add_cross_attention", True, "must be False, but is True"),
        (GPT, "tie_word_embeddings", False, "must be True, but is False"),
        (GPT, "activation_function", "relu", "must be one of gelu_new, gelu_fast, gelu_accurate, gelu_pytorch_tanh"),
        (GPT, "n_ctx", 5, "`n_ctx` of config.json"),
        (GPT, "n_embd", "wide", "config.json has a wrong value"),
        (GPT, "n_head", 5, "`hidden_size` must be a multiple of `num_attention_heads` (5)"),
        (GPT, "n_inner", 50, "tensor transformer.h.0.mlp.c_proj.weight must be (50, 24), but is (96, 24)"),
        (GPT, "n_layer", 10**9, "`n_layer` of config.json must be at most the 40 tensors of"),
        (GPT, "n_positions", 10**30, "sizes must be ones that torch can count"),
        (GPT, "model_type", "llama", "must be one of gpt2, bert, megatron-bert, but is 'llama'"),
        (GPT, "model_type", ["gpt2"], "must be one of gpt2, bert, megatron-bert, but is ['gpt2']"),
        (GPT, "auto_map", {"AutoModel": "x.Y"}, "has keys not known here: `auto_map` ({'AutoModel': 'x.Y'}); "),
        (GPT, "quantization_config", {"bits": 4}, "config.json has keys not known here: `quantization_config` ({"),
        (BERT, "position_embedding_type", "relative_key", "must be 'absolute', but is 'relative_key'"),
        (BERT, "is_decoder", True, "`is_decoder` of config.json must be False"),
        (BERT, "type_vocab_size", 3, "`type_vocab_size` of config.json must be 2, but is 3"),
        (BERT, "hidden_act", "silu", "`hidden_act` of config.json must be one of"),
        (BERT, "intermediate_size", 50, "must be (24, 50), but is (24, 96)"),
        (BERT, "vocab_size", 98, "must be (98,), but is (99,)"),
        (BERT, "pruned_heads", {"0": [1]}, "`pruned_heads` of config.json must be {}"),
    ],
)
def test_what_ours_cannot_compute_is_refused_by_its_name(tmp_path, name, key, value, message) -> None:
    save_theirs(tmp_path / "theirs", name)
    edit_config(tmp_path / "theirs", **{key: value})
    with pytest.raises(CheckpointError) as caught:
        import_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "theirs"]


def test_all_unknown_keys_are_listed_at_once(tmp_path) -> None:
    save_theirs(tmp_path / "theirs", BERT)
    edit_config(tmp_path / "theirs", rotary=True, num_labels=3, experts=4)
    with pytest.raises(CheckpointError, match=r"not known here: `rotary` \(True\), `experts` \(4\); delete"):
        import_hugging_face(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize("name", [GPT, BERT])
def test_keys_that_change_no_output_change_no_import(tmp_path, name: str) -> None:
    """What transformers 2 to 4, distilgpt2 and the converters of Megatron-LM wrote beside the sizes."""
    save_theirs(tmp_path / "theirs", name)
    plain = Checkpoint.open(import_hugging_face(tmp_path / "theirs", tmp_path / "plain")).metadata
    generation = {"do_sample": True, "max_length": 50, "min_length": 0, "num_beams": 2, "num_return_sequences": 1}
    generation |= {"early_stopping": False, "length_penalty": 2.0, "repetition_penalty": 1.3, "eos_token_ids": 0}
    generation |= {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "typical_p": 1.0, "output_scores": False}
    heads = {"_num_labels": 1, "n_special": 0, "predict_special_tokens": True}
    running = {"torchscript": False, "use_bfloat16": False, "tf_legacy_loss": False, "xla_device": None}
    running |= {"_attn_implementation_autoset": True, "attn_implementation": "sdpa", "_attn_implementation": "sdpa"}
    names = {"tokenizer_type": "BertWordPieceLowerCase", "vocab_size_or_config_json_file": 99, "unk_token_id": 1}
    names |= {"cls_token_id": 2, "mask_token_id": 3}
    edit_config(tmp_path / "theirs", **generation, **heads, **running, **names)
    ours = Checkpoint.open(import_hugging_face(tmp_path / "theirs", tmp_path / "ours")).metadata
    assert (ours.model, ours.tensors) == (plain.model, plain.tensors)


def test_the_names_of_gelu_are_all_that_transformers_has_for_its_two_forms() -> None:
    x = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    forms = {"tanh": functional.gelu(x, approximate="tanh"), "erf": functional.gelu(x)}
    found = {}
    for name in ACT2FN:
        for form, ours in forms.items():
            if "gelu" in name and (ACT2FN[name](x) - ours).abs().max() < 1e-11:
                found[name] = form
    assert found == hf_config.GELU_FORMS


# transformers' converter of Megatron-LM's GPT writes gelu_fast
@pytest.mark.parametrize("spelling, form", [("gelu_fast", "tanh"), ("gelu_new", "tanh"), ("gelu_python", "erf")])
def test_each_spelling_of_gelu_is_the_form_it_means(tmp_path, spelling, form) -> None:
    save_theirs(tmp_path / "theirs", GPT)
    edit_config(tmp_path / "theirs", activation_function=spelling)
    ours = Checkpoint.open(import_hugging_face(tmp_path / "theirs", tmp_path / "ours"))
    assert TransformerConfig.from_dict(ours.metadata.model).gelu_form == form


def test_models_that_transformers_does_not_have_are_refused(tmp_path) -> None:
    post, _ = save_random(tmp_path / "post", family_config(GPT, norm_order="post"))
    with pytest.raises(ValueError, match="`norm_order` of a GPT must be pre"):
        export_hugging_face(post, tmp_path / "target")
    qk_norm, _ = save_random(tmp_path / "qk_norm", family_config(GPT, qk_norm=True))
    with pytest.raises(ValueError, match="`qk_norm` must be false for Hugging Face"):
        export_hugging_face(qk_norm, tmp_path / "target")
    dropout, _ = save_random(tmp_path / "dropout", family_config(BERT, embedding_dropout=0.4))
    with pytest.raises(CheckpointError, match="`embedding_dropout` of a BERT must equal hidden_dropout"):
        export_hugging_face(dropout, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    "name, change, message",
    [
        (GPT, lambda t: t.update({"transformer.extra": torch.ones(1)}), "no tensor of ours takes transformer.extra"),
        (GPT, lambda t: t.pop("transformer.wpe.weight"), "lacks transformer.wpe.weight"),
        (
            GPT,
            lambda t: t.update({"lm_head.weight": torch.ones(99, 24)}),
            "lm_head.weight must equal transformer.wte.weight",
        ),
        (GPT, lambda t: t.update({"lm_head.weight": torch.tensor(1.0)}), "must equal transformer.wte.weight (tied)"),
        (GPT, lambda t: t.update({"wte.weight": torch.ones(99, 24)}), "transformer.wte.weight is there twice"),
        (GPT, lambda t: t.update({"transformer.wpe.weight": torch.ones(13, 24).int()}), "must be of a float type"),
        (
            BERT,
            lambda t: t.update({"classifier.weight": torch.ones(2, 24)}),
            "no tensor of ours takes classifier.weight",
        ),
        (BERT, lambda t: t.pop("cls.predictions.bias"), "lacks cls.predictions.bias"),  # a part of a head
        (BERT, lambda t: t.update({"cls.predictions.decoder.bias": torch.ones(99)}), "(tied)"),
        (
            BERT,
            lambda t: t.pop("bert.encoder.layer.1.output.dense.bias"),
            "lacks bert.encoder.layer.1.output.dense.bias",
        ),
    ],
)
def test_a_tensor_without_a_place_or_a_place_without_a_tensor_is_refused(tmp_path, name, change, message) -> None:
    save_theirs(tmp_path / "theirs", name)
    edit_tensors(tmp_path / "theirs", change)
    with pytest.raises(CheckpointError) as caught:
        import_hugging_face(tmp_path / "theirs", tmp_path / "ours", initialize_missing_heads=True)
    assert message in str(caught.value)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "theirs"]
    assert not [link for link in Path("/proc/self/fd").iterdir() if link.resolve().is_relative_to(tmp_path)]


@pytest.mark.parametrize("form", ["zip", "legacy", "bare"])
def test_a_hostile_bin_is_refused_and_runs_nothing(tmp_path, form: str) -> None:
    save_theirs(tmp_path / "theirs", GPT)
    (tmp_path / "theirs" / "model.safetensors").unlink()
    trap, file = tmp_path / "trap", tmp_path / "theirs" / "pytorch_model.bin"
    if form == "bare":
        file.write_bytes(pickle.dumps(Trap(trap)))
    else:
        torch.save({"wte.weight": Trap(trap)}, file, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(CheckpointError, match="`source` must have .* but pytorch_model.bin is not read: ") as caught:
        import_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "theirs"]
    with pytest.raises(FileExistsError):  # the trap works
        trap.mkdir()
        pickle.loads(pickle.dumps(Trap(trap)))


def test_an_index_cannot_name_files_elsewhere(tmp_path) -> None:
    save_theirs(tmp_path / "theirs", GPT)
    (tmp_path / "theirs" / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = tmp_path / "theirs" / "model.safetensors.index.json"
    for text in ('{"weight_map": {"a": "../outside.safetensors"}}', "[]", "{", '{"weight_map": {"a": 3}}'):
        index.write_text(text)
        with pytest.raises(CheckpointError, match="index.json cannot be used"):
            import_hugging_face(tmp_path / "theirs", tmp_path / "ours")


def test_a_model_type_that_the_tensors_do_not_tell_is_asked_for(tmp_path) -> None:
    save_theirs(tmp_path / "theirs", GPT)
    edit_config(tmp_path / "theirs", model_type=None)
    edit_tensors(tmp_path / "theirs", lambda tensors: tensors.pop("transformer.h.0.ln_1.weight"))
    with pytest.raises(CheckpointError, match="`model_type` of config.json must be one of .*, but is None"):
        import_hugging_face(tmp_path / "theirs", tmp_path / "ours")


SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")


@pytest.mark.parametrize("name, key", [*((GPT, key) for key in SIZES), (BERT, SIZES[0]), (MEGATRON_BERT, SIZES[0])])
def test_a_missing_size_is_refused_whatever_transformers_would_take_for_it(tmp_path, name: str, key: str) -> None:
    save_theirs(tmp_path / "theirs", name)
    path = tmp_path / "theirs" / "config.json"
    values = json.loads(path.read_text())
    del values[key]
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=f"`{key}` of config.json must be given, but is not there"):
        import_hugging_face(tmp_path / "theirs", tmp_path / "ours")


def test_tied_tensors_that_differ_only_before_their_last_rows_are_refused(tmp_path) -> None:
    save_theirs(tmp_path / "theirs", GPT)
    edit_tensors(tmp_path / "theirs", lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"].clone()}))
    edit_tensors(tmp_path / "theirs", lambda t: t["lm_head.weight"][0].add_(1.0))
    with pytest.raises(CheckpointError, match="lm_head.weight must equal transformer.wte.weight"):
        import_hugging_face(tmp_path / "theirs", tmp_path / "ours")


# Mistakes of other converters (transformers issues 12004, 14082 and 32486: the order of QKV, LayerNorms).


@pytest.mark.parametrize("name, what", [(GPT, "gelu"), (BERT, "layer_norm_eps")])
def test_a_wrong_form_in_the_configuration_is_refused_by_the_comparison(tmp_path, monkeypatch, name, what) -> None:
    config = family_config(name)
    source, _ = save_random(tmp_path / "source", config)
    published = export_hugging_face(source, tmp_path / "published")
    wrong = {
        "gelu": {"tanh": "erf", "erf": "tanh"}[config.gelu_form],
        "layer_norm_eps": 1e-12 if config.norm_eps == 1e-5 else 1e-5,
    }[what]
    write, read, spoil = hf_config.config_to_hf, hf_config.config_from_hf, {what: wrong}
    monkeypatch.setattr(
        hf_conversion, "config_to_hf", lambda config, *rest: write(dataclasses.replace(config, **spoil), *rest)
    )
    monkeypatch.setattr(hf_conversion, "config_from_hf", lambda *rest: dataclasses.replace(read(*rest), **spoil))
    with pytest.raises(CheckpointError, match="does not compute the same"):
        export_hugging_face(source, tmp_path / "target")
    with pytest.raises(CheckpointError, match="does not compute the same"):
        import_hugging_face(published, tmp_path / "target", vocab_multiple=8)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "published", tmp_path / "source"]


@pytest.mark.parametrize("name", [GPT, BERT, pytest.param(MEGATRON_BERT, marks=pytest.mark.slow)])
def test_one_wrong_number_in_any_tensor_is_noticed(tmp_path, monkeypatch, name: str) -> None:
    """The last row of every tensor in turn: nothing that is written goes uncompared."""
    source, _ = save_random(tmp_path / "source", family_config(name, num_layers=1))
    names = set(their_weights(export_hugging_face(source, tmp_path / "published")))
    for spoilt in sorted(names):
        if spoilt.endswith("key.bias"):  # softmax ignores what all scores of a query share
            continue
        with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="does not compute the same"):
            spoil(patched, spoilt)
            export_hugging_face(source, tmp_path / "target")
        assert sorted(tmp_path.iterdir()) == [tmp_path / "published", tmp_path / "source"]


def test_a_weight_beyond_fp16_is_refused(tmp_path, monkeypatch) -> None:
    original = hf_conversion._read_theirs

    def larger(*arguments):
        return ((name, tensor * 1e6 if "mlp" in name else tensor) for name, tensor in original(*arguments))

    monkeypatch.setattr(hf_conversion, "_read_theirs", larger)
    source, _ = save_random(tmp_path / "source", family_config(GPT))
    with pytest.raises(CheckpointError, match="layer 0 with .* differs by (nan|inf)"):
        export_hugging_face(source, tmp_path / "target", torch.float16)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "source"]
