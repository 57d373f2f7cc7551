"""Fault injection: how the run reacts, what it reports, and that nothing is lost."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import warm
from entry_points import REPOSITORY, TINY, environment, train
from runs import assert_same_run, read_rows, run_jobs, tiny_run, train_here

from lmscale.checkpoint import Checkpoint, list_checkpoints
from lmscale.checkpoint.tensor_file import TensorFileWriter
from lmscale.runtime.exit_codes import DIVERGED, NOT_SAVED, REPLICAS_DIFFER, USER_ERROR
from lmscale.training import pretrain as pretrain_module
from lmscale.training.callbacks.sample_digest import SampleDigest
from lmscale.training.diagnosis import first_cause
from lmscale.training.module import PretrainModule
from lmscale.training.resolve import resolve

DROPOUT = {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1}
EVERY_STEP = {"checkpoint__save_every_steps": 1, "checkpoint__keep_last": None}


def damage(path: Path, how: str) -> None:
    file = next(path.glob("*.safetensors"))
    whole = bytearray(file.read_bytes())
    if how == "flipped byte":
        whole[len(whole) // 2] ^= 4
        file.write_bytes(whole)
    elif how == "truncated":
        file.write_bytes(whole[:-5])
    elif how == "missing file":
        file.unlink()
    elif how == "another step's":
        subprocess.run(["rm", "-r", str(path)], check=True)
        copy(path.with_name("step_2.ckpt"), path)
    elif how == "damaged metadata":
        text = (path / "metadata.json").read_text()
        (path / "metadata.json").write_text(text.replace('"num_updates": ', '"num_updates": 1', 1))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Five steps without a fault: the reference for the others."""
    folder = tmp_path_factory.mktemp("whole")
    assert train_here(tiny_run("gpt", folder, trainer__max_steps=5, precision__dtype="fp32", **DROPOUT)) == 0
    return folder


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory) -> Path:
    """The same run stopped after three steps, with one checkpoint per step."""
    folder = tmp_path_factory.mktemp("three")
    assert train_here(run_of(folder, trainer__stop_after_steps=3)) == 0
    return folder


def run_of(folder: Path, **changes):
    settings = {"trainer__max_steps": 5, "precision__dtype": "fp32", "resume": "auto"} | DROPOUT | EVERY_STEP
    return tiny_run("gpt", folder, **(settings | changes))


def copy(folder: Path, target: Path) -> Path:
    subprocess.run(["cp", "-r", str(folder), str(target)], check=True)
    return target


@pytest.mark.parametrize("how", ["flipped byte", "missing file", "damaged metadata", "another step's"])
def test_auto_resumes_from_the_previous_valid_checkpoint_and_ends_bitwise_equal(
    whole, three_steps, tmp_path, capfd, how
) -> None:
    folder = copy(three_steps, tmp_path / "run")
    damage(folder / "checkpoints" / "step_3.ckpt", how)
    assert train_here(run_of(folder)) == 0
    stderr = capfd.readouterr().err
    assert "WARNING: " in stderr and "step_3.ckpt" in stderr and "set aside as step_3.ckpt.damaged" in stderr
    assert_same_run(whole, folder)
    assert (folder / "checkpoints" / "step_3.ckpt.damaged").is_dir()
    assert len(list_checkpoints(folder / "checkpoints")) == 5


def test_a_run_resumes_with_a_truncated_metrics_file_and_without_a_record(three_steps, tmp_path, capfd) -> None:
    folder = copy(three_steps, tmp_path / "run")
    (folder / "metrics.csv").write_text("")
    assert train_here(run_of(folder)) == 0
    assert "WARNING: metrics.csv cannot be read; kept as metrics.csv.damaged" in capfd.readouterr().err
    (folder / "record.json").unlink()
    assert train_here(run_of(folder)) == 0
    record = json.loads((folder / "record.json").read_text())
    assert record["metrics"]["steps"]["value"] == 5 and record["metrics"]["val/loss"]["value"] > 0


