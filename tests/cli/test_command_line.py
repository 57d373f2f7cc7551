"""`lmscale COMMAND`, `--help`, wrong options and misspelled keys: what a user reads before the first run."""

import ast
import io
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from entry_points import REPOSITORY, TINY, environment, refuse, train

from lmscale.__main__ import COMMANDS
from lmscale.cli.errors import one_line_errors
from lmscale.cli.hydra_main import run_hydra_main
from lmscale.cli.reference import ENTRY_POINTS


def lmscale(*arguments: str, cwd: Path, package: Path = REPOSITORY / "src") -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "lmscale", *arguments],
        cwd=cwd,
        env=environment(PYTHONPATH=str(package)),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_a_command_it_lists_them(tmp_path) -> None:
    for arguments in ((), ("--help",)):
        done = lmscale(*arguments, cwd=tmp_path)
        assert done.returncode == 0
        assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_a_command_that_does_not_exist_is_refused_in_one_line(tmp_path) -> None:
    done = lmscale("trian", "model=gpt_tiny", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.endswith("but is 'trian'; did you mean `train`?\n") and len(done.stderr.splitlines()) == 1


def test_every_script_handles_ctrl_c_before_it_imports_anything_else() -> None:
    for script in ENTRY_POINTS:
        statements = ast.parse((REPOSITORY / script).read_text(encoding="utf-8")).body
        first = next(each for each in statements if isinstance(each, ast.Import | ast.ImportFrom))
        assert first.names[0].name == "lmscale.cli.ctrl_c", script


@pytest.mark.parametrize("library", ["hydra", "torch"])
def test_ctrl_c_while_a_library_is_imported_prints_one_line(library, tmp_path) -> None:
    code = "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: pass\n"
    (tmp_path / f"{library}.py").write_text(code)  # some modules of torch catch every exception
    command = [sys.executable, str(REPOSITORY / "src" / "train.py")]
    path = environment(PYTHONPATH=f"{tmp_path}:{REPOSITORY / 'src'}")
    # A shell that starts the tests in the background makes them, and their child processes, ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=120)
    signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped by SIGINT\n")
    assert not (tmp_path / "outputs").exists()


def test_outside_a_clone_one_line_says_so(tmp_path) -> None:
    shutil.copytree(REPOSITORY / "src" / "lmscale" / "config", tmp_path / "site" / "lmscale" / "config")
    for name in ("__init__.py", "__main__.py"):
        shutil.copy(REPOSITORY / "src" / "lmscale" / name, tmp_path / "site" / "lmscale")
    done = lmscale("train", cwd=tmp_path, package=tmp_path / "site")
    assert done.returncode == 2
    assert done.stderr == (
        f"error: `lmscale` must be installed from a clone (pip install -e CLONE), but {tmp_path} has no conf/\n"
    )


@pytest.mark.slow
def test_lmscale_train_starts_two_ranks_from_another_folder(tmp_path) -> None:
    done = lmscale("train", *TINY, "parallel.tp_size=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (record,) = (tmp_path / "outputs" / "gpt_tiny").glob("*/record.json")
    assert '"tp_size": 2' in record.read_text() and '"started": "20' in record.read_text()


def script(*command: str) -> subprocess.CompletedProcess:
    return refuse(REPOSITORY / command[0], *command[1:])


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_help_fits_a_screen_and_has_examples_groups_and_keys(entry_point) -> None:
    done = script(entry_point, "--help")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 40
    assert sum(line.startswith(f"  python {entry_point} ") for line in lines) >= 2
    assert "  --cfg job prints all with their values" in done.stdout and "keys: " in done.stdout
    groups = {"src/train.py": "bert_tiny", "finetune/run.py": "cola, [mnli]", "src/plan.py": "[dgx2h_v100]"}
    assert groups.get(entry_point, "") in done.stdout


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--model", "x"), "error: keys are given without dashes, as in model=VALUE, but there is --model; see --help"),
        (
            ("--config-dir",),
            "error: the options must be Hydra's (--hydra-help), but argument --config-dir/-cd: expected",
        ),
    ],
    ids=["a key with dashes", "an option of Hydra's without its value"],
)
def test_an_option_that_is_none_gets_one_line_of_ours(option, message) -> None:
    done = script("src/train.py", *option)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(message) and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (("seed=3", "--cfg", "job", "trainer.max_steps=7"), "max_steps: 7"),
        (("seed=3", "--config-dir", "docs", "trainer.max_steps=7", "--cfg=job", "seed=4"), "max_steps: 7"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (("seed=3", "-c", "job", "trainer.max_steps=7", "--package", "trainer", "seed=4"), "max_steps: 7"),
                (("top=3", "-cn", "plan", "num_devices=7", "--cfg", "job"), "num_devices: 7"),
                (("seed=3", "--info", "config"), "/conf/train"),
            ]
        ),
    ],
)
def test_options_of_hydra_may_stand_between_keys(words, printed) -> None:
    done = train(*words)  # a process of its own: Hydra's logger keeps the standard output of its first job
    assert done.returncode == 0 and done.stderr == "" and printed in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("seed=3", "--cfg", "job", "-m", "seed=4"), "Only one of --run, --multirun, --cfg, "),
        (("seed=3", "-cn", "gone", "seed=4"), "Cannot find primary config 'gone'."),
        (("seed=3", "--config-dir", "gone", "seed=4"), "Additional config directory"),
        (("--config-path", "/tmp"), "Cannot find primary config 'train'."),
        (("--info", "seed=3"), "the options must be Hydra's (--hydra-help), but argument --info/-i: invalid choice"),
        (("seed=1", "-m", "seed=1,x", *TINY), "job 1 of the sweep (seed=x "),
    ],
)
def test_wrong_options_of_hydra_between_keys_get_one_line(words, message, tmp_path) -> None:
    folder = f"hydra.sweep.dir={tmp_path}" if "-m" in words else f"hydra.run.dir={tmp_path}"
    done = refuse(REPOSITORY / "src" / "train.py", *words, folder)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {message}") and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        (("src/train.py", "max_stps=3"), "trainer.max_steps"),
        (("src/train.py", "+trainer.max_step=3"), "trainer.max_steps"),
        (("src/train.py", "model.norm_order=pree"), "pre"),
        (("src/train.py", "model.norm_order=prenorm"), "pre"),
        (("src/train.py", "model.norm_order=Post"), "post"),
        (("src/train.py", "model.norm_order=deepnrm"), "deepnorm"),
        (("src/train.py", "precision=bf61"), "bf16"),
        (("src/train.py", "precision=bf16-mixed"), "bf16"),
        (("src/train.py", "parallel.tpsize=2"), "parallel.tp_size"),
        (("src/train.py", "sweep=norm_ordr"), "norm_order"),
        (("finetune/run.py", "swep=five_seeds"), "sweep"),
        (("finetune/run.py", "task=mnly"), "mnli"),
        (("src/convert.py", "source=a", "target=b", "format=huggingface"), "hugging_face"),
        (("src/prepare_data.py", "dedup=papr"), "paper"),
        (("src/plan.py", "cluster=h10"), "h100"),
        (("src/generate.py", "promt=x"), "prompt"),
    ],
)
def test_a_misspelled_key_group_or_choice_is_answered_with_the_one_meant(command, meant) -> None:
    done = script(*command)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"did you mean `{meant}`?" in done.stderr


