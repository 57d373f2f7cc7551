"""What every entry script does around its work: Hydra in, one line and an exit code out.

Exit codes: 0 done; 2 the configuration cannot work (nothing was started); 128 + n ended by signal n; those of
training are in `training/runtime/launch.py`.
"""

import atexit
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

USER_ERROR = 2
_CONF = Path(__file__).resolve().parents[3] / "conf"
_WANTS_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")  # before `open_door` sets it for Hydra
_task_is_running = False
_literals: dict[str, str] = {}  # texts of the command line by what Hydra reads in their place


def look_up(name: str, table: Mapping[Any, Any], *, _root_: DictConfig) -> Any:
    """`${look_up:NAME,TABLE}` in a file of `conf/`: what a table says for the value of the key of this dotted name.

    Raises:
        ValueError: the table does not know the value.
    """
    value = OmegaConf.select(_root_, name)
    if value not in table:
        raise ValueError(f"`{name}` must be one of {', '.join(map(str, table))}, but is {value!r}")
    return table[value]


OmegaConf.register_new_resolver("look_up", look_up, replace=True)


def open_door(main: Callable[[], None], short: Mapping[str, str] | None = None, literal: Collection[str] = ()) -> None:
    """Run a `@hydra.main` function; mistakes in overrides and configuration become `error: ...` and exit code 2.

    HYDRA_FULL_ERROR=1 in the environment shows the traceback instead.

    Args:
        short: groups that may be given a value (`resume=auto`), with the key it is short for (`resume.path`). Hydra
            would put the value in the group's place.
        literal: keys whose value is any text and is taken as it stands: with commas, quotes, brackets, `=`, `$`, line
            ends, or as `null`. Neither Hydra's grammar nor OmegaConf's (`${`, `???`) gets to see it.
    """
    _keep_quiet_on_other_ranks()
    for group, key in (short or {}).items():
        sys.argv[1:] = [re.sub(f"^{group}=", f"{key}=", arg) for arg in sys.argv[1:]]
    _set_aside(literal)
    # Hydra's parser takes -m only before or after all overrides; a sweep is easily written with it in the middle.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda arg: arg not in ("-m", "--multirun"))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing its own account
    try:
        main()
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGINT)
    # Before the task runs, Hydra raises errors of every kind: assertions, TypeErrors, OSErrors for its folder.
    except Exception as error:
        if _WANTS_TRACEBACK or _task_is_running:
            raise
        _exit(error)


def run_task(task: Callable[[dict], None], cfg: DictConfig) -> None:
    """Give `task` the resolved configuration as plain values, with `run_dir` and `overrides` added.

    A ValueError is the user's mistake. It ends the process here, because Hydra would print lines of its own around an
    exception that passes through it.
    """
    global _task_is_running
    hydra_config = HydraConfig.get()
    try:
        values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        values["run_dir"] = str(Path(hydra_config.runtime.output_dir).absolute())
        values["overrides"] = list(hydra_config.overrides.task)
        values = _put_back(values)
        _task_is_running = True
        task(values)
        _task_is_running = False
    except (ValueError, OmegaConfBaseException) as error:
        if _WANTS_TRACEBACK:
            raise
        _exit(error, _name_of_job(hydra_config))


def hydra_files(cfg: DictConfig) -> dict[str, str]:
    """The three files that Hydra would write into `.hydra` before any check of ours, texts by path.

    With `hydra.output_subdir=null` Hydra writes none, and a command that is refused leaves those of an earlier run.
    """
    settings = OmegaConf.masked_copy(HydraConfig.instance().cfg, "hydra")
    contents = {"config": cfg, "hydra": settings, "overrides": HydraConfig.get().overrides.task}
    return {f".hydra/{name}.yaml": OmegaConf.to_yaml(content) for name, content in contents.items()}


class SweepCheck(Callback):
    """Hydra's callback that tries every job of a `-m` sweep on `build` before the first one starts.

    Args:
        check: dotted path of a function of the resolved configuration (plain values, `run_dir` and `overrides` added)
            that raises ValueError where it cannot work. It is imported for a sweep only.
    """

    def __init__(self, check: str) -> None:
        self.check = check

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Compose and check each job as Hydra's basic sweeper will; exit code 2 at the first that cannot work."""
        if not config.hydra.sweeper._target_.endswith("BasicSweeper"):
            return  # a searching sweeper makes up its jobs as it goes
        swept = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        check, loader = hydra.utils.get_method(self.check), GlobalHydra.instance().hydra.config_loader
        parser = OverridesParser.create(loader)
        jobs = BasicSweeper.split_arguments(parser.parse_overrides([*swept, *config.hydra.overrides.task]), None)[0]
        for number, overrides in enumerate(jobs):
            try:
                job = loader.load_sweep_config(config, list(overrides))
                with read_write(job), open_dict(job):
                    job.hydra.job.num = number
                    run_dir = Path(config.hydra.sweep.dir, job.hydra.sweep.subdir).absolute()
                    del job["hydra"]
                values = OmegaConf.to_container(job, resolve=True, throw_on_missing=True)
                check(_put_back(values | {"run_dir": str(run_dir), "overrides": list(overrides)}))
            except (ValueError, HydraException, OmegaConfBaseException) as error:
                if _WANTS_TRACEBACK:
                    raise
                _exit(error, f"job {number} of the sweep ({' '.join(overrides)}): ")


