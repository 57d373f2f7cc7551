"""One run, one JSON record: command, configuration, seed, commit, versions, hardware, and every metric with its unit.

Records are committed and read on other machines: paths are relative, and a metric that is not finite is valid JSON,
`{"value": null, "non_finite": "nan", "unit": ...}`. All tables are generated from records.
"""

import hashlib
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentTypeError
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from .config.checks import expand_home
from .runtime.machine import cpu_model, describe_cpu, usable_cores
from .shared_files import write_atomically

RECORD, METRICS, CHECKPOINTS = "record.json", "metrics.csv", "checkpoints"  # in a run folder
RECORD_VERSION = 1
_STARTED = time.time()  # of the process, which imports this module with its first ones
KINDS = ("run", "scaled_down", "modelled")
PACKAGES = (
    "lmscale",
    "torch",
    "lightning",
    "hydra-core",
    "omegaconf",
    "transformers",
    "tokenizers",
    "datasets",
    "safetensors",
    "numpy",
)
# An absolute path in an override, which may hold several: data.path={/a/b: 1, /a/c: 2}
_PATH = re.compile(r"""(?:(?<=[=:,{\["'])|(?<=[:,] ))/(?!/)[^:,{}\[\]"']*""")


def new_record(
    name: str,
    kind: str,
    config: dict,
    seed: int | None,
    metrics: dict[str, dict[str, Any]],
    *,
    device: str | None = None,
    layout: dict[str, int] | None = None,
    steps: list[int] | None = None,
    started: float | None = None,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the record of one run for `write_record`.

    Args:
        name: short name of the run.
        kind: `run` (a run as described in the paper, or a measurement of our own such as a benchmark), `scaled_down` (a
            smaller form of one of the paper's), or `modelled` (computed, nothing was run).
        config: the run's whole configuration as plain values.
        seed: None for `modelled`.
        metrics: name -> {"value": number, "unit": text}.
        device: name of the device as reported by its library.
        layout: `Layout.sizes`, and threads_per_rank.
        steps: first and last optimizer step of this part of the run.
        started: seconds since the epoch; None: when the process started, for what was measured.
        settings: of the framework for the device; None on a CPU.

    Raises:
        ValueError: the kind is unknown, or a metric is not a number with a unit.
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` of a record must be one of {', '.join(KINDS)}, but is {kind!r}")
    if started is None and kind != "modelled":
        started = _STARTED
    now = datetime.now(UTC)
    return {
        "record_version": RECORD_VERSION,
        "name": name,
        "kind": kind,
        "command": _command(),
        "seed": seed,
        "started": None if started is None else datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        "finished": now.isoformat(timespec="seconds"),
        "steps": steps,
        "layout": layout,
        "metrics": {metric: checked_metric(metric, entry) for metric, entry in metrics.items()},
        "paths": {},  # a field of record version 1 that nothing fills
        "environment": collect_environment(device) | ({} if settings is None else {"settings": settings}),
        "config": _portable(config),
    }


def collect_environment(device: str | None = None) -> dict[str, Any]:
    """Describe code, versions and hardware of this process.

    Args:
        device: name of the accelerator; passed in because this module does not import torch.

    Returns:
        commit (None outside a checkout of this project) and whether tracked files differ from it; versions of PACKAGES
        (None if not installed); Python, platform, CPU (see `describe_cpu`), available cores, memory in bytes.
    """
    commit, dirty = _commit()
    return {
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cpu_details": describe_cpu(),
        "num_cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": device,
    }


def record_path(path: str | Path) -> Path:
    """Check the path of a record before anything is measured, and create its folder.

    Raises:
        ValueError: the path is a folder, or its folder cannot be created or written.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"`record` must be a file, but {path} is a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"`record` must be in a folder that can be made and written, but {path}: {error}") from None
    return path


def path_argument(text: str, checked: Callable[[Path], Path] = Path) -> Path:
    """The argparse type of a path, in which `~` is the home folder, as in keys.

    Raises:
        ArgumentTypeError: as `expand_home` and `checked`; argparse would not show the message of a ValueError.
    """
    try:
        return checked(Path(expand_home(text, "path")))
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def existing_path(text: str) -> Path:
    """The argparse type of a path that a script reads.

    Raises:
        ArgumentTypeError: there is nothing, or as `path_argument`.
    """
    path = path_argument(text)
    if not path.exists():
        raise ArgumentTypeError(f"must exist, but {path} does not")
    return path


def record_argument(text: str) -> Path:
    """`record_path` as the argparse type of a script's `--record`.

    Raises:
        ArgumentTypeError: as `path_argument`.
    """
    return path_argument(text, record_path)


def write_record(record: dict[str, Any], path: str | Path) -> None:
    """Write a record atomically.

    Raises:
        ValueError: a number outside the metrics is not finite, which JSON cannot represent.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    write_atomically(path, text.encode())


def report(record: dict[str, Any], path: str | Path | None = None) -> None:
    """Print the metrics of a measurement, and write its record if there is a path for it."""
    for name, entry in record["metrics"].items():
        value = entry["non_finite"] if entry["value"] is None else f"{entry['value']:.6g}"
        print(f"{name:<44} {value:>12} {entry['unit']}", flush=True)
    if path is not None:
        write_record(record, path)
        print(f"record: {path}")


def check_no_record(folder: str | Path) -> None:
    """Check that a run folder has no record, which the run would overwrite.

    Raises:
        ValueError: the run folder holds the record of another run.
    """
    if (Path(folder) / RECORD).exists():
        raise ValueError(f"`hydra.run.dir` must be a folder without the record of another run, but {folder} has one")


def read_record(path: str | Path) -> dict[str, Any]:
    """Read one record.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be a record, but fails with {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path} must be a record, but is {str(record)[:40]}")
    return record


def validation_set(record: dict[str, Any]) -> str:
    """Name what a pretraining run's validation loss is a mean over: losses are comparable only if the names are equal.

    The name ends in a hash of the family, the samples, the text and the tokenizer.

    Raises:
        KeyError, TypeError, ValueError: the record does not describe a validation set.
    """
    config = record["config"]
    data, corpus, family = config["data"], config["corpus"], config["model"]["architecture"]
    held_out = corpus["validation"]
    samples = [data.get(key) for key in ("seq_length", "short_seq_probability", "mask_probability", "max_ngram")]
    samples.append(config.get("trainer", {}).get("num_validation_samples"))
    facts = json.dumps([family, samples, held_out, corpus.get("tokenizer")])
    size = f"{held_out['tokens']:,} validation tokens in sequences of {data['seq_length']:d}"
    return f"{family:s}, {size}, set {hashlib.sha256(facts.encode()).hexdigest()[:6]}"


def checked_metric(metric: str, entry: dict[str, Any]) -> dict[str, Any]:
    """A metric as a record has it.

    Raises:
        ValueError: it is not a number with a unit.
    """
    value, unit = (entry.get("value"), entry.get("unit")) if isinstance(entry, dict) else (entry, None)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isinstance(unit, str):
        raise ValueError(f"metric `{metric}` must be a number with a unit, but is {entry!r}")
    if math.isfinite(value):
        return {"value": value, "unit": unit}
    return {"value": None, "non_finite": str(value), "unit": unit}


def _portable(value: Any) -> Any:
    """Make absolute paths relative to the working directory or `~`, or reduce them to `.../<last part>`."""
    if isinstance(value, dict):
        names = [_portable(str(key)) for key in value]
        numbered = [f"{name} ({number})" for number, name in enumerate(names, 1)]
        once = [name if names.count(name) == 1 else own for name, own in zip(names, numbered, strict=True)]
        names = once if len(set(once)) == len(names) else numbered  # a key may end like a number
        return dict(zip(names, map(_portable, value.values()), strict=True))
    if isinstance(value, (list, tuple)):
        return [_portable(item) for item in value]
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str) or "\n" in value:
        return value
    return _portable_path(value) if value.startswith("/") else _PATH.sub(lambda path: _portable_path(path[0]), value)


def _portable_path(path: str) -> str:
    home = Path(os.path.expanduser("~"))  # Path.home() raises for a user without a name and HOME, as in a container
    for root, label in ((Path.cwd(), ""), (home, "~/")):
        if root != Path("/") and Path(path).is_relative_to(root):
            return label + Path(path).relative_to(root).as_posix()
    return f".../{Path(path).name}"


def _command() -> str:
    """Return the command of this process: its script, relative to the checkout if it is in one, and its arguments."""
    script, checkout = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parents[2]
    name = script.relative_to(checkout).as_posix() if script.is_relative_to(checkout) else script.name
    return shlex.join(["python", name, *_portable(sys.argv[1:])])


def _commit() -> tuple[str | None, bool | None]:
    """Return the commit of this package's checkout, and whether tracked files differ from it."""
    package = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        # A virtual environment inside another repository is not a checkout of this project.
        if Path(git("rev-parse", "--show-toplevel")) / "src" / "lmscale" != package:
            return None, None
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