def test_a_misspelled_name_of_one_s_own_is_not_answered_with_another_group() -> None:
    done = script("src/prepare_data.py", "sources.lokal.path=README.md", "output=never")
    assert done.returncode == 2 and "; `sources` has no lokal with that key: " in done.stderr


def test_a_group_of_another_entry_point_is_not_offered() -> None:
    done = script("finetune/run.py", "model=bert_tiny")  # the model is the checkpoint's
    assert done.returncode == 2
    assert done.stderr == "error: `model` is not a known key or group of the configuration\n"


def test_a_model_of_one_s_own_without_files_is_told_what_it_needs(tmp_path) -> None:
    unknown = script("src/train.py", "model=my_model")
    assert "; a model of your own needs model/my_model.yaml and recipe/my_model.yaml in conf/" in unknown.stderr
    (tmp_path / "model").mkdir()
    tiny = (REPOSITORY / "conf" / "model" / "gpt_tiny.yaml").read_text()
    (tmp_path / "model" / "my_model.yaml").write_text(tiny.replace("gpt_tiny", "my_model"))
    done = script("src/plan.py", "--config-dir", str(tmp_path), "model=my_model")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "model=my_model needs recipe/my_model.yaml beside its model file" in done.stderr


def test_a_bare_plan_answers() -> None:
    done = script("src/plan.py")
    assert done.returncode == 0
    assert "gpt_8.3b on 512 of dgx2h_v100" in done.stdout and re.search(r", [\d,]+ layouts fit", done.stdout)
    assert done.stderr.startswith("note: without keys this is model=gpt_8.3b ")


@pytest.mark.parametrize(
    ("words", "buffers"),
    [
        (("src/plan.py", "--help"), ""),
        (("src/plan.py", "--cfg", "job"), "1"),
        (("src/plan.py", "num_devices=8", "parallel.tp_size=8"), ""),
        (("analysis/scaling_law/run.py", "--list"), ""),
    ],
    ids=["help", "cfg", "plan", "study"],
)
def test_a_reader_that_closes_the_output_ends_the_command_quietly(words, buffers) -> None:
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=REPOSITORY,
        env=environment(PYTHONUNBUFFERED=buffers),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    stderr = process.stderr.read()
    assert process.wait(60) == 141
    assert not stderr


