"""A teacher that does not fit its run is refused in one line, before a rank starts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from runs import read_rows, run_jobs, tiny_run, train_here
from transformers import BertModel

from lmscale.checkpoint import Checkpoint, list_checkpoints, write_offline
from lmscale.checkpoint.reshard import reshard
from lmscale.hugging_face.conversion import export_hugging_face
from lmscale.training.resolve import resolve


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    for family in ("gpt", "bert"):
        assert train_here(tiny_run(family, folder / family, trainer__max_steps=1)) == 0
    return folder


def refusal(family: str, folder: Path, teacher: dict, **changes) -> str:
    with pytest.raises(ValueError) as error:
        resolve(tiny_run(family, folder / "run", teacher=teacher, **changes))
    message = str(error.value)
    assert "\n" not in message and not (folder / "run").exists()
    return message


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        ({"path": "nowhere"}, {}, "`teacher.path` must be a checkpoint, a run folder or a Hugging Face folder, but"),
        ({"path": "", "weight": 0.5}, {}, "`teacher.path` must be a path, but is ''"),
        ({"path": "bert"}, {}, "`teacher.path` must be of the model's family (gpt), but is 'bert'"),
        (
            {"path": "gpt", "temperature": 0},
            {},
            "`teacher.temperature` must be at least 0.001 and at most 1000, but is 0.0",
        ),
        ({"path": "gpt", "temperature": 1e300}, {}, "`teacher.temperature` must be at least 0.001 and at most 1000"),
        ({"path": "gpt", "temperature": float("nan")}, {}, "`teacher.temperature` must be a finite number"),
        ({"path": "gpt", "weight": 2}, {}, "`teacher.weight` must be at least 0 and at most 1, but is 2.0"),
        ({"weight": 0.3}, {}, "`teacher.weight` must be left alone without `teacher.path` or `teacher.cache`"),
        ({"layers": "spread"}, {}, "`teacher.layers` must be left alone without"),
        (
            {"path": "gpt", "cache": "x"},
            {},
            "`teacher.path` must be null with `teacher.cache`, unless `teacher.layers`",
        ),
        (
            {"path": "gpt", "layers": [0]},
            {},
            "`teacher.layers` must be a list of 2 layers, all below the teacher's 2, but is [0]",
        ),
        (
            {"path": "gpt", "layers": [0, 2]},
            {},
            "`teacher.layers` must be a list of 2 layers, all below the teacher's 2",
        ),
        ({"path": "gpt", "layers": [0, -1]}, {}, "`teacher.layers` must be at least 0, but is -1"),
        ({"path": "gpt", "layers": "even"}, {}, "`teacher.layers` must be"),
        (
            {"path": "gpt", "layers": "spread"},
            {"model__hidden_size": 32},
            "`teacher.layers` must be null where more than the depth differs: ffn_hidden_size is 128 here and 96 there",
        ),
        ({"path": "gpt"}, {"parallel__pp_size": 2}, "`parallel.pp_size` must be 1 with a teacher, but is 2"),
        (
            {"path": "gpt"},
            {
                "parallel__tp_size": 3,
                "model__hidden_size": 27,
                "model__num_attention_heads": 3,
                "model__vocab_multiple": 3,
            },
            "`teacher.model.num_attention_heads` must be a multiple of `tp_size` (3), but is 4",
        ),
        ({"path": "gpt"}, {"tokenizer__vocab_size": 500}, "`teacher.path` must have the tokenizer of the run"),
        (
            {"path": "gpt"},
            {"model__max_position_embeddings": 40, "data__seq_length": 40},
            "`data.seq_length` must be at most the 33 positions of the teacher, but is 40",
        ),
    ],
)
def test_it_is_refused(teacher, tmp_path, settings, changes, words) -> None:
    if settings.get("path") in ("gpt", "bert"):
        settings = settings | {"path": str(teacher / settings["path"])}
    assert words in refusal("gpt", tmp_path, settings, **changes)


def test_a_teacher_without_its_tokenizer_is_refused(teacher, tmp_path) -> None:
    shutil.copytree(list_checkpoints(teacher / "gpt" / "checkpoints")[-1], tmp_path / "step_1.ckpt")
    message = refusal("gpt", tmp_path, {"path": str(tmp_path / "step_1.ckpt")})
    assert "`teacher.path` must have its tokenizer beside it, but there is none in" in message


def test_a_damaged_teacher_ends_the_run_with_one_line(teacher, tmp_path, capfd) -> None:
    shutil.copytree(teacher / "gpt" / "checkpoints", tmp_path / "teacher")
    file = next((tmp_path / "teacher" / "step_1.ckpt").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert train_here(tiny_run("gpt", tmp_path / "run", teacher={"path": str(tmp_path / "teacher")})) == 2
    assert "error: checkpoint step_1.ckpt is damaged: rank_0_of_1.safetensors" in capfd.readouterr().err


def test_a_teacher_that_has_diverged_is_named_before_the_first_step(teacher, tmp_path, capfd) -> None:
    """Its NaN would otherwise be that of the student's gradient, even with weight 0."""
    checkpoint = Checkpoint.open(list_checkpoints(teacher / "gpt" / "checkpoints")[-1])
    with checkpoint.reader() as reader:
        tensors = [(key, reader.read(key).clone()) for key in sorted(checkpoint.metadata.tensors)]
    dict(tensors)["model/transformer.layers.1.mlp.down.weight"][2, 3] = float("nan")
    write_offline(tmp_path / "teacher", checkpoint.metadata, 1, tensors)
    shutil.copytree(teacher / "gpt" / "checkpoints" / "tokenizer", tmp_path / "teacher" / "tokenizer")
    settings = {"path": str(tmp_path / "teacher"), "weight": 0.0}
    assert train_here(tiny_run("gpt", tmp_path / "run", teacher=settings)) == 2
    assert "error: `teacher.path` must have finite weights, but transformer.layers.1.mlp" in capfd.readouterr().err


