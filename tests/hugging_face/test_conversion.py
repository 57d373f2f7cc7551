"""Models of Hugging Face read and written: the same function on both sides, and the same bits back."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checkpoints import (
    BERT,
    FAMILIES,
    GPT,
    MEGATRON_BERT,
    edit_config,
    edit_tensors,
    family_config,
    load_ours,
    padded,
    save_random,
    save_theirs,
    their_weights,
    weights_of,
    with_multiple,
)
from safetensors.torch import load_file
from sharding import equal_tensors, random_batch
from torch import Tensor

from lmscale.checkpoint import Checkpoint, CheckpointError
from lmscale.checkpoint.reshard import reshard
from lmscale.config import TransformerConfig
from lmscale.data.tokenizer import Tokenizer, train_tokenizer, write_tokenizer
from lmscale.finetune.batches import collate
from lmscale.finetune.features import Features
from lmscale.finetune.pairs import join_pair, pack
from lmscale.hugging_face.conversion import export_hugging_face, import_hugging_face
from lmscale.hugging_face.files import HuggingFaceReader
from lmscale.models import build_model
from lmscale.models.hugging_face import model_of
from lmscale.parallel import ParallelContext

AUTO = {
    GPT: transformers.AutoModelForCausalLM,
    BERT: transformers.AutoModelForPreTraining,
    MEGATRON_BERT: transformers.AutoModelForPreTraining,
}


BASES = {"base_hidden_size": 6, "base_head_size": 3}
COMPLETEP = {"parametrization": "completep", "base_num_layers": 1}
MULTIPLIED = {name: BASES | ({"parametrization": "mup"} if name == BERT else COMPLETEP) for name in FAMILIES}


@pytest.mark.parametrize("name, changes", [*((name, {}) for name in FAMILIES), *MULTIPLIED.items()])
def test_the_written_model_loads_with_the_auto_classes_and_gives_our_logits(tmp_path, name: str, changes: dict) -> None:
    config = family_config(name, **changes)
    source, _ = save_random(tmp_path / "source", config)
    target = export_hugging_face(source, tmp_path / "target")
    theirs, report = AUTO[name].from_pretrained(target, output_loading_info=True)
    assert type(theirs).__name__ == name
    assert not any(report.values()), report
    batch = random_batch(config)
    ours = load_ours(source)
    with torch.inference_mode():
        if config.family == "gpt":
            a, b = ours(batch["tokens"]), theirs(batch["tokens"]).logits
        else:
            a, order = ours(batch["tokens"], batch["token_types"], batch["attention_mask"])
            output = theirs.eval()(
                batch["tokens"], token_type_ids=batch["token_types"], attention_mask=batch["attention_mask"].long()
            )
            real = batch["attention_mask"]
            a, b = a[real], output.prediction_logits[real]
            assert (order - output.seq_relationship_logits).abs().max() < 1e-4
    assert (a[..., : config.vocab_size] - b).abs().max() < 1e-4
    base = transformers.AutoModel.from_pretrained(target)
    assert base.config.num_hidden_layers == config.num_layers


@pytest.mark.parametrize("name", FAMILIES)
def test_ours_to_theirs_and_back_is_bit_exact_at_any_layout_and_padding(tmp_path, name: str) -> None:
    config = family_config(name, embedding_dropout=0.1 if name == GPT else None)
    source, tensors = save_random(tmp_path / "source", config, tp_size=4)
    published = export_hugging_face(source, tmp_path / "published")
    weights = {key: value for key, value in tensors.items() if key.startswith("model/")}
    for tp_size, multiple in ((1, config.vocab_multiple), (2, config.vocab_multiple), (4, 1024)):
        back = import_hugging_face(published, tmp_path / f"back_{tp_size}", tp_size, multiple)
        wide = with_multiple(config, multiple)
        assert equal_tensors(weights_of(back), padded(weights, config, wide))
        metadata = Checkpoint.open(back).metadata
        assert TransformerConfig.from_dict(metadata.model) == wide  # dropouts, epsilon and GELU too
        assert metadata.step == 0 and metadata.optimizer == {}


@pytest.mark.parametrize("name", FAMILIES)
def test_theirs_to_ours_and_back_is_bit_exact(tmp_path, name: str) -> None:
    save_theirs(tmp_path / "theirs", name)
    ours = import_hugging_face(tmp_path / "theirs", tmp_path / "ours", tp_size=2)
    back = export_hugging_face(ours, tmp_path / "back")
    assert equal_tensors(their_weights(back), their_weights(tmp_path / "theirs"))
    before, after = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "theirs", back))
    ids = ("pad_token_id", "bos_token_id", "eos_token_id")
    assert {k: v for k, v in before.items() if k not in ids} == {k: v for k, v in after.items() if k not in ids}


@pytest.mark.parametrize("name, dtype", [(GPT, torch.bfloat16), (BERT, torch.float16)])
def test_half_types_are_our_weights_rounded_and_come_back_exactly(tmp_path, name: str, dtype: torch.dtype) -> None:
    source, _ = save_random(tmp_path / "source", family_config(name))
    full = their_weights(export_hugging_face(source, tmp_path / "full"))
    half = export_hugging_face(source, tmp_path / "half", dtype)
    assert equal_tensors(their_weights(half), {key: value.to(dtype) for key, value in full.items()})
    assert AUTO[name].from_pretrained(half).dtype == dtype
    ours = weights_of(import_hugging_face(half, tmp_path / "ours"))
    assert {value.dtype for value in ours.values()} == {torch.float32}
    again = export_hugging_face(tmp_path / "ours", tmp_path / "again", dtype)
    assert equal_tensors(their_weights(again), their_weights(half))


def test_large_models_are_written_and_read_as_several_files(tmp_path) -> None:
    source, tensors = save_random(tmp_path / "source", family_config(GPT))
    target = export_hugging_face(source, tmp_path / "target", max_file_bytes=20_000)
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(sum(t.nbytes for t in load_file(target / file).values()) <= 20_000 for file in files)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    whole = {key: tensor for file in files for key, tensor in load_file(target / file).items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert not any(AUTO[GPT].from_pretrained(target, output_loading_info=True)[1].values())
    back = weights_of(import_hugging_face(target, tmp_path / "back", vocab_multiple=8))
    assert all(torch.equal(back[key], tensors[key]) for key in back)
    (target / files[1]).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {files[1]}, which its index names"):
        import_hugging_face(target, tmp_path / "again")


def _old_gpt(tensors: dict[str, Tensor]) -> None:
    """As the published gpt2 of 2019: no prefix, the causal mask as a buffer of each layer."""
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)
    for layer in range(3):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(13, 13).tril()[None, None].byte()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()


def _old_bert(tensors: dict[str, Tensor]) -> None:
    """As the published bert-base-uncased: LayerNorm's old names, positions as a buffer, the tied decoder."""
    for name in list(tensors):
        new = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        tensors[new] = tensors.pop(name)
    tensors["bert.embeddings.position_ids"] = torch.arange(13)[None]
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()


