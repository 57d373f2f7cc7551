"""`python src/convert.py` as a user runs it: every conversion, and one-line errors."""

import subprocess
from pathlib import Path

import pytest
import torch
import warm
from entry_points import REPOSITORY, environment, refuse
from transformers import BertConfig, BertForMaskedLM, BertModel, GPT2Config, GPT2LMHeadModel

from lmscale.checkpoint import Checkpoint
from lmscale.config.convert import ConvertConfig

SIZES = {"vocab_size": 99, "n_positions": 13, "n_embd": 24, "n_layer": 2, "n_head": 4}


def convert(*overrides: str, cwd: Path, **limits: int) -> subprocess.CompletedProcess:
    return warm.run([str(REPOSITORY / "src" / "convert.py"), *overrides], cwd, environment(), timeout=300, **limits)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A small GPT-2 saved by transformers."""
    folder = tmp_path_factory.mktemp("published") / "gpt2"
    GPT2LMHeadModel(GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    return folder


def test_import_reshard_and_export_take_one_command_each(published, tmp_path) -> None:
    # A run folder with the config.json that a run writes.
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"name": "run"}')
    num_bytes = 4 * GPT2LMHeadModel.from_pretrained(published).num_parameters()
    commands = [
        (f"source={published}", "target=run/checkpoints", "tp_size=2"),
        ("source=run", "target=resharded", "tp_size=4", "vocab_multiple=8"),
        ("source=resharded", "target=back", "format=hugging_face", f"max_file_gb={0.97e-9 * num_bytes}"),
        ("source=back", "target=imported_again", "vocab_multiple=8", "tp_size=4"),
    ]
    wrote = ["run/checkpoints/step_0.ckpt", "resharded/step_0.ckpt", "back", "imported_again/step_0.ckpt"]
    for overrides, name, compared in zip(commands, wrote, ([True], [], [True], [True]), strict=True):
        done = convert(*overrides, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert lines.pop().split(": ")[0] == ("load" if name == "back" else "use")  # the next command
        assert lines.pop() == f"wrote {name}"
        assert [line.startswith("compared with transformers: at most ") for line in lines] == compared
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"back", "run", "imported_again", "resharded"}
    assert len(list((tmp_path / "back").glob("*.safetensors"))) == 2

    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 1
    assert 'GPT2LMHeadModel.from_pretrained("back")' in (tmp_path / "back" / "README.md").read_text()
    theirs = GPT2LMHeadModel.from_pretrained(published).state_dict()
    ours = GPT2LMHeadModel.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    first, again = (Checkpoint.open(tmp_path / name / "step_0.ckpt") for name in ("resharded", "imported_again"))
    assert first.metadata.model == again.metadata.model and first.metadata.layout["tp_size"] == 4
    with first.reader() as one, again.reader() as other:
        assert all(torch.equal(one.read(key), other.read(key)) for key in first.metadata.tensors)


def test_a_bert_without_heads_needs_the_key_that_initializes_them(tmp_path) -> None:
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 30}
    BertModel(BertConfig(vocab_size=50, **sizes)).save_pretrained(tmp_path / "plain")
    done = convert("source=plain", "target=ours", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: plain lacks the heads cls.predictions.bias, ")
    assert done.stderr.endswith("initialize_missing_heads=true begins them anew, untrained\n")
    done = convert("source=plain", "target=ours", "initialize_missing_heads=true", cwd=tmp_path)
    assert done.returncode == 0 and "new_pooler" not in done.stdout
    assert "order_head.weight" in Checkpoint.open(tmp_path / "ours" / "step_0.ckpt").metadata.run["initialized"]
    assert not convert(
        "source=plain", "target=other", "initialize_missing_heads=true", "seed=7", cwd=tmp_path
    ).returncode
    BertForMaskedLM(BertConfig(vocab_size=50, **sizes)).save_pretrained(tmp_path / "masked")
    done = convert("source=masked", "target=third", "initialize_missing_heads=true", cwd=tmp_path)
    assert " new_pooler=true " in done.stdout.rpartition("use: ")[2]
    both = (Checkpoint.open(tmp_path / name / "step_0.ckpt") for name in ("ours", "other"))
    drawn = (each.reader().read("model/order_head.weight") for each in both)
    assert not torch.equal(*drawn)


def test_a_failed_write_gives_one_line_and_leaves_no_files(published, tmp_path) -> None:
    done = convert(f"source={published}", "target=target", cwd=tmp_path, file_limit=20_000)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(
        "error: the conversion was not finished and nothing was kept: [Errno 27] File too large"
    )
    assert list(tmp_path.iterdir()) == []


WRONG_VALUES = {
    "an unknown key": ({"tpsize": 2}, "`tpsize` is not a known key"),
    "a type that ours never has": ({"dtype": "bf16"}, "`dtype` must be left alone with format=lmscale"),
    "a key of ours": ({"format": "hugging_face", "tp_size": 2}, "`tp_size` must be left alone"),
}


@pytest.mark.parametrize("mistake", WRONG_VALUES)
def test_an_invalid_value_is_refused_before_torch_is_imported(mistake: str) -> None:
    values, message = WRONG_VALUES[mistake]
    with pytest.raises(ValueError) as caught:
        ConvertConfig.from_dict({"source": "x", "target": "y", "run_dir": "", "overrides": []} | values)
    assert str(caught.value).startswith(message)


MISTAKES = {
    "a missing target": (["source=x"], "`target` must be given"),
    "no source": (["source=nowhere", "target=target"], "`source` must be a checkpoint, a run folder or"),
    "neither": ([f"source={REPOSITORY}", "target=target"], "`source` must be a checkpoint, a run folder or"),
    "a broken configuration": (
        ["source=${published}/broken", "target=target"],
        "broken is not a checkpoint: it has no metadata.json, and its config.json is not one of Hugging Face",
    ),
    "theirs to theirs": (
        ["source=${published}", "target=target", "format=hugging_face"],
        "`source` must be a checkpoint of ours with format=hugging_face, but is",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_is_one_line_and_nothing_is_written(published, tmp_path, mistake: str) -> None:
    overrides, message = MISTAKES[mistake]
    words = (override.replace("${published}", str(published)) for override in overrides)
    done = refuse(REPOSITORY / "src" / "convert.py", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: `") and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == "" and list(tmp_path.iterdir()) == []