def test_a_script_whose_output_is_closed_ends_well() -> None:
    words = [sys.executable, "analysis/scaling_law/run.py", "--list"]
    closed = ["bash", "-c", 'exec "$0" "$@" >&-', *words]
    done = subprocess.run(closed, cwd=REPOSITORY, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def in_entry_point(monkeypatch, path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["plan.py"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr("hydra.main", lambda **_: lambda job: lambda: job("Größe"))
    run_hydra_main(print)


def in_script(monkeypatch, path: Path) -> None:
    one_line_errors()(print)("Größe")


def in_rank(monkeypatch, path: Path) -> None:
    from lmscale.runtime.launch import _run_worker

    path.write_bytes(pickle.dumps("Größe"))
    _run_worker(print, path)


@pytest.mark.parametrize("show", [in_entry_point, in_script, in_rank])
def test_letters_that_the_output_lacks_are_escaped(show, monkeypatch, tmp_path) -> None:
    """Of paths, labels and generated text, where the locale or PYTHONIOENCODING is of ASCII."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    show(monkeypatch, tmp_path / "job.pickle")
    out.flush()
    assert out.buffer.getvalue() == b"Gr\\xf6\\xdfe\n"


def test_an_argument_that_is_no_text_is_refused() -> None:
    done = refuse(REPOSITORY / "src" / "train.py", "hydra.run.dir=gr\udcfcn")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "locale's encoding, utf-8 (" in done.stderr and "but is 'hydra.run.dir=gr\\udcfcn'" in done.stderr


@pytest.mark.parametrize(
    ("script", "words", "printed"),
    [
        ("src/train.py", ["resume=~/none"], "'{}/none' does not exist"),
        ("src/train.py", ["model=gpt_tiny", 'resume="~/none"'], "'{}/none' does not exist"),
        ("src/train.py", ["data=indexed", "data.path={{~/none:1}}"], "there is no {}/none.idx"),
        ("src/train.py", ["-m", "hydra.sweep.dir=~/FILE", "seed=1"], "{}/FILE: File exists"),
        ("src/train.py", ['hydra.run.dir="~/FILE"'], "{}/FILE: File exists"),
        ("src/train.py", ["hydra.run.dir=~nobody_here/x"], "but is '~nobody_here'; there is no such user"),
        ("src/generate.py", ["prompt=~/x", "ckpt=~/none"], "checkpoint {}/none does not exist"),
        ("src/convert.py", ["source=~/none", "target=~/new"], "checkpoint {}/none does not exist"),
        ("src/plan.py", ["cluster.path=~/none"], "but is {}/none: No such file"),
        ("src/prepare_data.py", ["sources.local.path=~/none", "output=~/new"], "but {}/none: No such file"),
        ("finetune/run.py", ["ckpt=~/none"], "but {}/none does not exist"),
        ("finetune/median.py", ["~/none"], "error: argument folder: must exist, but {}/none does not"),
        ("finetune/ensemble.py", ["~/none", "--out=~/x"], "error: argument runs: must exist, but {}/none does not"),
    ],
)
def test_a_path_may_begin_with_the_home_folder(script, words, printed, tmp_path) -> None:
    """A shell expands `~` only where a word begins with it."""
    here, home = tmp_path / "here", tmp_path / "home"
    here.mkdir()
    home.mkdir()
    (home / "FILE").touch()
    done = refuse(REPOSITORY / script, *(word.format() for word in words), cwd=here, HOME=str(home))
    assert done.returncode == 2 and printed.format(home) in done.stderr, done.stderr
    assert not list(here.iterdir()) and [path.name for path in home.iterdir()] == ["FILE"]


def test_a_file_of_one_s_own_may_begin_a_path_with_the_home_folder(tmp_path) -> None:
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    words = ("--config-dir", ".", "experiment=mine")
    file.write_text("# @package _global_\nresume: {path: ~/none}\n")
    done = refuse(REPOSITORY / "src" / "train.py", *words, cwd=tmp_path, HOME="/home/me")
    assert "'/home/me/none' does not exist" in done.stderr
    file.write_text("# @package _global_\nhydra: {run: {dir: ~/runs}, sweep: {dir: ~/runs}}\n")
    for mode, name in (((), "run"), (("-m", "seed=1"), "sweep")):  # Hydra makes the folder before our code runs
        done = refuse(REPOSITORY / "src" / "train.py", *mode, *words, cwd=tmp_path)
        assert f"`hydra.{name}.dir` must be given with ${{oc.env:HOME}} in a file, but is ~/runs" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["experiment"]
