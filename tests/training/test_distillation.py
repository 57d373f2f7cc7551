"""Runs with a teacher equal one process at every layout (fp64, 1e-12), and a plain loop over transformers' models."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from runs import (
    DROPOUT,
    ONE,
    SEQUENCE,
    assert_equal_runs,
    read_rows,
    read_tensors,
    run_jobs,
    run_layouts,
    tiny_run,
    train_here,
)
from sharding import COMPLETEP, random_batch, random_model, small_config

from lmscale import partition
from lmscale.config.family import load
from lmscale.config.teacher import TeacherConfig
from lmscale.data.loading import References, collate_step, trim_padding
from lmscale.data.sampler import samples_of
from lmscale.hugging_face.conversion import export_hugging_face
from lmscale.parallel import ParallelContext
from lmscale.training.module import PretrainModule
from lmscale.training.resolve import resolve

GRID = (2, 1, 2)
# Deeper, wider, with other heads, of the other placement, with other padding of the vocabulary, and trained with the
# dropout that a teacher must not have.
TEACHER = {"model__num_layers": 3, "model__hidden_size": 40, "model__num_attention_heads": 8}
TEACHER |= {"model__max_position_embeddings": 40, "model__vocab_multiple": 8, "trainer__max_steps": 2}
TEACHER |= DROPOUT
PLACEMENT = {"gpt": "post", "bert": "pre"}
STUDENT = {"bert": {"model__norm_order": "post"}, "gpt": {}}
LONG = {"trainer__max_steps": 20, "schedule__decay_steps": 30}
CASES = {  # family, changes, layouts besides one process
    "gpt": ("gpt", LONG | {"teacher__temperature": 2.0}, ((2, 1, 1), (4, 1, 1), (1, 1, 2), GRID)),
    "bert": ("bert", LONG | {"teacher__temperature": 2.0}, ((2, 1, 1), (4, 1, 1), (1, 1, 2), GRID)),
    "gpt-zero1": ("gpt", {"parallel__zero1": True, "micro_batch_size": 1, "teacher__weight": 1.0}, (GRID,)),
    "bert-zero1": ("bert", {"parallel__zero1": True, "micro_batch_size": 2, "teacher__weight": 0.0}, ((1, 1, 2),)),
    "gpt-sequence": ("gpt", SEQUENCE | DROPOUT | {"micro_batch_size": 2, "teacher__weight": 0.9}, (GRID,)),
    "bert-sequence": ("bert", SEQUENCE | DROPOUT | {"teacher__temperature": 1.5}, (GRID,)),
    "bert-means": ("bert", {"loss_reduction": "mean_of_means", "micro_batch_size": 2}, ((1, 1, 2),)),
    "gpt-padded-heads": ("gpt", {"parallel__pad_heads": True, "model__num_attention_heads": 3}, ((2, 1, 1),)),
}


def taught(teachers: Path, family: str, **changes) -> dict:
    """The changes of a run with the family's teacher."""
    teacher = {"path": str(teachers / family)}
    teacher |= {key.removeprefix("teacher__"): value for key, value in changes.items() if key.startswith("teacher__")}
    rest = {key: value for key, value in changes.items() if not key.startswith("teacher__")}
    return STUDENT[family] | rest | {"teacher": teacher}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> Path:
    """One of each family, written by two tensor ranks."""
    folder = tmp_path_factory.mktemp("teachers")
    runs = [
        tiny_run(family, folder / family, **TEACHER, model__norm_order=order, parallel__tp_size=2)
        for family, order in PLACEMENT.items()
    ]
    run_jobs(runs, 2)
    return folder