def test_auto_refuses_to_start_from_scratch_if_all_checkpoints_are_damaged(three_steps, tmp_path, capfd) -> None:
    folder = copy(three_steps, tmp_path / "run")
    for path in list_checkpoints(folder / "checkpoints"):
        damage(path, "flipped byte")
    for _ in range(2):  # a requeued job tries again
        assert train_here(run_of(folder)) == USER_ERROR
        assert "error: none of the 3 checkpoints" in capfd.readouterr().err
        assert len(read_rows(folder)) == 3  # the measured rows are kept
    for path in list_checkpoints(folder / "checkpoints"):
        damage(path, "truncated")
    with pytest.raises(ValueError, match="can be read"):
        resolve(run_of(folder))


def test_a_damaged_checkpoint_given_by_path_is_refused_naming_its_tensor(three_steps, tmp_path, capfd) -> None:
    folder = copy(three_steps, tmp_path / "run")
    path = folder / "checkpoints" / "step_2.ckpt"
    damage(path, "flipped byte")
    assert train_here(run_of(tmp_path / "new", resume=str(path))) == USER_ERROR
    message = capfd.readouterr().err
    assert "error: checkpoint step_2.ckpt is damaged: rank_0_of_1.safetensors: tensor " in message
    assert message.count("\n") == 1 and path.is_dir()


def test_damage_found_by_one_rank_makes_all_ranks_use_the_previous_checkpoint(tmp_path) -> None:
    folder = tmp_path / "run"
    run_jobs([run_of(folder, trainer__stop_after_steps=3, parallel__tp_size=2)], 2)
    path = folder / "checkpoints" / "step_3.ckpt"
    file = path / "rank_1_of_2.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    run_jobs([run_of(folder, parallel__tp_size=2)], 2)
    assert (folder / "checkpoints" / "step_3.ckpt.damaged").is_dir()
    run_jobs([run_of(tmp_path / "whole", parallel__tp_size=2)], 2)
    assert_same_run(tmp_path / "whole", folder)


def fill_disk(monkeypatch, *steps: int) -> None:
    """Let the second moments of these steps find no room."""
    original = TensorFileWriter.write

    def write(self, name, tensor):
        if any(f"step_{step}" in str(self.path) for step in steps) and "exp_avg_sq" in name:
            raise OSError(28, "No space left on device")
        return original(self, name, tensor)

    monkeypatch.setattr(TensorFileWriter, "write", write)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_is_reported_and_training_continues(whole, tmp_path, capfd, monkeypatch, in_background) -> None:
    fill_disk(monkeypatch, 2, 3)
    assert train_here(run_of(tmp_path, checkpoint__async=in_background)) == 0
    stderr = capfd.readouterr().err
    for step, kept in ((2, 1), (3, 1)):
        assert f"error: checkpoint of step {step} not saved: rank 0: [Errno 28] No space left on device" in stderr
        assert f"step_{kept}.ckpt stays; training continues" in stderr
    assert_same_run(whole, tmp_path)
    assert [p.name for p in list_checkpoints(tmp_path / "checkpoints")] == ["step_1.ckpt", "step_4.ckpt", "step_5.ckpt"]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_a_full_disk_at_the_last_step_is_reported_once(tmp_path, capfd, monkeypatch) -> None:
    fill_disk(monkeypatch, 3)
    run = run_of(tmp_path, checkpoint__async=True, trainer__stop_after_steps=3)
    assert train_here(run) == NOT_SAVED
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: checkpoint of step 3 not saved: ")
    assert line.endswith("No space left on device; step_2.ckpt stays; the run ends without it (exit code 74)")


def test_a_full_disk_stops_the_run_if_configured(tmp_path, capfd, monkeypatch) -> None:
    folder = tmp_path / "run"
    assert train_here(run_of(folder, trainer__stop_after_steps=2)) == 0
    with monkeypatch.context() as patch:
        fill_disk(patch, 3, 4, 5)
        assert train_here(run_of(folder, checkpoint__on_error="stop")) == NOT_SAVED
        assert "step_2.ckpt stays; the run stops" in capfd.readouterr().err
        assert train_here(run_of(folder, checkpoint__on_error="continue")) == NOT_SAVED  # the last save failed as well
    assert [p.name for p in list_checkpoints(folder / "checkpoints")] == ["step_1.ckpt", "step_2.ckpt"]
    assert train_here(run_of(folder)) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files through the kernel")
