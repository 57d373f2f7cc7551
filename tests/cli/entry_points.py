"""Entry scripts in fresh processes, as a user starts them, and in this one, for commands that are refused."""

import contextlib
import io
import logging
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import warm
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from lmscale.cli import hydra_main, literal

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = (
    "model.num_layers=1",
    "model.hidden_size=32",
    "data.seq_length=32",
    "tokenizer.vocab_size=400",
    "trainer.max_steps=3",
    "trainer.num_validation_samples=4",
    "trainer.validate_every_steps=0",
    "trainer.num_threads=1",
    "trainer.progress_bar=false",
    "logger.tensorboard=false",
    "micro_batch_size=2",
    "global_batch_size=4",
)


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without variables set by other launchers."""
    prefixes = ("TORCHELASTIC", "SLURM_", "OMPI_", "PMI_", "PL_TRAINER_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    return kept | changes


def train(*overrides: str, launcher: tuple[str, ...] = (), **changes: str) -> subprocess.CompletedProcess:
    """Run `python src/train.py OVERRIDES` from the root of the checkout and capture its output."""
    if not launcher and "PYTHONPATH" not in changes:
        script = str(REPOSITORY / "src" / "train.py")
        return warm.run([script, *overrides], REPOSITORY, environment(**changes), timeout=300)
    command = [sys.executable, *launcher, str(REPOSITORY / "src" / "train.py"), *overrides]
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment(**changes), capture_output=True, text=True, timeout=300
    )


def refuse(script: str | Path, *overrides: str, cwd: Path = REPOSITORY, **changes: str) -> subprocess.CompletedProcess:
    """Run a command that ends before ranks start in this process, and capture its output.

    Output of libraries that keep their own reference to standard error is not captured.
    """
    out, err, handlers, code = io.StringIO(), io.StringIO(), logging.root.handlers[:], 0
    find_mode = Hydra.get_mode

    def mode_of(self: Hydra, config_name: str | None, overrides: list[str]) -> object:
        """Hydra composes everything twice, first only to find `hydra.mode`, which few choices set."""
        sets_mode = any(word.startswith(("sweep=", "experiment=", "hydra.mode=")) for word in overrides)
        return find_mode(self, config_name, overrides) if sets_mode else None

    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, environment(**changes), clear=True),
        mock.patch.object(sys, "argv", [str(script), *overrides]),
        mock.patch.object(sys, "path", [str(Path(script).parent), *sys.path]),
        mock.patch.object(hydra_main, "_task_is_running", False),
        mock.patch.object(hydra_main, "_failed", {}),
        mock.patch.object(literal, "_texts", {}),
        mock.patch.object(Hydra, "get_mode", mode_of),
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        finally:
            GlobalHydra.instance().clear()
            HydraConfig.instance().cfg = None
            logging.root.handlers[:] = handlers
    return subprocess.CompletedProcess([str(script), *overrides], code, out.getvalue(), err.getvalue())


def only_line(stderr: str) -> str:
    """The line `error: ...` that standard error consists of."""
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def slurm_task(rank: int, port: str) -> dict[str, str]:
    """The environment of one of two tasks of `srun`."""
    return {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "study",
        "SLURM_NODELIST": "localhost",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def start(*overrides: str, **changes: str) -> subprocess.Popen:
    """Start the same in its own process group without waiting."""
    return subprocess.Popen(
        [sys.executable, str(REPOSITORY / "src" / "train.py"), *overrides],
        cwd=REPOSITORY,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