@pytest.fixture(scope="module")
def folder(teachers, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("students")
    cases = CASES.items()
    run_layouts((family, folder / name, taught(teachers, family, **c), layouts) for name, (family, c, layouts) in cases)
    return folder


@pytest.mark.parametrize(("case", "layout"), [(name, layout) for name, case in CASES.items() for layout in case[2]])
def test_a_run_does_not_depend_on_the_layout(folder, case, layout) -> None:
    """Nor on the teacher's, which two tensor ranks have written: it is read at every layout, of both families."""
    assert_equal_runs(folder / case / ONE, folder / case / "{}x{}x{}".format(*layout))


def test_several_chunks_do_not_change_a_run(teachers, folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(partition, "LOGITS_AT_ONCE", 10 * 640)
    for family in STUDENT:
        run = tiny_run(family, tmp_path / family, **taught(teachers, family, **CASES[family][1]))
        run_jobs([run], 1)
        assert_equal_runs(folder / family / ONE, tmp_path / family)


def plain_steps(run, teacher, student, rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Losses and gradient norms by torch and transformers alone, at the rates of the run's rows."""
    resolved, settings = resolve(run), run.teacher
    samples = samples_of(run, resolved.corpus, resolved.num_validation_samples)
    data, batches = References(samples.train), iter(samples.sampler())
    decayed = [p for p in student.parameters() if p.ndim == 2]
    others = [p for p in student.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
    found = []
    for row in rows:
        batch = collate_step(data.__getitems__(next(batches)), by_length=False)
        inputs = {"input_ids": batch["tokens"]}
        if "token_types" in batch:
            inputs |= {"token_type_ids": batch["token_types"], "attention_mask": batch["attention_mask"].long()}
        with torch.no_grad():
            out = teacher(**inputs)
        theirs, output = getattr(out, "prediction_logits", out.get("logits")), student(**inputs)
        own = getattr(output, "prediction_logits", output.get("logits"))
        scored = batch["labels"] != -100
        lm = F.cross_entropy(own[scored], batch["labels"][scored])
        log_q, log_p = ((x[scored] / settings.temperature).log_softmax(-1) for x in (own, theirs))
        divergence = settings.temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        loss = (1 - settings.weight) * lm + settings.weight * divergence
        if "sop_labels" in batch:
            loss = loss + F.cross_entropy(output.seq_relationship_logits, batch["sop_labels"])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = row["lr"]
        optimizer.step()
        values = {"train/loss": loss, "train/lm_loss": lm, "train/teacher_loss": divergence, "grad_norm": norm}
        found.append({name: value.item() for name, value in values.items()})
    return found


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_a_run_equals_a_plain_loop_over_the_models_of_transformers(family, tmp_path) -> None:
    run_jobs([tiny_run(family, tmp_path / "teacher", **TEACHER)], 1)
    changes = LONG | {"teacher": {"path": str(tmp_path / "teacher"), "temperature": 2.0, "weight": 0.3}}
    run = tiny_run(family, tmp_path / "run", **changes)
    start = tiny_run(family, tmp_path / "start", optimizer__lr=0.0, trainer__max_steps=1)
    run_jobs([run, start], 1)
    kind = transformers.GPT2LMHeadModel if family == "gpt" else transformers.MegatronBertForPreTraining
    models = []
    for name in ("teacher", "start"):
        export_hugging_face(tmp_path / name, tmp_path / f"{name}_hf", torch.float64)
        loaded = kind.from_pretrained(tmp_path / f"{name}_hf", dtype=torch.float64, attn_implementation="eager")
        loaded.get_input_embeddings().padding_idx = None  # a random replacement may be [PAD], whose row is trained here
        models.append(loaded.eval())
    rows = read_rows(tmp_path / "run")
    plain = plain_steps(dataclasses.replace(run, run_dir=str(tmp_path / "other")), *models, rows)
    assert len(plain) == 20
    for row, expected in zip(rows, plain, strict=True):
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-12), (row["step"], name)


@pytest.mark.parametrize("family", STUDENT)
def test_the_projection_of_a_teacher_gives_its_logits(family) -> None:
    """Of the scored positions, with the factors of CompleteP."""
    config = small_config(family, **COMPLETEP)
    model, batch, loss = random_model(config, ParallelContext()), random_batch(config), load(config.traits.loss)
    batch = trim_padding(batch)
    rows, weight, bias = loss.output_projection(model, batch)
    logits = loss.token_logits(model, batch).flatten(0, 1)
    logits = logits[batch["scored"]] if family == "bert" else logits
    ids = slice(config.vocab_size)
    torch.testing.assert_close(F.linear(rows, weight, bias)[:, ids], logits[:, ids], rtol=1e-13, atol=1e-13)


def test_a_teacher_equal_to_the_student_gives_no_divergence_and_no_gradient(tmp_path) -> None:
    start = tiny_run("bert", tmp_path / "start", trainer__max_steps=1)
    run_jobs([start], 1)
    alone = tiny_run("bert", tmp_path / "alone", resume={"path": str(tmp_path / "start"), "weights_only": True})
    path = {"teacher": {"path": str(tmp_path / "start"), "weight": 0.5, "temperature": 2.0}}
    same = tiny_run("bert", tmp_path / "same", **path, resume={"path": str(tmp_path / "start"), "weights_only": True})
    run_jobs([alone, same], 1)
    first, other = read_rows(tmp_path / "same")[0], read_rows(tmp_path / "alone")[0]
    assert abs(first["train/teacher_loss"]) < 1e-12 and first["train/lm_loss"] == pytest.approx(other["train/lm_loss"])
    assert first["grad_norm"] != pytest.approx(other["grad_norm"])  # half of the labels' gradient


def test_layers_of_the_teacher_start_the_student_once(teachers, tmp_path) -> None:
    """At rate 0 the weights after two more steps, from a checkpoint, are still those of the teacher."""
    changes = TEACHER | {"model__num_layers": 2, "model__norm_order": "pre", "optimizer__lr": 0.0}
    changes |= {"trainer__max_steps": 4, "trainer__stop_after_steps": 2}
    run = tiny_run("bert", tmp_path, **changes, teacher={"path": str(teachers / "bert"), "layers": [2, 0]})
    assert run.teacher.source_layers(2, 3) == [2, 0]
    run_jobs([run], 1)
    again = {"trainer__stop_after_steps": None, "resume": {"path": "auto"}}
    run_jobs([tiny_run("bert", tmp_path, **changes | again, teacher=dataclasses.asdict(run.teacher))], 1)
    theirs, ours = read_tensors(teachers / "bert"), read_tensors(tmp_path)
    places = {"layers.0.": "layers.2.", "layers.1.": "layers.0."}
    for key, tensor in ours.items():
        if key.startswith("model/"):
            source = next((key.replace(a, b) for a, b in places.items() if a in key), key)
            assert torch.equal(tensor, theirs[source]), key


def test_a_resumed_run_goes_on_with_its_weights_and_not_with_the_teachers_layers(teachers, tmp_path) -> None:
    changes = TEACHER | {"model__num_layers": 2, "model__norm_order": "post", "trainer__max_steps": 4}
    changes |= {"teacher": {"path": str(teachers / "gpt"), "layers": "spread"}}
    for name, more in (
        ("whole", {}),
        ("stopped", {"trainer__stop_after_steps": 2}),
        ("stopped", {"resume": {"path": "auto"}}),
    ):
        assert train_here(tiny_run("gpt", tmp_path / name, **changes | more)) == 0
    assert_equal_runs(tmp_path / "whole", tmp_path / "stopped")


def test_spread_takes_every_other_layer_of_twelve_for_six() -> None:
    teacher = TeacherConfig(path="x", layers="spread")
    assert teacher.source_layers(6, 12) == [0, 2, 4, 6, 8, 10] and teacher.source_layers(3, 5) == [0, 1, 3]


# Faults of other implementations, planted.


def divergences(run_dir: Path) -> list[float]:
    return [row["train/teacher_loss"] for row in read_rows(run_dir)]


@pytest.mark.parametrize("family", STUDENT)
def test_a_student_learns_from_its_teacher_and_not_from_itself(family, teachers, tmp_path, monkeypatch) -> None:
    changes = LONG | {"teacher__weight": 1.0, "optimizer__lr": 1e-2}
    assert train_here(tiny_run(family, tmp_path / "right", **taught(teachers, family, **changes))) == 0
    right = divergences(tmp_path / "right")
    assert min(right[-3:]) > 0 and right[-1] < 0.5 * right[0]
    build = PretrainModule.build

    def with_itself(module: PretrainModule, *args) -> torch.nn.Module:
        module.teacher.model = build(module, *args)
        return module.teacher.model

    monkeypatch.setattr(PretrainModule, "build", with_itself)
    assert train_here(tiny_run(family, tmp_path / "wrong", **taught(teachers, family, **changes))) == 0
    assert max(map(abs, divergences(tmp_path / "wrong"))) < 1e-12