def test_a_published_teacher_without_its_heads_is_refused(teacher, tmp_path) -> None:
    export_hugging_face(teacher / "bert", tmp_path / "hf")
    BertModel.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "hf")
    message = refusal("bert", tmp_path, {"path": str(tmp_path / "hf")})
    assert "`teacher.path` must be a whole pretrained model, but" in message and "lacks the heads cls.pred" in message


def test_a_run_goes_on_with_the_same_teacher_alone_wherever_and_however_it_is_stored(teacher, tmp_path) -> None:
    first = {"trainer__stop_after_steps": 1, "teacher": {"path": str(teacher / "gpt"), "temperature": 2.0}}
    run_jobs([tiny_run("gpt", tmp_path / "run", **first)], 1)
    assert train_here(tiny_run("gpt", tmp_path / "other", trainer__max_steps=1, seed=5)) == 0
    moved = reshard(teacher / "gpt", tmp_path / "moved", 2)
    export_hugging_face(teacher / "gpt", tmp_path / "published")
    settings = {"path": str(moved), "temperature": 2.0}
    again = {"resume": {"path": "auto"}}
    for other, difference in (
        ({}, "none here and {'origin': '.{16}', 'temperature': 2.0, 'weight': 0.5} there "),
        (settings | {"temperature": 1.0}, "{'temperature': 1.0} here and {'temperature': 2.0} there "),
        (settings | {"weight": 0.4}, "{'weight': 0.4} here and {'weight': 0.5} there "),
        ({"path": str(tmp_path / "published"), "temperature": 2.0}, "{'origin': '.{16}'} here and {'origin': "),
        ({"path": str(tmp_path / "other"), "temperature": 2.0}, "{'origin': '.{16}'} here and {'origin': "),
    ):
        with pytest.raises(ValueError, match=f"step_1.ckpt is of a run with another teacher: {difference}"):
            resolve(tiny_run("gpt", tmp_path / "run", teacher=other, **again))
    assert train_here(tiny_run("gpt", tmp_path / "run", teacher=settings, **again)) == 0
    with pytest.raises(ValueError, match="`resume.weights_only` must be false with teacher.layers"):
        tiny_run(
            "gpt", tmp_path / "x", teacher=settings | {"layers": "spread"}, resume={"path": "x", "weights_only": True}
        )
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["config"]["teacher"]["temperature"] == 2.0
    assert not record["ended_above_start"]  # a loss with a teacher is lower, and is not compared


def test_a_published_teacher_gives_the_losses_of_its_checkpoint(teacher, tmp_path) -> None:
    for family in ("gpt", "bert"):
        export_hugging_face(teacher / family, tmp_path / f"{family}_hf", torch.float64)
        found = []
        for name, path in (("own", teacher / family), ("hf", tmp_path / f"{family}_hf")):
            run = tiny_run(family, tmp_path / f"{family}_{name}", teacher={"path": str(path)}, model__num_layers=1)
            assert train_here(run) == 0
            found.append([row["train/teacher_loss"] for row in read_rows(run.run_dir)])
        assert found[1] == pytest.approx(found[0], rel=1e-12)


def test_the_forward_pass_of_a_teacher_counts_in_the_flops_of_a_step(teacher, tmp_path) -> None:
    """Of a teacher of the student's sizes it is a third of the student's forward and backward pass."""
    run = tiny_run("gpt", tmp_path / "run", trainer__max_steps=1, teacher={"path": str(teacher / "gpt")})
    assert train_here(run) == 0
    rows = read_rows(run.run_dir)[-1], read_rows(teacher / "gpt")[-1]
    both, alone = (row["tflops_per_s_per_device"] / row["tokens_per_s"] for row in rows)
    assert both == pytest.approx(alone * 4 / 3, rel=1e-3)
