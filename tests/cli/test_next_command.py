"""A run ends with the commands that follow it, and they run as they are printed."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from entry_points import REPOSITORY, TINY, environment, slurm_task, train
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode

from lmscale.cli import next_command


def run_line(line: str, *more: str) -> subprocess.CompletedProcess:
    """What a user does who copies the line: a shell in the root of the clone."""
    return subprocess.run(
        " ".join([line, *more]),
        shell=True,
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def printed(stdout: str) -> dict[str, str]:
    return dict(re.findall(r"^(\w+): +(\S*python.*)$", stdout, re.M))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("runs") / "a run, (1=2)"
    done = train(*TINY, f"hydra.run.dir='{folder}'")
    assert done.returncode == 0, done.stderr
    return folder, printed(done.stdout)


def test_a_pretraining_ends_with_use_export_and_plot(finished) -> None:
    folder, lines = finished
    assert list(lines) == ["use", "export", "plot"]
    assert shlex.split(lines["use"])[1:] == ["src/generate.py", f"ckpt={folder}", "prompt=The"]
    source, target, form = OverridesParser.create().parse_overrides(shlex.split(lines["export"])[2:])
    assert [source.value(), target.value(), form.value()] == [str(folder), f"{folder}/hugging_face", "hugging_face"]
    assert all(Path(REPOSITORY / shlex.split(line)[1]).is_file() for line in lines.values())


@pytest.mark.slow
def test_the_printed_commands_run(finished, tmp_path) -> None:
    _, lines = finished
    for name, more in {"use": [], "export": [], "plot": ["--output", f"{tmp_path}/curves.png"]}.items():
        done = run_line(lines[name], *more)
        assert done.returncode == 0, (lines[name], done.stderr)
        for line in printed(done.stdout).values():  # `load` after the export
            assert run_line(line).returncode == 0, line


def test_a_bert_of_few_positions_is_finetuned_on_shorter_pairs() -> None:
    """The demo's has 32: the command that it printed was refused."""
    for positions, length in ((32, 32), (512, 64)):
        assert f" task.max_seq_length={length}" in next_command.use_model("run", "bert", positions)


def test_a_bert_whose_pooler_was_drawn_is_finetuned_with_a_new_one() -> None:
    for drawn, is_new in (((), False), (("order_head.bias",), False), (("pooler.bias", "pooler.weight"), True)):
        assert (" new_pooler=true" in next_command.use_model("run", "bert", drawn=drawn)) == is_new


@pytest.mark.slow
def test_the_commands_after_a_bert_its_finetuning_a_preparation_and_an_evaluation_run(finished, tmp_path) -> None:
    # After 3 steps its loss may be higher than at the start: it would not be offered.
    done = train(*TINY, "model=bert_tiny", "trainer.max_steps=30", f"hydra.run.dir={tmp_path / 'bert'}")
    assert done.returncode == 0, done.stderr
    tuned = run_line(printed(done.stdout)["use"], "trainer.num_epochs=1", f"hydra.run.dir={tmp_path / 'tuned'}")
    assert tuned.returncode == 0, tuned.stderr
    scored = run_line(printed(tuned.stdout)["score"], f"hydra.run.dir={tmp_path / 'scored'}")
    assert scored.returncode == 0 and (tmp_path / "scored" / "record.json").is_file(), scored.stderr
    exported = run_line(printed(tuned.stdout)["export"])
    loaded = run_line(printed(exported.stdout)["load"])
    assert "(classifier): Linear" in loaded.stdout, exported.stderr + loaded.stderr

    documents = [{"text": f"The lighthouse number {i} stands on the {i}th rock of the bay. " * 20} for i in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents), encoding="utf-8")
    source, output = f"sources.local.path={tmp_path / 'text.jsonl'}", f"output={tmp_path / 'corpus'}"
    kept = ("evaluation=none", "dedup=none", "cleaning=none", "tokenizer.vocab_size=400")
    prepared = run_line(next_command.command("src/prepare_data.py", source, output, *kept))
    assert prepared.returncode == 0, prepared.stderr
    short = (o for o in TINY if "tokenizer" not in o)
    trained = run_line(printed(prepared.stdout)["train"], *short, f"hydra.run.dir={tmp_path / 'gpt'}")
    assert trained.returncode == 0, trained.stderr

    (tmp_path / "lambada.jsonl").write_text(json.dumps({"text": "The lighthouse stands on the rock"}) + "\n")
    task = ("task=lambada", f"task.path={tmp_path / 'lambada.jsonl'}", f"hydra.run.dir={tmp_path / 'lambada'}")
    evaluated = run_line(next_command.command("src/zero_shot.py", *task, ckpt=finished[0]))
    assert evaluated.returncode == 0, evaluated.stderr
    used = run_line(printed(evaluated.stdout)["use"])
    assert used.returncode == 0, used.stderr


