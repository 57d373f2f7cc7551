"""`-m`: several runs from one command, each job checked before the first starts."""

import csv
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from entry_points import REPOSITORY, TINY, environment, refuse, slurm_task, train
from omegaconf import OmegaConf
from ranks import free_ports

from lmscale.cli.sweep_summary import SweepSummary

VALIDATED = {  # the part of a configuration that names the validation set
    "model": {"architecture": "gpt"},
    "data": {"seq_length": 32},
    "corpus": {"tokenizer": "t", "validation": {"tokens": 640}},
}


def test_a_sweep_over_layouts_and_rates_makes_four_runs_a_table_best_first_and_a_figure(tmp_path) -> None:
    sweep = ("-m", "parallel.tp_size=1,2", "optimizer.lr=1e-5,1e-2", f"hydra.sweep.dir={tmp_path}")
    done = train(*sweep, *TINY, "schedule.min_lr=0")
    assert done.returncode == 0, done.stderr
    records = [json.loads((tmp_path / str(i) / "record.json").read_text()) for i in range(4)]
    grid = [(tp_size, lr) for tp_size in (1, 2) for lr in ("1e-05", "0.01")]
    assert [(r["layout"]["tp_size"], str(r["config"]["optimizer"]["lr"])) for r in records] == grid
    stored = [json.loads((tmp_path / str(i) / "config.json").read_text())["overrides"] for i in range(4)]
    assert [o[:2] for o in stored] == [
        [f"parallel.tp_size={tp_size}", f"optimizer.lr={lr}"] for tp_size in (1, 2) for lr in ("1e-05", "0.01")
    ]
    losses = [r["metrics"]["val/loss"]["value"] for r in records]
    assert max(losses[1], losses[3]) < min(losses[0], losses[2])
    best_first = sorted(range(4), key=losses.__getitem__)
    with open(tmp_path / "sweep.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {
            "val/loss": str(losses[i]),
            "run": str(i),
            "parallel.tp_size": str(grid[i][0]),
            "optimizer.lr": grid[i][1],
        }
        for i in best_first
    ]
    table = done.stdout[done.stdout.index("4 runs, best val/loss first") :].splitlines()
    assert [line.split()[:2] for line in table[1:6]] == [
        ["val/loss", "run"],
        *([f"{losses[i]:.4f}", str(i)] for i in best_first),
    ]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_over_models_trains_each_with_its_own_recipe(tmp_path) -> None:
    done = train("-m", "model=gpt_tiny,bert_tiny", *TINY, f"hydra.sweep.dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    records = [json.loads((tmp_path / str(i) / "record.json").read_text()) for i in range(2)]
    assert [r["name"] for r in records] == ["gpt_tiny", "bert_tiny"]
    assert [r["config"]["schedule"]["decay"] for r in records] == ["cosine", "linear"]
    assert "train/order_loss" in (tmp_path / "1" / "metrics.csv").read_text()
    losses = ("val/loss", "val_start/loss", "train/loss", "val/lm_loss", "val_start/order_loss")
    units = [{name: r["metrics"][name]["unit"] for name in losses if name in r["metrics"]} for r in records]
    assert units[0] == dict.fromkeys(losses[:3], "nats/token")
    assert units[1] == dict.fromkeys(losses[:3], "nats") | {losses[3]: "nats/masked token", losses[4]: "nats/sequence"}
    number = r"(\d+\.\d{4})"
    change = rf"{number} -> {number}"
    assert re.search(rf"^validation loss {change} nats per token at step 3; a unigram has ", done.stdout, re.M)
    bert = rf"^validation loss {change} nats \({change} per masked token \+ {change} per sequence\) at step 3;"
    before, after, *parts = map(float, re.search(bert, done.stdout, re.M).groups())
    assert [before, after] == pytest.approx([parts[0] + parts[2], parts[1] + parts[3]], abs=2e-4)


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (
            ["parallel.tp_size=1,3"],
            "job 1 of the sweep (parallel.tp_size=3): `model.num_attention_heads` must be a multiple",
        ),
        (
            ["model=gpt_tiny,gpt_small", "seed=1,2"],
            "job 2 of the sweep (model=gpt_small seed=1): `model` must be one of bert_1.3b,",
        ),
        (["trainer.max_stps=1,2"], "job 0 of the sweep (trainer.max_stps=1): `trainer.max_stps` is not a known key"),
        (["schedule.min_lr=0,1"], "job 1 of the sweep (schedule.min_lr=1): `schedule.min_lr` must be at most"),
        (
            ["data=local", "data.path=README.md,gone.txt"],
            "job 1 of the sweep (data=local data.path=gone.txt): `data.path` must be a file or a folder that can",
        ),
        (
            ["data=indexed", "data.path=gone,README.md"],
            "job 0 of the sweep (data=indexed data.path=gone): `data.path` must be a folder of prepare_data.py or",
        ),
        (["resume=none,gone"], "job 1 of the sweep (resume.path=gone): `resume` must be none, auto or the path"),
        (["trainer.num_threads=1,9999"], "job 1 of the sweep (trainer.num_threads=9999): `trainer.num_threads` must"),
        (
            ["seed=1,2", "hydra.sweep.subdir=same"],
            "job 1 of the sweep (seed=2): `hydra.sweep.subdir` must give each job a folder of its own, but that of job "
            "0 is the same: ",
        ),
        (["sweep=norm_order", "trainer.num_threads=9999"], "job 0 of the sweep (model.norm_order=pre "),
        (["seed=1,two"], "job 1 of the sweep (seed=two): `seed` must be a whole number, but is 'two'"),
    ],
    ids=["size", "model", "key", "schedule", "path", "dataset", "resume", "threads", "folder", "own keys", "type"],
)
def test_an_invalid_job_is_reported_before_the_first_one_starts(tmp_path, sweep, message) -> None:
    done = refuse(REPOSITORY / "src" / "train.py", "-m", *sweep, f"hydra.sweep.dir={tmp_path}/sweep")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {message}") and len(done.stderr.splitlines()) == 1
    assert not Path(tmp_path / "sweep").exists()