@pytest.mark.parametrize("name, change", [(GPT, _old_gpt), (BERT, _old_bert)])
def test_names_and_buffers_of_older_files_are_understood(tmp_path, name, change) -> None:
    save_theirs(tmp_path / "theirs", name)
    expected = weights_of(import_hugging_face(tmp_path / "theirs", tmp_path / "new"))
    edit_tensors(tmp_path / "theirs", change)
    assert equal_tensors(weights_of(import_hugging_face(tmp_path / "theirs", tmp_path / "old")), expected)


@pytest.mark.parametrize("name, pairs", [(GPT, 1), (BERT, 2), (MEGATRON_BERT, 2)])
def test_of_tied_tensors_either_name_is_the_tensor(tmp_path, name: str, pairs: int) -> None:
    save_theirs(tmp_path / "theirs", name)
    expected = weights_of(import_hugging_face(tmp_path / "theirs", tmp_path / "expected"))
    with HuggingFaceReader(tmp_path / "theirs") as reader:
        aliases = reader.model.aliases
    assert len(aliases) == pairs
    edit_tensors(tmp_path / "theirs", lambda t: t.update({alias: t.pop(kept) for alias, kept in aliases.items()}))
    assert equal_tensors(weights_of(import_hugging_face(tmp_path / "theirs", tmp_path / "ours")), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tensors_tell_the_model_type_of_a_configuration_of_2019(tmp_path, name: str) -> None:
    save_theirs(tmp_path / "theirs", name)
    expected = import_hugging_face(tmp_path / "theirs", tmp_path / "expected")
    edit_config(tmp_path / "theirs", model_type=None)
    path = import_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    assert Checkpoint.open(path).metadata.model == Checkpoint.open(expected).metadata.model


def test_heads_that_are_missing_begin_anew_only_when_that_is_asked_for(tmp_path) -> None:
    model = save_theirs(tmp_path / "whole", BERT)
    model.bert.save_pretrained(tmp_path / "plain")
    with pytest.raises(
        CheckpointError, match="lacks the heads cls.predictions.bias, .*; .* initialize_missing_heads=true"
    ):
        import_hugging_face(tmp_path / "plain", tmp_path / "ours")
    whole = weights_of(import_hugging_face(tmp_path / "whole", tmp_path / "trained"))
    path = import_hugging_face(tmp_path / "plain", tmp_path / "ours", 2, initialize_missing_heads=True, seed=3)
    plain = weights_of(path)
    metadata = Checkpoint.open(path).metadata
    anew = {f"model/{name}" for name in metadata.run["initialized"]}
    config = TransformerConfig.from_dict(metadata.model)
    assert {name.split("/")[1].split(".")[0] for name in anew} == {"lm_head", "order_head"}
    assert equal_tensors(
        {k: v for k, v in plain.items() if k not in anew}, {k: v for k, v in whole.items() if k not in anew}
    )
    new = dict(build_model(config, ParallelContext(), seed=3).named_parameters())
    assert all(torch.equal(plain[key], new[key.removeprefix("model/")]) for key in anew)


@pytest.mark.parametrize("is_legacy", [False, True])  # legacy: before torch 1.6, when files could not be mapped
def test_bin_files_are_read_without_unpickling_code(tmp_path, is_legacy: bool) -> None:
    save_theirs(tmp_path / "theirs", GPT)
    expected = weights_of(import_hugging_face(tmp_path / "theirs", tmp_path / "expected"))
    file = tmp_path / "theirs" / "model.safetensors"
    torch.save(load_file(file), file.with_name("pytorch_model.bin"), _use_new_zipfile_serialization=not is_legacy)
    file.unlink()
    assert equal_tensors(weights_of(import_hugging_face(tmp_path / "theirs", tmp_path / "ours", 2)), expected)


def test_several_bin_files_with_an_index_are_read_too(tmp_path) -> None:
    save_theirs(tmp_path / "theirs", BERT)
    expected = weights_of(import_hugging_face(tmp_path / "theirs", tmp_path / "expected"))
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "theirs" / "model.safetensors").unlink()
    places = {name: f"pytorch_model-{1 + index % 2}-of-2.bin" for index, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        torch.save({name: tensors[name] for name in tensors if places[name] == file}, tmp_path / "theirs" / file)
    index = tmp_path / "theirs" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert equal_tensors(weights_of(import_hugging_face(tmp_path / "theirs", tmp_path / "ours")), expected)
    index.write_text(json.dumps({"weight_map": places | {"promised": "pytorch_model-1-of-2.bin"}}))
    with pytest.raises(CheckpointError, match="pytorch_model-1-of-2.bin has no tensor promised, but the index says so"):
        import_hugging_face(tmp_path / "theirs", tmp_path / "again")


@pytest.mark.parametrize("name", [BERT, MEGATRON_BERT])
def test_the_padding_of_a_bert_has_the_id_of_its_tokenizer(name: str) -> None:
    config = family_config(name)
    assert model_of(config).token_ids({"[UNK]": 0, "[PAD]": 3}, config) == {"pad_token_id": 3}
    assert model_of(config).token_ids(None, config) == {"pad_token_id": 0}


def test_fp64_stays_fp64_on_the_way_in(tmp_path) -> None:
    save_theirs(tmp_path / "theirs", MEGATRON_BERT)
    edit_tensors(tmp_path / "theirs", lambda t: t.update({name: tensor.double() / 3 for name, tensor in t.items()}))
    theirs = their_weights(tmp_path / "theirs")["bert.encoder.ln.weight"]
    ours = weights_of(import_hugging_face(tmp_path / "theirs", tmp_path / "ours"))
    assert {tensor.dtype for tensor in ours.values()} == {torch.float64}
    assert torch.equal(ours["model/transformer.final_norm.weight"], theirs)


def test_tokenizer_files_travel_with_the_model_and_give_config_json_its_ids(tmp_path) -> None:
    texts = ["the cat sat on the mat and the dog ran after the cat"] * 20
    for name, architecture, size in ((GPT, "gpt", 300), (BERT, "bert", 60)):
        tokenizer = train_tokenizer(texts, architecture, size, "tokenizer.vocab_size")
        tokenizer.save(str(tmp_path / f"{name}.json"))
        source, _ = save_random(tmp_path / f"{name}_source", family_config(name, vocab_size=size))
        target = export_hugging_face(source, tmp_path / name, tokenizer=tmp_path / f"{name}.json")
        loaded = transformers.AutoTokenizer.from_pretrained(target)
        assert loaded("the cat")["input_ids"] == tokenizer.encode("the cat").ids
        published = transformers.AutoConfig.from_pretrained(target)
        if name == GPT:
            assert loaded.eos_token_id == published.eos_token_id == tokenizer.token_to_id("<|endoftext|>")
        else:
            assert loaded.pad_token_id == published.pad_token_id == tokenizer.token_to_id("[PAD]")
        ours = import_hugging_face(target, tmp_path / f"{name}_ours")
        assert (ours.parent / "tokenizer" / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
        moved = reshard(ours, tmp_path / f"{name}_moved", 2)
        again = export_hugging_face(moved, tmp_path / f"{name}_again")  # those beside the checkpoint
        assert (again / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
        small, _ = save_random(tmp_path / f"{name}_small", family_config(name, vocab_size=20))
        with pytest.raises(CheckpointError, match="`tokenizer_path` must have ids below 20"):
            export_hugging_face(small, tmp_path / "refused", tokenizer=tmp_path / f"{name}.json")


TEXTS = ("the cat sat", "the cat", "The dog's hat, and the mat")
WITHOUT_WEIGHTS = ("cls.seq_relationship", "bert.pooler", "cls.predictions")  # of BERT's heads, by the class that loads


def exported_with_tokenizer(folder: Path, name: str, **changes) -> tuple[Path, Path, Tokenizer]:
    """Our random model with a tokenizer trained for it, what is published of it, and the tokenizer."""
    family, size = FAMILIES[name]["family"], 300 if name == GPT else 60
    inner = train_tokenizer(["the cat sat on the mat and the dog's hat, ran after"] * 20, family, size, "size")
    config = family_config(name, vocab_size=size, max_position_embeddings=24, **changes)
    source, _ = save_random(folder / "source", config)
    write_tokenizer(inner, source.parent / "tokenizer" / "tokenizer.json")
    return source, export_hugging_face(source, folder / "published"), Tokenizer(inner)


def finetuning_batch(tokenizer: Tokenizer, firsts: tuple, seconds: tuple, max_length: int) -> dict:
    """The batch that our finetuning builds of texts or pairs."""
    cls, sep = tokenizer.id_of("[CLS]"), tokenizer.id_of("[SEP]")
    encoded = [tokenizer.encode_batch(list(texts)) for texts in (firsts, [text or "" for text in seconds])]
    joined = [
        join_pair(first, None if text is None else second, cls, sep, max_length)
        for first, second, text in zip(*encoded, seconds, strict=True)
    ]
    labels, ids = np.zeros(len(joined), dtype=np.int64), [str(number) for number in range(len(joined))]
    return collate(Features(**pack(joined), labels=labels, ids=ids), np.arange(len(joined)))


@pytest.mark.parametrize("name", [BERT, MEGATRON_BERT])
def test_a_receiver_feeds_a_bert_what_our_finetuning_does(tmp_path, name: str) -> None:
    source, published, tokenizer = exported_with_tokenizer(tmp_path, name)
    theirs = transformers.AutoTokenizer.from_pretrained(published)
    assert type(theirs).__name__ == "BertTokenizer" and theirs.model_max_length == 24
    assert theirs.num_special_tokens_to_add(pair=True) == 3
    others = ("the dog", "the cat sat on the mat", "ran")
    model, encoder = load_ours(source), transformers.AutoModel.from_pretrained(published).eval()
    for seconds, cut in (((None,) * 3, "longest_first"), (others, "only_second")):
        for length in (24, 13):
            ours = finetuning_batch(tokenizer, TEXTS, seconds, length)
            pairs = (list(TEXTS),) if seconds[0] is None else (list(TEXTS), list(seconds))
            batch = theirs(*pairs, padding=True, truncation=cut, max_length=length, return_tensors="pt")
            assert torch.equal(batch["input_ids"], ours["tokens"])
            assert torch.equal(batch["token_type_ids"], ours["token_types"])
            assert torch.equal(batch["attention_mask"].bool(), ours["attention_mask"])
            with torch.inference_mode():
                hidden = model.transformer(ours["tokens"], ours["token_types"], ours["attention_mask"])
                found = encoder(**batch).last_hidden_state
            assert (hidden - found)[ours["attention_mask"]].abs().max() < 1e-4
    features = transformers.pipeline("feature-extraction", model=str(published))("the cat", return_tensors=True)
    single = finetuning_batch(tokenizer, ("the cat",), (None,), 24)
    with torch.inference_mode():
        assert (features - model.transformer(single["tokens"], single["token_types"])).abs().max() < 1e-4


@pytest.mark.parametrize("name", [BERT, MEGATRON_BERT])
def test_a_receiver_fills_a_mask_as_our_model_does(tmp_path, name: str) -> None:
    source, published, tokenizer = exported_with_tokenizer(tmp_path, name)
    (the,), (cat,) = tokenizer.encode_batch(["the", "cat"])
    ids = [tokenizer.id_of(token) for token in ("[CLS]", "[MASK]", "[SEP]")]
    with torch.inference_mode():
        logits, _ = load_ours(source)(torch.tensor([[ids[0], the, ids[1], cat, ids[2]]]))
    expected = logits[0, 2, :60].softmax(-1)
    found = transformers.pipeline("fill-mask", model=str(published))("the [MASK] cat", top_k=60)
    assert max(abs(row["score"] - float(expected[row["token"]])) for row in found) < 1e-5
    for kind in ("AutoModelForMaskedLM", "AutoModel", "AutoModelForSequenceClassification"):
        _, report = getattr(transformers, kind).from_pretrained(published, output_loading_info=True)
        assert all(key.startswith(WITHOUT_WEIGHTS) for key in report["unexpected_keys"])
        new = {"classifier.weight", "classifier.bias"} if kind.endswith("Classification") else set()
        assert set(report["missing_keys"]) == new and not report["mismatched_keys"]


def test_a_receiver_continues_a_text_as_our_gpt_does(tmp_path) -> None:
    source, published, tokenizer = exported_with_tokenizer(tmp_path, GPT)
    theirs = transformers.AutoTokenizer.from_pretrained(published)
    assert type(theirs).__name__ == "GPT2Tokenizer" and theirs.model_max_length == 24
    assert theirs(list(TEXTS))["input_ids"] == tokenizer.encode_batch(list(TEXTS))
    assert list(theirs("a", "b")) == ["input_ids", "attention_mask"]
    ids, model = tokenizer.encode_batch(["the cat"])[0], load_ours(source)
    with torch.inference_mode():
        while len(ids) < 24 and ids[-1] != tokenizer.id_of("<|endoftext|>"):
            ids.append(int(model(torch.tensor([ids]))[0, -1, :300].argmax()))
    pipeline = transformers.pipeline("text-generation", model=str(published))
    (found,) = pipeline("the cat", do_sample=False, return_tensors=True)
    assert found["generated_token_ids"] == ids
    assert pipeline("the cat", do_sample=False)[0]["generated_text"] == theirs.decode(ids, skip_special_tokens=True)
    wide, _ = save_random(tmp_path / "wide", family_config(GPT, max_position_embeddings=257))
    assert not (export_hugging_face(wide, tmp_path / "wide_published") / "generation_config.json").exists()


@pytest.mark.parametrize("name", FAMILIES)
def test_config_json_has_the_values_of_the_run(tmp_path, name: str) -> None:
    changes = {"initializer_std": 0.017, "layer_norm_eps": 1e-7, "hidden_dropout": 0.11, "attention_dropout": 0.07}
    changes |= {"ffn_hidden_size": 36} | ({"embedding_dropout": 0.05} if name == GPT else {})
    _, published, tokenizer = exported_with_tokenizer(tmp_path, name, **changes)
    found = transformers.AutoConfig.from_pretrained(published).to_dict()
    gpt = {
        "n_positions": 24, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_inner": 36, "vocab_size": 300,
        "resid_pdrop": 0.11, "attn_pdrop": 0.07, "embd_pdrop": 0.05, "layer_norm_epsilon": 1e-7,
        "activation_function": "gelu_new", "bos_token_id": 0, "eos_token_id": 0, "scale_attn_weights": True,
    }  # fmt: skip
    bert = {
        "max_position_embeddings": 24, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 36, "vocab_size": 60, "hidden_dropout_prob": 0.11, "attention_probs_dropout_prob": 0.07,
        "layer_norm_eps": 1e-7, "hidden_act": "gelu", "type_vocab_size": 2, "pad_token_id": 0, "is_decoder": False,
    }  # fmt: skip
    expected = {"initializer_range": 0.017, "tie_word_embeddings": True, "dtype": "float32", "architectures": [name]}
    expected |= gpt if name == GPT else bert
    assert {key: found[key] for key in expected} == expected
    theirs = transformers.AutoTokenizer.from_pretrained(published)
    for role in ("bos", "eos", "pad"):
        assert found.get(f"{role}_token_id") == getattr(theirs, f"{role}_token_id")


@pytest.mark.parametrize("name", [BERT, *(pytest.param(name, marks=pytest.mark.slow) for name in (GPT, MEGATRON_BERT))])
def test_the_example_of_the_model_card_runs_as_written(tmp_path, name: str) -> None:
    _, published, tokenizer = exported_with_tokenizer(tmp_path, name)
    example = (published / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    command = [sys.executable, "-I", "-c", example + "print(list(outputs[0].shape))"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    length, size = len(tokenizer.encode_batch(["The"])[0]), 300 if name == GPT else 60
    assert run.stdout == f"{[1, length + (0 if name == GPT else 2), size]}\n"
    assert "MISSING" not in run.stderr and "UNEXPECTED" not in run.stderr


@pytest.mark.parametrize("name, dtype", zip(FAMILIES, (torch.bfloat16, torch.float16, torch.float32), strict=True))
def test_a_receiver_gets_the_published_type_and_tied_weights(tmp_path, name: str, dtype: torch.dtype) -> None:
    source, _ = save_random(tmp_path / "source", family_config(name))
    published = export_hugging_face(source, tmp_path / "published", dtype)
    language_model = transformers.AutoModelForCausalLM if name == GPT else transformers.AutoModelForMaskedLM
    for kind in {transformers.AutoModel, AUTO[name], language_model}:
        assert kind.from_pretrained(published).dtype == dtype
    loaded = language_model.from_pretrained(published)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight and not loaded.training