def _set_aside(keys: Collection[str]) -> None:
    for i, arg in enumerate(sys.argv):
        key, equals, text = arg.partition("=")
        if equals and key in keys:
            stand_in = f"__literal_{i}__"
            sys.argv[i], _literals[stand_in] = f"{key}={stand_in}", text


def _put_back(value: Any) -> Any:
    """`value` with the texts that `_set_aside` took, in overrides too."""
    if isinstance(value, dict):
        return {key: _put_back(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_put_back(item) for item in value]
    if not isinstance(value, str) or not _literals:
        return value
    key, equals, text = value.rpartition("=")
    return key + equals + _literals.get(text, text)


def _name_of_job(hydra_config: DictConfig) -> str:
    """For messages: which job of a sweep this is; empty outside one."""
    if hydra_config.mode != RunMode.MULTIRUN:
        return ""
    return f"job {hydra_config.job.num} of the sweep ({' '.join(hydra_config.overrides.task)}): "


def _keep_quiet_on_other_ranks() -> None:
    """Under torchrun or srun only rank 0 makes a run folder; the clocks of the ranks would give each its own."""
    rank = os.environ.get("RANK") if "TORCHELASTIC_RUN_ID" in os.environ else os.environ.get("SLURM_PROCID")
    if rank not in (None, "0") and not any(arg.startswith(("hydra.run.dir=", "hydra.sweep.dir=")) for arg in sys.argv):
        folder = tempfile.mkdtemp(prefix="lmscale_rank_")  # where no earlier run can be found
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        sys.argv += [f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}"]


def _exit(error: Exception, job: str = "") -> None:
    print(f"error: {job}{_one_line(error)}", file=sys.stderr, flush=True)
    sys.exit(USER_ERROR)


def _one_line(error: Exception) -> str:
    """The error in one line: what is wrong, the name and the value."""
    own_file = _own_file(sys.argv[1:]) if isinstance(error, MissingConfigException) else None
    if own_file is not None:
        return own_file
    if isinstance(error, MissingConfigException) and error.options:
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        choices = ", ".join(option for option in error.options if not option.startswith("base"))
        return f"`{group}` must be one of {choices}, but is {choice!r}"
    if isinstance(error, MissingMandatoryValue):
        return f"`{error.full_key}` must be given"
    if isinstance(error, OverrideParseException):
        return (
            f"an argument must be of the form key=value, with quotes around what is special, but is {error.override!r}"
        )
    text = str(error)
    of_ours = re.search(r"^ValueError raised while resolving interpolation: (`.*)$", text, re.M)
    if of_ours:
        return of_ours.group(1)
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown:
        return f"`{unknown.group(1)}` is not a known key or group of the configuration"
    if text.startswith(("Config group override must be", "Error resolving interpolation '${model}'")):
        text = _wrong_choice(sys.argv[1:]) or text
    if isinstance(error, OSError):  # Hydra makes the folder
        key = "hydra.sweep.dir" if sys.argv[1:2] in (["-m"], ["--multirun"]) else "hydra.run.dir"
        return f"`{key}` must be a folder that can be made and written, but {error.filename}: {error.strerror}"
    if not isinstance(error, (ValueError, HydraException, OmegaConfBaseException)):
        text = f"the command line cannot be used: {type(error).__name__} {text}".rstrip()
    return re.sub(r"\s+", " ", text).strip()


def _wrong_choice(overrides: list[str]) -> str | None:
    """What is wrong with the first group that is given something else than one of its choices, where there is one."""
    for override in overrides:
        group, _, choice = override.partition("=")
        choices = sorted(path.stem for path in (_CONF / group).glob("*.yaml")) if group else []
        if choices and choice.strip("'\"") not in choices:
            return f"`{group}` must be one of {', '.join(choices)}, but is {choice}"
    return None


def _own_file(overrides: list[str]) -> str | None:
    """What to type where a group whose files take one's own under `path` is given that file instead of a choice."""
    for override in overrides:
        group, _, choice = override.partition("=")
        if choice.endswith((".yaml", ".yml")) and group.isidentifier():
            files = sorted((_CONF / group).glob("*.yaml"))
            if any(f"# {group}.path=" in path.read_text(encoding="utf-8") for path in files):
                choices = ", ".join(path.stem for path in files)
                return (
                    f"`{group}` must be one of {choices}, or {group}.path=FILE for a file of your own, but is {choice}"
                )
    return None