@pytest.mark.slow
def test_a_sweep_does_not_change_a_folder_with_a_run(tmp_path) -> None:
    """Each job is checked in its own folder."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "metrics.csv").write_text("step,train/loss\n1,7.0\n")
    done = train("-m", *TINY, "seed=1,2", f"hydra.sweep.dir={tmp_path}")
    assert done.returncode == 2 and not (tmp_path / "0").exists()
    assert f"`hydra.sweep.dir` must be another folder for a new run, but {tmp_path}/1 has" in done.stderr


@pytest.mark.parametrize(("sweep", "plus"), [("-m", ""), ("-m", "++"), ("sweep=scaling", "")])
def test_a_sweep_is_refused_where_a_folder_of_one_run_is_given(tmp_path, sweep, plus) -> None:
    done = refuse(REPOSITORY / "src" / "train.py", sweep, "seed=two", f"{plus}hydra.run.dir=mine", cwd=tmp_path)
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert (
        done.stderr
        == f"error: `hydra.sweep.dir` must name the folder of a sweep, but only {plus}hydra.run.dir=mine is given\n"
    )


def test_a_sweep_of_plans_runs_in_a_batch_script_for_several_tasks() -> None:
    script = REPOSITORY / "src" / "plan.py"
    overrides = ("-m", "model=gpt_tiny,bert_tiny", "num_devices=1", "cluster=h100")
    done = refuse(script, *overrides, **slurm_task(0, "29500") | {"SLURM_STEP_ID": ""})
    assert done.returncode == 0, done.stderr


def test_a_job_that_fails_later_is_named_too(tmp_path) -> None:
    (tmp_path / "short.txt").write_text("One document.")
    words = ("-m", "data=local", f"data.path={tmp_path}/short.txt", f"hydra.sweep.dir={tmp_path}/sweep")
    done = refuse(REPOSITORY / "src" / "train.py", *words)
    assert done.returncode == 2
    expected = f"error: job 0 of the sweep (data=local data.path={tmp_path}/short.txt): a corpus without"
    assert done.stderr.startswith(expected) and len(done.stderr.splitlines()) == 1


def make_job(folder: Path, family: str, lr: float, losses: list[float], **changes) -> None:
    """The files of one finished job that the summary reads."""
    corpus = {"tokenizer": "t", "validation": {"tokens": 640, "sha256": family}}
    config = VALIDATED | {"model": {"architecture": family}, "corpus": corpus}
    config |= {"overrides": [f"model={family}", f"optimizer.lr={lr}"]}
    record = {"metrics": {"val/loss": {"value": losses[-1]}}, "config": config} | changes
    folder.mkdir()
    (folder / "record.json").write_text(json.dumps(record))
    rows = [f"{step},{loss}" for step, loss in enumerate(losses, 1)]
    (folder / "metrics.csv").write_text("\n".join(["step,train/loss", *rows]) + "\n")


def test_a_sweep_of_runs_with_one_row_shows_points(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(plt, "close", lambda figure: None)
    for number in range(2):
        make_job(tmp_path / str(number), "gpt", 0.1, [0.7])
    SweepSummary("val/loss").on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    drawn = [line for line in plt.gcf().axes[0].get_lines() if len(line.get_xdata())]
    plt.close("all")
    assert [line.get_marker() for line in drawn] == ["o", "o"]


def test_losses_over_different_validation_sets_are_not_in_one_list(tmp_path, capsys) -> None:
    """The loss of a GPT is per next token, that of a BERT per masked token: neither is better than the other."""
    for number, (family, lr, loss) in enumerate([("gpt", 0.1, 4.0), ("bert", 0.1, 3.0), ("gpt", 0.2, 3.5)]):
        make_job(tmp_path / str(number), family, lr, [9.0, loss])
    (tmp_path / "1" / "metrics.csv").unlink()  # a figure of the GPTs alone
    SweepSummary("val/loss").on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    headings = [line for line in capsys.readouterr().out.splitlines() if "best val/loss first" in line]
    assert [heading[: heading.index(",", 9)] for heading in headings] == [
        "2 runs, best val/loss first (gpt",
        "1 run, best val/loss first (bert",
    ]
    with open(tmp_path / "sweep.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["2", "0", "1"]
    assert len({row["validation set"] for row in rows}) == 2


def test_runs_of_one_label_are_drawn_apart_and_a_run_without_a_loss_is_left_out(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(plt, "close", lambda figure: None)
    make_job(tmp_path / "0", "gpt", 0.1, [8.0, 6.0])
    make_job(tmp_path / "1", "gpt", 0.1, [9.0, 5.0])
    make_job(tmp_path / "2", "gpt", 0.2, [7.0], metrics={"val/loss": {"value": None, "non_finite": "nan"}})
    make_job(tmp_path / "3", "gpt", 0.3, [7.0], metrics={"qqp/accuracy": {"value": 50.0}})
    make_job(tmp_path / "4", "gpt", 0.4, [7.0])
    (tmp_path / "4" / "record.json").write_text('{"metrics": ')
    make_job(tmp_path / "5", "gpt", 0.5, [7.0], config={"overrides": []})
    SweepSummary("val/loss").on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    notes = [line.split(",")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    assert notes == ["left out: 2", "left out: 3", "left out: 4", "left out: 5"]
    drawn = [list(line.get_ydata()) for line in plt.gcf().axes[0].get_lines() if len(line.get_xdata())]
    assert all(tick == int(tick) for tick in plt.gcf().axes[0].get_xticks())  # of steps
    plt.close("all")
    assert sorted(drawn) == [[8.0, 6.0], [9.0, 5.0]]


def test_a_sweep_over_tasks_is_ranked_within_each_task(tmp_path, capsys) -> None:
    """An accuracy of one task and an F1 of another are not in one list."""
    scores = {"mnli": {1e-5: 71.0, 5e-5: 74.0}, "squad_v1": {1e-5: 88.0, 5e-5: 81.0}}
    metrics = {"mnli": "mnli/accuracy", "squad_v1": "squad_v1/f1"}
    jobs = [(task, lr, score) for task, of_rates in scores.items() for lr, score in of_rates.items()]
    for number, (task, lr, score) in enumerate(jobs):
        config = {"task": {"name": task}, "overrides": [f"task={task}", f"optimizer.lr={lr}", "seed=1"]}
        config["overrides"] += ["task.doc_stride=64"] * (task == "squad_v1")
        (tmp_path / str(number)).mkdir()
        record = {"config": config, "metrics": {metrics[task]: {"value": score}}}
        (tmp_path / str(number) / "record.json").write_text(json.dumps(record))
        (tmp_path / str(number) / "metrics.csv").write_text("step,train/loss\n1,0.7\n2,0.6\n")
    sweep = {"objective": None, "task": {"name": "mnli"}, "hydra": {"sweep": {"dir": str(tmp_path)}}}
    SweepSummary("lmscale.config.finetune.objective_of").on_multirun_end(OmegaConf.create(sweep))
    lines = [line.split() for line in capsys.readouterr().out.strip().splitlines()]
    assert lines[:8] == [
        ["2", "runs,", "best", "mnli/accuracy", "first"],
        ["mnli/accuracy", "run", "optimizer.lr"],
        ["74.0000", "1", "5e-05"],
        ["71.0000", "0", "1e-05"],
        [],
        ["2", "runs,", "best", "squad_v1/f1", "first"],
        ["squad_v1/f1", "run", "optimizer.lr"],
        ["88.0000", "2", "1e-05"],
    ]
    with open(tmp_path / "sweep.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["mnli/accuracy"], row["squad_v1/f1"], row["task"]) for row in rows] == [
        ("1", "74.0", "", "mnli"),
        ("0", "71.0", "", "mnli"),
        ("2", "", "88.0", "squad_v1"),
        ("3", "", "81.0", "squad_v1"),
    ]
    assert [row["task.doc_stride"] for row in rows] == ["", "", "64", "64"]  # given to some alone
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


# Sends itself a signal when a function is called, or has returned, for the nth time.
SIGNALLED = """
import importlib, os, runpy, signal, sys
module, function, number, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
*holder, name = function.split(".")
place = importlib.import_module(module)
for each in holder:
    place = getattr(place, each)
