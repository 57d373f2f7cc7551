"""What every entry script does around its work: Hydra in, one line and an exit code out.

Exit codes: 0 done; 1 a rank failed while running; 2 the configuration cannot work (nothing was started); 128 + n ended
by signal n.
"""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

USER_ERROR = 2
_WANTS_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")  # before `open_door` sets it for Hydra


def open_door(main: Callable[[], None]) -> None:
    """Run a `@hydra.main` function; mistakes in overrides and configuration become `error: ...` and exit code 2.

    HYDRA_FULL_ERROR=1 in the environment shows the traceback instead.
    """
    _keep_quiet_on_other_ranks()
    # Hydra's parser takes -m only before or after all overrides; a sweep is easily written with it in the middle.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda arg: arg not in ("-m", "--multirun"))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing its own account
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        if _WANTS_TRACEBACK:
            raise
        _exit(error)


def run_task(task: Callable[[dict], None], cfg: DictConfig) -> None:
    """Give `task` the resolved configuration as plain values, with `run_dir` and `overrides` added.

    A ValueError is the user's mistake. It ends the process here, because Hydra would print lines of its own around an
    exception that passes through it.
    """
    try:
        values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        hydra = HydraConfig.get()
        values["run_dir"] = str(Path(hydra.runtime.output_dir).absolute())
        values["overrides"] = list(hydra.overrides.task)
        task(values)
    except (ValueError, OmegaConfBaseException) as error:
        if _WANTS_TRACEBACK:
            raise
        _exit(error)


def _keep_quiet_on_other_ranks() -> None:
    """Under torchrun or srun only rank 0 makes a run folder; the clocks of the ranks would give each its own."""
    rank = os.environ.get("RANK") if "TORCHELASTIC_RUN_ID" in os.environ else os.environ.get("SLURM_PROCID")
    if rank not in (None, "0") and not any(arg.startswith("hydra.run.dir=") for arg in sys.argv):
        sys.argv += ["hydra.run.dir=.", "hydra.output_subdir=null"]


def _exit(error: Exception) -> None:
    print(f"error: {_one_line(error)}", file=sys.stderr, flush=True)
    sys.exit(USER_ERROR)


def _one_line(error: Exception) -> str:
    """The error in one line: what is wrong, the name and the value."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        choices = ", ".join(option for option in error.options if not option.startswith("base"))
        return f"`{group}` must be one of {choices}, but is {choice!r}"
    text = str(error)
    if isinstance(error, MissingMandatoryValue):
        return f"`{error.full_key}` must be given"
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown:
        return f"`{unknown.group(1)}` is not a known key or group of the configuration"
    return re.sub(r"\s+", " ", text).strip()