def test_a_failed_write_keeps_the_previous_checkpoint(tmp_path) -> None:
    """A real write error: files are limited to 60 kB, and the shards are larger."""
    assert train(*TINY, f"hydra.run.dir={tmp_path / 'before'}").returncode == 0  # builds the corpus, larger too
    folder = tmp_path / "run"
    command = [str(REPOSITORY / "src" / "train.py"), *TINY, "checkpoint.save_every_steps=2", f"hydra.run.dir={folder}"]
    done = warm.run(command, REPOSITORY, environment(), timeout=300, file_limit=60_000)
    assert done.returncode == NOT_SAVED, done.stderr
    assert "checkpoint of step 2 not saved: rank 0: [Errno 27] File too large" in done.stderr
    assert not list((folder / "checkpoints").glob("*step*")) and len(read_rows(folder)) == 3


def test_a_non_finite_loss_stops_the_run_and_names_the_first_non_finite_parameter(tmp_path, capfd) -> None:
    settings = {"optimizer__lr": 1e38, "schedule__warmup_steps": 0, "trainer__max_skipped_steps": 2}
    code = train_here(run_of(tmp_path, trainer__max_steps=50, **settings))
    assert code == DIVERGED
    rows = read_rows(tmp_path)
    assert rows[-1]["num_skipped"] == 3 and rows[-1]["step"] < 50
    message = capfd.readouterr().err.splitlines()[-1]
    assert (
        "error: no finite gradient in more steps in a row than trainer.max_skipped_steps (2)" in message
        and "; first the " in message
    )
    (report,) = json.loads(next(tmp_path.glob("not_finite_step_*.json")).read_text())
    assert report["weights"] or report["forward"]
    assert list_checkpoints(tmp_path / "checkpoints")


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_the_diagnosis_names_the_parameter_that_is_not_finite(tmp_path, monkeypatch, value: float) -> None:
    name = "transformer.layers.1.mlp.up.bias"
    make = pretrain_module.build_module

    def poisoned(*decided):
        module = make(*decided)
        configure = module.configure_model

        def configure_and_poison():
            configure()
            module.model.get_parameter(name).data[3] = value

        module.configure_model = configure_and_poison
        return module

    monkeypatch.setattr(pretrain_module, "build_module", poisoned)
    assert train_here(run_of(tmp_path, resume="none", trainer__max_skipped_steps=0)) == DIVERGED
    (report,) = json.loads(next(tmp_path.glob("not_finite_step_1.json")).read_text())
    assert report["weights"] == [name] and report["forward"] == "transformer.layers.1.mlp.up"
    assert not list_checkpoints(tmp_path / "checkpoints")


def test_a_diagnosis_that_cannot_be_written_ends_every_rank_after_its_message(tmp_path, capfd) -> None:
    (tmp_path / "not_finite_step_2.json").mkdir()
    settings = {"optimizer__lr": 1e38, "schedule__warmup_steps": 0, "trainer__max_skipped_steps": 0}
    code = train_here(run_of(tmp_path, trainer__max_steps=50, **settings))
    assert code == USER_ERROR
    first, second = capfd.readouterr().err.splitlines()[-2:]
    assert "error: no finite gradient" in first and "Is a directory" in second


def test_the_first_of_several_gradients_is_that_of_the_last_stage_nearest_to_the_loss() -> None:
    """From there they spread towards the input."""
    sound = {"weights": [], "forward": None, "gradients": []}
    names = (["a", "b"], ["c", "d[0:8]"], [], ["e[8:9]"])  # two stages on each of two data ranks, with ZeRO-1
    assert first_cause([sound | {"gradients": bad} for bad in names], list("abcdef")) == "the gradient of e"


def test_overflows_at_a_high_loss_scale_are_not_a_divergence(tmp_path) -> None:
    settings = {"precision__dtype": "fp16", "trainer__max_skipped_steps": 0, "trainer__max_steps": 30}
    assert train_here(tiny_run("gpt", tmp_path, **settings)) == 0
    assert read_rows(tmp_path)[-1]["num_skipped"] > 5


