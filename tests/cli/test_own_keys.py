"""`resume=auto` with the run's folder alone takes the keys of the run."""

import shlex
import shutil
import sys
from pathlib import Path

import pytest
from entry_points import REPOSITORY, refuse

from lmscale.cli.own_keys import add_own_keys

OWN = "- model=bert_tiny\n- trainer.max_steps=9\n- trainer.stop_after_steps=2\n- resume.path=old\n- +optimizer.eps=1\n"
SETTINGS = """hydra:
  job: {config_name: train}
  runtime:
    config_sources:
    - {path: /clone/conf, provider: main}
    - {path: /my conf, provider: command-line}
"""
TAKEN = ["hydra.mode=RUN", "model=bert_tiny", "trainer.max_steps=9", "+optimizer.eps=1"]
CONF = ["--config-dir", "/my conf"]


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "a run, (1=2)"
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(OWN, encoding="utf-8")
    (folder / ".hydra" / "hydra.yaml").write_text(SETTINGS, encoding="utf-8")
    (folder / "checkpoints" / "step_2.ckpt").mkdir(parents=True)
    return folder


def test_a_run_that_was_copied_without_hidden_files_keeps_its_keys(folder, monkeypatch, capsys) -> None:
    shutil.rmtree(folder / ".hydra")
    (folder / "config.json").write_text('{"overrides": ["model=bert_tiny", "resume.path=old"]}', encoding="utf-8")
    words = ["resume.path=auto", f"hydra.run.dir='{folder}'", "seed=2"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    add_own_keys()
    assert sys.argv == ["train.py", "hydra.mode=RUN", "model=bert_tiny", *words]
    assert capsys.readouterr().out == f"keys of the run in {folder}: model=bert_tiny; different here: seed=2 (new)\n"


@pytest.mark.parametrize(
    ("typed", "before", "after", "said"),
    [
        ([], TAKEN, CONF, "model=bert_tiny trainer.max_steps=9 +optimizer.eps=1"),
        *(
            (["resume.schedule=keep", *other], TAKEN, [], "model=bert_tiny trainer.max_steps=9 +optimizer.eps=1")
            for other in (["--config-dir", "other"], ["--config-dir=other"])
        ),
        (
            ["trainer.max_steps=12", "parallel.tp_size=2"],
            ["hydra.mode=RUN", "model=bert_tiny", "+optimizer.eps=1"],
            CONF,
            "model=bert_tiny +optimizer.eps=1; different here: trainer.max_steps=12 (was 9) parallel.tp_size=2 (new)",
        ),
        (
            ["model=gpt_tiny", "trainer.max_steps=9", "optimizer.eps=1"],
            ["hydra.mode=RUN"],
            CONF,
            "all given; different here: model=gpt_tiny (was bert_tiny) optimizer.eps=1 (was 1)",
        ),
    ],
    ids=["folder alone", "other configuration folder", "the same in one word", "new keys", "all keys"],
)
@pytest.mark.parametrize("resume", ["resume.path=auto", "++resume.path='auto'"])
def test_the_keys_of_the_run_precede_those_typed(
    folder, monkeypatch, capsys, typed, before, after, said, resume
) -> None:
    words = [resume, f"hydra.run.dir='{folder}'", *typed]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    add_own_keys()
    assert sys.argv[1:] == [*before, *words, *after]
    assert capsys.readouterr().out == f"keys of the run in {folder}: {said}\n"


def test_a_branch_that_ended_before_its_first_checkpoint_does_not_begin_at_step_0(folder, monkeypatch) -> None:
    (folder / "checkpoints" / "step_2.ckpt").rmdir()
    monkeypatch.setattr(sys, "argv", ["train.py", "resume.path=auto", f"hydra.run.dir='{folder}'"])
    with pytest.raises(ValueError, match="began from old and has no checkpoint of its own yet; start it in another fo"):
        add_own_keys()


@pytest.mark.parametrize(
    "words",
    [
        ["resume.path=auto"],
        ["hydra.run.dir='{}'"],
        ["resume.path=none", "hydra.run.dir='{}'"],
        *(
            ["resume.path=auto", "hydra.run.dir=/nowhere/run", word]
            for word in ("model=bert_tiny", "experiment=demo_gpt", "sweep=norm_order")
        ),
        ["-m", "resume.path=auto", "hydra.run.dir='{}'", "seed=1,2"],
    ],
    ids=["no folder", "a new run", "resume=none", "new model", "new experiment", "new sweep", "a sweep"],
)
def test_other_commands_are_left_alone(folder, monkeypatch, capsys, words) -> None:
    words = [word.format(folder) for word in words]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    add_own_keys()
    assert sys.argv[1:] == words and capsys.readouterr().out == ""


@pytest.mark.parametrize("word", ["resume.schedule=keep", "trainer.max_steps=10", "model.recompute=full"])
def test_a_folder_without_a_run_is_refused_where_the_command_does_not_say_what_to_train(
    tmp_path, monkeypatch, word
) -> None:
    words = ["resume.path=auto", f"hydra.run.dir={tmp_path}/gone", word]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with pytest.raises(
        ValueError, match=r"^`hydra.run.dir` must be the folder of a run to continue .* but .*/gone has none; .* model="
    ):
        add_own_keys()
    (tmp_path / "gone" / "checkpoints").mkdir(parents=True)  # of a run that another program has started
    add_own_keys()
    assert sys.argv[1:] == words


def test_the_folder_of_a_finetuning_is_refused_with_the_command_that_starts_it_again(folder, monkeypatch) -> None:
    settings = SETTINGS.replace("name: train", "name: finetune")
    (folder / ".hydra" / "hydra.yaml").write_text(settings, encoding="utf-8")
    (folder / ".hydra" / "overrides.yaml").write_text("- task=qqp\n- ckpt=a b\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["train.py", "resume.path=auto", f"hydra.run.dir='{folder}'"])
    monkeypatch.chdir(folder.parent)
    with pytest.raises(ValueError, match="^`hydra.run.dir` must be the folder of a pretraining") as refused:
        add_own_keys()
    again = shlex.split(str(refused.value).partition("with the command ")[2])
    keys = ["hydra.mode=RUN", "task=qqp", "ckpt=a b", f'hydra.run.dir="{folder.name}"']
    assert again[1:] == [str(REPOSITORY / "finetune" / "run.py"), *CONF, *keys]


def test_the_run_is_checked_with_its_own_keys(folder) -> None:
    (folder / ".hydra" / "hydra.yaml").write_text(
        "hydra: {job: {config_name: train}, runtime: {config_sources: []}}", encoding="utf-8"
    )
    (folder / ".hydra" / "overrides.yaml").write_text("- model=bert_tiny\n- global_batch_size=5\n", encoding="utf-8")
    train = REPOSITORY / "src" / "train.py"
    done = refuse(train, f"hydra.run.dir='{folder}'", "++resume=auto")
    assert done.returncode == 2
    assert done.stderr.startswith("error: `global_batch_size` must be a multiple") and "but is 5" in done.stderr
    done = refuse(train, "hydra.run.dir=Größe", "resume=auto")
    assert done.returncode == 2 and """special ('hydra.run.dir="Größe"'), but is""" in done.stderr, done.stderr
    (folder / ".hydra" / "overrides.yaml").write_text("- [", encoding="utf-8")
    done = refuse(train, f"hydra.run.dir='{folder}'", "resume=auto")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"error: the keys of the run in {folder} cannot be read")
