"""Runs from the command line: starting the ranks, the run folder, and exit codes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm
from entry_points import REPOSITORY, TINY, environment, refuse, slurm_task, start, train
from ranks import free_ports
from running_jobs import LONG_RUN, end, linux_only, ranks_of, wait_until
from runs import read_rows

from lmscale.checkpoint import list_checkpoints


def losses(run_dir: Path) -> list[float]:
    rows = read_rows(run_dir)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["train/loss"] for row in rows]


def run(run_dir: Path, *overrides: str, **kwargs) -> list[float]:
    done = train(*TINY, *overrides, f"hydra.run.dir={run_dir}", **kwargs)
    assert done.returncode == 0 and "deprecated" not in done.stderr, done.stderr
    return losses(run_dir)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Path, list[float]]:
    """One process, attention dropout that does not depend on the layout."""
    run_dir = tmp_path_factory.mktemp("plain")
    return run_dir, run(run_dir, "model.attention=exact")


def test_the_run_folder_has_everything(plain) -> None:
    run_dir, values = plain
    assert len(values) == 3
    record = json.loads((run_dir / "record.json").read_text())
    assert record["metrics"]["steps"]["value"] == 3
    config = json.loads((run_dir / "config.json").read_text())
    assert config["schedule"]["decay_steps"] == 3 and config["model"]["num_layers"] == 1
    assert (run_dir / ".hydra" / "config.yaml").is_file()
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["step_3.ckpt", "tokenizer"]


@pytest.mark.slow
def test_four_ranks_started_by_the_script_give_the_same_losses(plain, tmp_path) -> None:
    values = run(tmp_path, "model.attention=exact", "parallel.tp_size=2", "parallel.dp_size=2", "micro_batch_size=1")
    assert values == pytest.approx(plain[1], rel=1e-5)


@pytest.mark.slow
def test_torchrun_gives_the_same_losses_and_one_run_folder(plain) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    name = f"torchrun_{os.getpid()}"
    done = train(*TINY, "model.attention=exact", "parallel.tp_size=2", f"name={name}", launcher=launcher)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (REPOSITORY / "outputs" / name).iterdir()
    assert losses(run_dir) == pytest.approx(plain[1], rel=1e-5)
    shutil.rmtree(run_dir.parent)


@pytest.mark.slow
def test_srun_gives_the_same_losses(plain, tmp_path) -> None:
    port = str(free_ports()[0])
    overrides = (*TINY, "model.attention=exact", "parallel.tp_size=2", f"hydra.run.dir={tmp_path}")
    ranks = [start(*overrides, **slurm_task(rank, port)) for rank in range(2)]
    for process in ranks:
        _, stderr = process.communicate(timeout=200)
        assert process.returncode == 0, stderr
    assert losses(tmp_path) == pytest.approx(plain[1], rel=1e-5)


def test_resuming_on_other_data_is_refused_with_every_difference(plain, tmp_path) -> None:
    changed = (
        "global_batch_size=8",
        "seed=5",
        "data.seq_length=16",
        "tokenizer.vocab_size=390",
        "model.vocab_size=400",
    )
    words = (*changed, f"resume={plain[0]}", f"hydra.run.dir={tmp_path}")
    done = refuse(REPOSITORY / "src" / "train.py", *TINY, *words)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert (
        "seed is 5 here and 1234 there; global_batch_size is 8 here and 4 there; data.seq_length is 16" in done.stderr
    )
    assert "the corpus has other tokens" in done.stderr


def test_weights_only_starts_a_new_run_on_other_data(plain, tmp_path) -> None:
    settings = (
        "model.attention=exact",
        "global_batch_size=8",
        "seed=5",
        f"resume={plain[0]}",
        "resume.weights_only=true",
    )
    values = run(tmp_path, *settings)
    assert len(values) == 3
    before = json.loads((tmp_path / "record.json").read_text())["metrics"]["val_start/loss"]["value"]
    assert before == json.loads((plain[0] / "record.json").read_text())["metrics"]["val/loss"]["value"]


@linux_only
@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_goes_on_where_the_disk_of_its_output_is_full(tmp_path, tp_size) -> None:
    script, words = REPOSITORY / "src" / "train.py", [*TINY, f"parallel.tp_size={tp_size}", f"hydra.run.dir={tmp_path}"]
    with open("/dev/full", "w") as full:
        command = [sys.executable, str(script), *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(), stdout=full, stderr=subprocess.PIPE, timeout=200
        )
    said = b"WARNING: the disk of the output is full: going on without it\n"
    assert done.returncode == 0 and said in done.stderr, done.stderr
    assert b"Traceback" not in done.stderr
    assert list_checkpoints(tmp_path / "checkpoints") and (tmp_path / "record.json").is_file()


@linux_only
@pytest.mark.parametrize(
    ("tp_size", "times", "code"),
    [(1, 1, 75), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 2, 130), (2, 1, 75), (2, 2, 130)])],
)
def test_ctrl_c_saves_at_the_next_step_and_a_second_one_stops_at_once(tmp_path, tp_size, times, code) -> None:
    """As a terminal sends it: to the whole process group."""
    # A shell that starts the tests in the background makes them, and their child processes, ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    # A step takes minutes; so few that the corpus is not read often enough for a warning.
    steps = ("global_batch_size=4000", "compile=false", "trainer.max_steps=500") if times == 2 else ()
    process = start(*LONG_RUN, *steps, f"parallel.tp_size={tp_size}", f"hydra.run.dir={tmp_path}")
    signal.signal(signal.SIGINT, before)
    try:
        if times == 1:
            wait_until((tmp_path / "metrics.csv").is_file, process)
        else:
            while not process.stdout.readline().startswith("run folder"):
                assert process.poll() is None
            time.sleep(2)
        ranks = ranks_of(process)
        begin = time.monotonic()
        for _ in range(times):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.5)
        stdout, stderr = process.communicate(timeout=60)
        assert time.monotonic() - begin < 30
        assert process.returncode == code, stderr
        said = "\nCtrl-C: saving at the end of this step; a second Ctrl-C stops at once\n"
        assert stderr == said + ("stopped by SIGINT\n" if times == 2 else "")
        assert len(list_checkpoints(tmp_path / "checkpoints")) == (times == 1)
        assert ("stopped by SIGINT after step" in stdout) == (times == 1)
        last = f" hydra.run.dir={tmp_path} resume=auto\n"
        assert ("\ncontinue: " in stdout and stdout.endswith(last)) == (times == 1)
        assert len(ranks) == (tp_size if tp_size > 1 else 0)
        assert not [pid for pid in ranks if os.path.exists(f"/proc/{pid}")]
    finally:
        end(process)


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 1])
def test_ctrl_c_while_the_ranks_start_ends_them_with_one_line(tmp_path, seconds) -> None:
    """They cannot handle signals yet: first they start Python, then they import torch."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = start(*LONG_RUN, "parallel.tp_size=2", f"hydra.run.dir={tmp_path / 'run'}")
    signal.signal(signal.SIGINT, before)
    try:
        while len(ranks := ranks_of(process)) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
        assert (process.returncode, stdout, stderr) == (130, "", "stopped by SIGINT\n")
        assert not [pid for pid in ranks if os.path.exists(f"/proc/{pid}")]
        assert not (tmp_path / "run").exists()
    finally:
        end(process)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_python_command_of_the_documents_runs(tmp_path) -> None:
    """In order, with a tiny model, few steps and `outputs/` elsewhere; each script is started cold once. A sweep of
    several keys has the first value of all but one. Scripts of analysis/ only print their help (they have other tests);
    make targets must exist; Slurm and conda are not run."""
    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    blocks = text.replace("\\\n", " ").split("```bash\n")[1:]
    lines = [line.split("#")[0].strip() for block in blocks for line in block.split("```")[0].splitlines()]
    for name, content in re.findall(r"```yaml outputs/(\S+)\n(.*?)```", text, re.S):  # user files
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    small = [o for o in TINY if not o.startswith(("tokenizer", "data.seq", "trainer.num_validation"))] + [
        "micro_batch_size=1"
    ]
    count, started = 0, set()
    for number, line in enumerate(line for line in lines if line):
        words = line.replace("outputs/", f"{tmp_path}/").split()
        if "-m" in words:
            *several, _ = [word for word in words if "," in word] or [None]
            words = [word.split(",")[0] if word in several else word for word in words]
        if words[0] == "make":
            assert f"\n{words[1]}:" in makefile, line
            continue
        if words[0] not in ("python", "torchrun"):
            continue
        given = {word.split("=")[0] for word in words}
        more = []
        if words[1].startswith("analysis/"):
            more = ["--help"]
        elif "src/train.py" in words:
            more = [o for o in small if o.split("=")[0] not in given]
            if not given & {"hydra.run.dir", "hydra.sweep.dir"}:
                more.append(f"hydra.{'sweep' if '-m' in words else 'run'}.dir={tmp_path}/{number}")
        elif "finetune/run.py" in words:
            more = [o for o in ("trainer.num_epochs=1", "trainer.max_train_examples=8") if o.split("=")[0] not in given]
        module = ["-m", "torch.distributed.run", "--standalone"] if words[0] == "torchrun" else []
        script = words[1]
        if words[0] == "python" and (more == ["--help"] or script in started):
            # The help first: a path that another script of analysis/ would have written must exist.
            arguments = [*more, *words[2:]] if more == ["--help"] else [*words[2:], *more]
            done = warm.run([str(REPOSITORY / script), *arguments], REPOSITORY, environment(), timeout=300)
        else:
            started.add(script)
            command = [sys.executable, *module, *words[1:], *more]
            done = subprocess.run(
                command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300
            )
        assert done.returncode == 0, (line, done.stderr)
        count += 1
    assert count >= 30