def test_a_run_that_ends_with_weights_that_have_just_diverged_says_so(tmp_path, capsys) -> None:
    settings = {"precision__dtype": "fp32", "optimizer__lr": 1e30, "trainer__max_steps": 2}
    assert train_here(tiny_run("gpt", tmp_path, **settings)) == 0
    assert "WARNING: the validation loss is not finite: the run has diverged" in capsys.readouterr().err
    assert json.loads((tmp_path / "record.json").read_text())["ended_above_start"]


def test_a_run_that_ends_above_its_start_says_so_also_after_a_resume(tmp_path, capsys) -> None:
    settings = {"optimizer__lr": 10.0, "schedule__warmup_steps": 0, "trainer__max_steps": 4}
    assert train_here(tiny_run("gpt", tmp_path, trainer__stop_after_steps=2, **settings)) == 0
    for last in (2, 4):
        assert "WARNING: the validation loss ended above its start, so" in capsys.readouterr().err
        record = json.loads((tmp_path / "record.json").read_text())
        assert record["ended_above_start"] and record["metrics"]["steps"]["value"] == last
        if last == 2:
            assert train_here(tiny_run("gpt", tmp_path, resume__path="auto", **settings)) == 0


def drift(rank: int, what: str) -> None:
    """Modify a value on rank 1 only, after step 2."""
    step = PretrainModule.optimizer_step

    def step_and_drift(self, *args):
        step(self, *args)
        if self.completed_steps == 2 and rank == 1:
            if what == "sample numbers":
                (digest,) = (c for c in self.trainer.callbacks if isinstance(c, SampleDigest))
                digest.value += 1
            else:
                weight = self.model.get_parameter(what).data.view(-1)[:1]
                weight.copy_(weight.nextafter(weight + 1))

    PretrainModule.optimizer_step = step_and_drift


@pytest.mark.parametrize(
    ("tp_size", "dtype", "what", "named"),
    [
        (2, "fp64", "transformer.layers.0.attention_norm.weight", "model/transformer.layers.0.attention_norm.weight"),
        (2, "fp64", "sample numbers", "sample numbers"),
        (1, "fp64", "transformer.layers.1.mlp.up.weight", "model/transformer.layers.1.mlp.up.weight"),
        (1, "bf16", "transformer.layers.1.mlp.up.weight", "transformer.layers.1.mlp.up.weight"),  # not its master
    ],
)
def test_the_replica_check_names_the_differing_tensor_and_stops_saving(
    tmp_path, capfd, tp_size, dtype, what, named
) -> None:
    # Of two tensor groups the one of ranks 2 and 3 sees nothing, but has to stop.
    dp_size = 2 if "." in what else 1
    sizes = {"parallel__tp_size": tp_size, "parallel__dp_size": dp_size, "precision__dtype": dtype}
    run = run_of(tmp_path, trainer__check_replicas_every_steps=2, logger__log_every_steps=10, **sizes)
    run_jobs([run], tp_size * dp_size, REPLICAS_DIFFER, partial(drift, what=what))
    stderr = capfd.readouterr().err
    assert f"error: after step 2 {named} differs within the {'tensor' if tp_size == 2 else 'data'} group" in stderr
    assert [p.name for p in list_checkpoints(tmp_path / "checkpoints")] == ["step_1.ckpt"]
    assert [row["step"] for row in read_rows(tmp_path) if "train/loss" in row] == [2]  # which ends the run


def test_background_saves_hold_the_state_at_their_start(tmp_path) -> None:
    """Every checkpoint saved in the background equals the one saved in the foreground."""
    for name, in_background in (("front", False), ("back", True)):
        assert train_here(run_of(tmp_path / name, checkpoint__async=in_background)) == 0
    paths = list_checkpoints(tmp_path / "front" / "checkpoints")
    assert len(paths) == 5
    for path in paths:
        one, two = (Checkpoint.open(tmp_path / name / "checkpoints" / path.name) for name in ("front", "back"))
        assert one.metadata.tensors == two.metadata.tensors  # including the checksums of all pieces
