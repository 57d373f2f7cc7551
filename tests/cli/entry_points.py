"""Entry scripts in fresh processes, as a user starts them."""

import os
import subprocess
import sys
from pathlib import Path

import warm

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
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "SLURM_"))}
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
