"""The comparison before a converted model gets its name: it sees each mistake, and then nothing is left."""

import dataclasses

import pytest
import torch
from checkpoints import BERT, GPT, MEGATRON_BERT, family_config, save_random, their_weights

from lmscale.checkpoint import CheckpointError, hf_config, hf_conversion
from lmscale.checkpoint.hf_conversion import export_hugging_face, import_hugging_face

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
        assert sorted(tmp_path.iterdir()) == [tmp_path / "published", tmp_path / "source"]


def test_a_weight_beyond_fp16_is_refused(tmp_path, monkeypatch) -> None:
    original = hf_conversion._read_theirs

    def larger(*arguments):
        return ((name, tensor * 1e6 if "mlp" in name else tensor) for name, tensor in original(*arguments))

    monkeypatch.setattr(hf_conversion, "_read_theirs", larger)
    source, _ = save_random(tmp_path / "source", family_config(GPT))
    with pytest.raises(CheckpointError, match="layer 0 differs by (nan|inf)"):
        export_hugging_face(source, tmp_path / "target", torch.float16)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "source"]