called = getattr(place, name)
def calls(*arguments, **options):
    global count
    result = called(*arguments, **options)
    count -= 1
    if count == 0:
        os.kill(os.getpid(), number)
    return result
setattr(place, name, calls)
sys.argv = sys.argv[5:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
IN_FINAL_VALIDATION = "lmscale.training.module", "PretrainModule.on_validation_epoch_end"
AFTER_A_JOB = "lmscale.cli.hydra_main", "_remove_if_empty"
WHILE_CHECKING = "lmscale.training.resolve", "check_loads"
WHILE_STARTING_RANKS = "lmscale.runtime.launch", "bound_compile_workers"


@pytest.mark.parametrize(
    ("place", "number", "call", "code", "tp_size"),
    [
        pytest.param(IN_FINAL_VALIDATION, signal.SIGTERM, 2, 75, 1, id="final validation"),
        pytest.param(AFTER_A_JOB, signal.SIGTERM, 1, 75, 1, id="between jobs"),
        pytest.param(AFTER_A_JOB, signal.SIGINT, 1, 130, 1, id="Ctrl-C between jobs"),
        pytest.param(WHILE_CHECKING, signal.SIGTERM, 4, 75, 1, id="start of the second job"),
        pytest.param(WHILE_CHECKING, signal.SIGINT, 4, 130, 1, id="Ctrl-C at the start of the second job"),
        pytest.param(WHILE_STARTING_RANKS, signal.SIGTERM, 2, 75, 2, id="start of the second job's ranks"),
    ],
)
def test_a_signal_ends_the_sweep_with_the_line_that_continues_it(tmp_path, place, number, call, code, tp_size) -> None:
    script, folder = str(REPOSITORY / "src" / "train.py"), f"hydra.sweep.dir={tmp_path / 'sweep'}"
    tiny = *TINY, f"parallel.tp_size={tp_size}"
    command = [sys.executable, "-c", SIGNALLED, *place, str(int(number)), str(call), script, "-m", *tiny, "seed=1,2"]
    # A shell that starts the tests in the background makes them, and their child processes, ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    done = subprocess.run(
        [*command, folder], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200
    )
    signal.signal(signal.SIGINT, before)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and done.stdout.count("continue:") == 1
    assert (tmp_path / "sweep" / "0" / "record.json").is_file()
    assert not any((tmp_path / "sweep" / "1").glob("*"))
    last = done.stdout.splitlines()[-1]
    assert last.startswith("continue: ") and "hydra.sweep.dir=sweep resume=auto" in last and "seed=1,2" in last, last


@pytest.mark.parametrize("signalled", [False, True])
def test_two_tasks_of_srun_run_a_sweep_and_a_signal_to_one_ends_both(tmp_path, signalled) -> None:
    (port,) = map(str, free_ports())
    words = ["src/train.py", "-m", *TINY, "seed=1,2", "parallel.tp_size=2", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    stopped = ["-c", SIGNALLED, *IN_FINAL_VALIDATION, str(int(signal.SIGTERM)), "2", *words]
    tasks = []
    for rank, arguments in enumerate([words, stopped if signalled else words]):
        options = {"env": environment(**slurm_task(rank, port)), "cwd": REPOSITORY, "text": True}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        tasks.append(subprocess.Popen([sys.executable, *arguments], **options, **pipes))
    try:
        (first, error), (second, _) = [task.communicate(timeout=200) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert [task.returncode for task in tasks] == [75 if signalled else 0] * 2, error
    assert len(list((tmp_path / "sweep").glob("*/record.json"))) == (1 if signalled else 2)
    assert ("continue: start the same ranks" in first) == signalled
    assert "table:" not in second and ("table:" in first) != signalled