@pytest.mark.slow
def test_an_unfinished_run_ends_with_the_command_that_completes_it(tmp_path, monkeypatch) -> None:
    run = tmp_path / "another run"
    done = train(*TINY, "trainer.stop_after_steps=2", f"hydra.run.dir='{run}'")
    assert done.returncode == 0, done.stderr
    (run / "record.json").unlink()
    monkeypatch.chdir(REPOSITORY)
    line = next_command.after_training({"run_dir": str(run)})
    assert line.endswith(f"src/train.py 'hydra.run.dir=\"{run}\"' resume=auto")
    done = run_line(line.removeprefix("continue: "))
    assert done.returncode == 0, done.stderr
    assert "steps 2 to 3 of 3, resumed from" in done.stdout and (run / "record.json").is_file()


def test_under_a_launcher_the_user_is_told_to_start_the_same_ranks(tmp_path, monkeypatch) -> None:
    run = tmp_path / "my run"
    (run / "checkpoints" / "step_000002.ckpt").mkdir(parents=True)
    values = {"run_dir": str(run)}
    alone = next_command.after_training(values)
    for name, value in slurm_task(0, "29500").items():
        monkeypatch.setenv(name, value)
    line = next_command.after_training(values)
    start, keys = line.split(", with ")
    assert start == "continue: start the same ranks by the same launcher"
    assert shlex.split(keys) == ["resume=auto", f'hydra.run.dir="{run}"']
    monkeypatch.setattr(next_command.HydraConfig, "get", lambda: SimpleNamespace(sweep=SimpleNamespace(dir=str(run))))
    assert next_command.continue_trainings() == line.replace("run.dir", "sweep.dir")
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")  # an interactive shell
    assert next_command.after_training(values) == alone and "python" in alone


def test_a_folder_without_record_and_checkpoints_gets_no_command(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(next_command.HydraConfig, "get", lambda: SimpleNamespace(mode=RunMode.RUN))
    assert next_command.after_training({"run_dir": str(tmp_path)}) == ""
    assert next_command.after_finetuning({"run_dir": str(tmp_path), "overrides": []}) == ""


def test_a_model_that_ended_above_its_start_is_not_offered(tmp_path, monkeypatch) -> None:
    hydra = SimpleNamespace(mode=RunMode.RUN, runtime=SimpleNamespace(config_sources=[]))
    monkeypatch.setattr(next_command.HydraConfig, "get", lambda: hydra)
    (tmp_path / "checkpoints" / "step_3.ckpt").mkdir(parents=True)
    values = {"run_dir": str(tmp_path), "overrides": [], "model": {"family": "gpt", "max_position_embeddings": 8}}
    for above, lines in ((False, ["use", "export", "plot", "score", "export"]), (True, ["plot"])):
        (tmp_path / "record.json").write_text(json.dumps({"ended_above_start": above}))
        text = next_command.after_training(values) + "\n" + next_command.after_finetuning(values)
        assert [line.partition(":")[0] for line in text.splitlines()] == lines


def test_a_finetuning_is_scored_without_the_keys_that_only_train(tmp_path, monkeypatch) -> None:
    """`from_scratch` would draw the weights anew, and `new_pooler` is refused where the pooler is trained."""
    hydra = SimpleNamespace(mode=RunMode.RUN, runtime=SimpleNamespace(config_sources=[]))
    monkeypatch.setattr(next_command.HydraConfig, "get", lambda: hydra)
    (tmp_path / "checkpoints" / "step_3.ckpt").mkdir(parents=True)
    only_train = ["++ckpt=pretrained", "++from_scratch=true", "trainer.num_epochs=2", "new_pooler=true"]
    typed = ["task=qqp", *only_train, "seed=7"]
    line, _ = next_command.after_finetuning({"run_dir": str(tmp_path), "overrides": typed}).splitlines()
    assert shlex.split(line)[3:] == ["task=qqp", "seed=7", f"ckpt={tmp_path}", "trainer.num_epochs=0"]


@pytest.mark.parametrize(
    "path", ["plain/run", "Größe", "a b", "it's", 'say "x"', "a=b,c", "$HOME", "back\\slash", "ends\\"]
)
def test_a_path_reaches_the_script_as_it_is(path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = next_command.command("src/convert.py", source=Path(path))
    word = subprocess.run(["sh", "-c", f"printf %s {line.split(' ', 2)[2]}"], capture_output=True, text=True).stdout
    assert OverridesParser.create().parse_override(word).value() == path
