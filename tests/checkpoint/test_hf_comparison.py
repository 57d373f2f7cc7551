"""The comparison before a converted model gets its name: it sees each mistake, and then nothing is left."""

import dataclasses

import pytest
import torch
from checkpoints import BERT, GPT, MEGATRON_BERT, family_config, save_random, their_weights

from lmscale.checkpoint import CheckpointError, hf_config, hf_conversion
from lmscale.checkpoint.hf_conversion import export_hugging_face, import_hugging_face
from lmscale.models import hugging_face as hf_names

# Mistakes of other converters (transformers issues 12004, 14082 and 32486: the order of QKV, LayerNorms).


def _with_layouts(changes: dict):
    return lambda row: dataclasses.replace(row, layout=changes.get(row.layout, row.layout))


def _without_transposition(row: hf_names.Row) -> hf_names.Row:
    return dataclasses.replace(row, layout=hf_names.SAME) if "attn.c_proj.weight" in row.theirs else row


def _with_swapped_norms(row: hf_names.Row) -> hf_names.Row:
    names = {"ln": "attention_norm", "attention.ln": "mlp_norm"}
    prefix, owner = "bert.encoder.layer.2.", row.theirs.removeprefix("bert.encoder.layer.2.").rsplit(".", 1)[0]
    if not row.theirs.startswith(prefix) or owner not in names:
        return row
    return dataclasses.replace(row, ours=f"transformer.layers.2.{names[owner]}.{row.ours.rsplit('.', 1)[1]}")


MUTANTS = {
    "query and key": (BERT, _with_layouts({hf_names.QUERY: hf_names.KEY, hf_names.KEY: hf_names.QUERY})),
    # Rows [head, (q, k, v), d] taken for [(q, k, v), head, d].
    "the order of QKV": (
        GPT,
        _with_layouts({hf_names.QKV_TRANSPOSED: hf_names.TRANSPOSED, hf_names.QKV_BIAS: hf_names.SAME}),
    ),
    "the order of the bias of QKV": (GPT, _with_layouts({hf_names.QKV_BIAS: hf_names.SAME})),
    "a square weight that is not transposed": (GPT, _without_transposition),
    "the two norms of one layer": (MEGATRON_BERT, _with_swapped_norms),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_mapping_is_refused_by_the_comparison_and_leaves_no_files(tmp_path, monkeypatch, mutant: str) -> None:
    name, change = MUTANTS[mutant]
    source, _ = save_random(tmp_path / "source", family_config(name))
    rows = hf_names.HuggingFaceModel.rows
    monkeypatch.setattr(
        hf_names.HuggingFaceModel, "rows", lambda self, config: [change(row) for row in rows(self, config)]
    )
    with pytest.raises(CheckpointError, match=r"does not compute the same: layer \d differs by \d.\de.\d\d of its"):
        export_hugging_face(source, tmp_path / "target")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "source"]


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
    original = hf_conversion._read_theirs
    for spoilt in sorted(names):

        def change(*arguments, spoilt=spoilt):
            for name, tensor in original(*arguments):
                if name == spoilt:
                    tensor = tensor.clone()
                    tensor[-1] += 0.1
                yield name, tensor

        monkeypatch.setattr(hf_conversion, "_read_theirs", change)
        if spoilt.endswith("key.bias"):  # softmax ignores what all scores of a query share
            continue
        with pytest.raises(CheckpointError, match="does not compute the same"):
            export_hugging_face(source, tmp_path / "target")


def test_a_weight_beyond_fp16_is_refused(tmp_path, monkeypatch) -> None:
    original = hf_conversion._read_theirs

    def larger(*arguments):
        return ((name, tensor * 1e6 if "mlp" in name else tensor) for name, tensor in original(*arguments))

    monkeypatch.setattr(hf_conversion, "_read_theirs", larger)
    source, _ = save_random(tmp_path / "source", family_config(GPT))
    with pytest.raises(CheckpointError, match="layer 0 differs by (nan|inf)"):
        export_hugging_face(source, tmp_path / "target", torch.float16)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "source"]
