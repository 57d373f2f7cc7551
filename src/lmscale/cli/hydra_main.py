"""Run an entry point's Hydra main function: configuration in, one line and an exit code out.

Exit codes: 0 done; 2 the configuration is invalid (nothing was started); 128 + n ended by signal n, also where what
reads the output has closed it (SIGPIPE); those of ranks are in `runtime/exit_codes.py`.
"""

import atexit
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..config.checks import expand_home
from ..output import escape_unknown_letters
from ..runtime import world
from ..runtime.exit_codes import DIVERGED, FAILED, STALLED, USER_ERROR
from ..runtime.world import is_first_rank
from . import ctrl_c
from . import literal as literal_values
from .conf_files import CONF, check_folder, entry_point
from .errors import WANTS_TRACEBACK, end_without_reader, exit_with
from .help import help_text

_task_is_running = False
_failed: dict[str, int] = {}  # exit codes of the jobs of a sweep that has gone on, by their names


def run_hydra_main(
    job: Callable[[DictConfig], Any],
    literal: Collection[str] = (),
    joins_ranks: bool = False,
    before: Callable[[], None] | None = None,
) -> None:
    """Run a job, or each of a sweep, by Hydra; mistakes in overrides and configuration become `error: ...` and exit
    code 2.

    HYDRA_FULL_ERROR=1 in the environment shows the traceback instead.

    Args:
        job: of the script, by whose file Hydra names it; a searching sweeper takes what it returns.
        literal: keys whose value is any text, taken literally: with commas, quotes, brackets, `=`, `$`, line
            ends, or as `null`.
        joins_ranks: whether the entry point joins the ranks that a launcher has started; the others run in any job.
        before: called after the options are in order and before Hydra reads them.
    """
    _open_closed_streams()
    escape_unknown_letters()
    literal_values.set_aside(literal)
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # else a first run prints that it found fonts
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing its own message
    try:
        _check_decoded()
        _put_options_last()
        _expand_home()
        if joins_ranks:
            _use_temporary_folders_on_other_ranks()
        if {"--help", "-h"} & set(sys.argv[1:]):
            print(help_text(), flush=True)
        else:
            if before is not None:
                before()
            hydra.main(version_base="1.3", config_path=str(CONF), config_name=entry_point())(job)()
        sys.stdout.flush()
        if _failed:
            names = "; ".join(name.removesuffix(": ") for name in _failed)
            print(f"error: {len(_failed)} job{'s' * (len(_failed) > 1)} failed: {names}", file=sys.stderr, flush=True)
            sys.exit(next(iter(_failed.values())))
    except KeyboardInterrupt:
        ctrl_c.leave()
        print("stopped by SIGINT", file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        end_without_reader()
    # Before the task runs, Hydra raises errors of every kind: assertions, TypeErrors, OSErrors for its folder.
    except Exception as error:
        if WANTS_TRACEBACK or _task_is_running:
            raise
        exit_with(error)


def run_task(
    task: Callable[[dict], None],
    cfg: DictConfig,
    then: Callable[[dict], str] | None = None,
    if_stopped: Callable[[], str] | None = None,
    goes_on: bool = False,
) -> None:
    """Give `task` the resolved configuration as plain values, with `run_dir` and `overrides` added.

    However a started task ends, rank 0 prints what `then` says of the same values: the next commands. Where a signal
    ends a sweep, in a job or between two, it prints what `if_stopped` has said as the last job started.

    A ValueError is the user's mistake. It ends the process here, because Hydra would add its own lines to an exception
    that passes through it. With `goes_on` a sweep of this process goes on after a job that fails, and the command ends
    with the exit code of the first one.
    """
    global _task_is_running
    hydra_config = HydraConfig.get()
    try:
        _run_task(task, cfg, hydra_config, then, if_stopped)
    except SystemExit as ended:
        is_own = goes_on and hydra_config.mode == RunMode.MULTIRUN and world.world_from_outside() is None
        if not is_own or world.asked_to_stop or ended.code not in (FAILED, USER_ERROR, DIVERGED, STALLED):
            raise
        _failed[_name_of_job(hydra_config)] = ended.code
        _task_is_running = False


def _run_task(
    task: Callable[[dict], None],
    cfg: DictConfig,
    hydra_config: DictConfig,
    then: Callable[[dict], str] | None,
    if_stopped: Callable[[], str] | None,
) -> None:
    global _task_is_running
    folder = OmegaConf.to_container(hydra_config.runtime, resolve=False)["output_dir"]  # as Hydra has created it
    ctrl_c.before_exit[:] = [partial(_remove_if_empty, Path(folder))]
    try:
        group = "sweep" if hydra_config.mode == RunMode.MULTIRUN else "run"  # that names the folder
        if "${" in folder:
            raise ValueError(f"`hydra.{group}.dir` must not have ${{ in it, but is {folder}")
        check_folder(f"hydra.{group}.dir", hydra_config[group].dir)
        values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        values["run_dir"] = str(Path(folder).absolute())
        values["overrides"] = list(hydra_config.overrides.task)
        values = literal_values.put_back(values)
        resume = values.get("resume")  # a group, or its `path` alone
        if (resume.get("path") if isinstance(resume, dict) else resume) == "auto":
            _require_named_folder(group, folder)
        _task_is_running = True
        is_sweep = group == "sweep"
        if is_sweep and if_stopped is not None and is_first_rank():
            ctrl_c.before_exit.append(partial(print, if_stopped(), flush=True))
        try:
            task(values)
        finally:
            error = sys.exception()
            refused = isinstance(error, ValueError) or (isinstance(error, SystemExit) and error.code == USER_ERROR)
            if world.asked_to_stop and is_sweep:
                ctrl_c.leave()
            elif then is not None and not refused and is_first_rank():
                lines = then(values)
                print(lines, end="\n" if lines else "", flush=True)
        sys.stdout.flush()
        if world.asked_to_stop and is_sweep:  # and this job had nothing left to stop
            sys.exit(os.EX_TEMPFAIL)
        _task_is_running = False
    except BrokenPipeError:
        end_without_reader()
    except (ValueError, OmegaConfBaseException) as error:
        if WANTS_TRACEBACK:
            raise
        exit_with(error, _name_of_job(hydra_config))
    finally:
        _remove_if_empty(Path(folder))


def _check_decoded() -> None:
    """Refuse an argument with bytes that Python could not decode: TensorBoard and safetensors take no such path.

    Raises:
        ValueError: there is one.
    """
    for argument in sys.argv[1:]:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"an argument must be text in the locale's encoding, {sys.getfilesystemencoding()} "
                f"(LC_ALL=C.UTF-8 sets UTF-8), but is {argument!r}"
            ) from None


def _put_options_last() -> None:
    """Put Hydra's options after all overrides: its parser does not accept them between overrides.

    Raises:
        ValueError: an option that Hydra does not have, or a wrong value; its own message would be its usage.
    """

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"the options must be Hydra's (--hydra-help), but {message}")

    parser = get_args_parser()
    parser.error = refuse
    known, others = parser.parse_known_args()
    unknown = [arg for arg in others if arg.startswith("-")]
    if unknown:
        key = unknown[0].lstrip("-").partition("=")[0]
        raise ValueError(f"keys are given without dashes, as in {key}=VALUE, but there is {unknown[0]}; see --help")
    overrides, options = known.overrides + others, sys.argv[1:]
    for override in overrides:
        options.remove(override)
    sys.argv[1:] = overrides + options


def _expand_home() -> None:
    """Expand `~` where a value or an item of a list begins with it, as a shell does for a whole word.

    Hydra's grammar refuses it without quotes, and Hydra makes its folders before `from_dict` could expand them.
    """

    def expand(word: str) -> str:
        key, equals, value = word.partition("=")
        quote = "[\"']?" if key.startswith("hydra.") else ""  # other quoted values may be texts
        pattern = rf"((?:^|[,\[{{]) *{quote})(~[^/,:\]}}\"']*)"
        return key + equals + re.sub(pattern, lambda found: found[1] + expand_home(found[2], key), value)

    sys.argv[1:] = map(expand, sys.argv[1:])


def hydra_files(cfg: DictConfig) -> dict[str, str]:
    """The three files that Hydra would write into `.hydra` before our checks, texts by path.

    With `hydra.output_subdir=null` Hydra writes none, so a refused command does not overwrite those of an earlier run.
    """
    settings = OmegaConf.masked_copy(HydraConfig.instance().cfg, "hydra")
    contents = {"config": cfg, "hydra": settings, "overrides": HydraConfig.get().overrides.task}
    return {f".hydra/{name}.yaml": OmegaConf.to_yaml(content) for name, content in contents.items()}


def _require_named_folder(group: str, folder: str) -> None:
    """Refuse a `folder` whose name has the time of the start, as it has by default: no earlier run can be in it."""
    if "${now:" in OmegaConf.to_container(HydraConfig.instance().cfg.hydra[group], resolve=False)["dir"]:
        raise ValueError(
            f"`hydra.{group}.dir` must be the folder of the run to continue with resume=auto, but every start has "
            f"a new one: {folder}"
        )


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that was closed at the start, as by `>&-`, for the ranks too."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # it takes the descriptor that is closed
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _remove_if_empty(folder: Path) -> None:
    """Remove the run folder that Hydra created and those around it in the working directory, while they are empty."""
    here = Path.cwd()
    for each in (folder, *folder.parents):
        if each == here or (each != folder and here not in each.parents):
            return
        try:
            each.rmdir()
        except FileNotFoundError:  # by the run itself
            continue
        except OSError:
            return


def _name_of_job(hydra_config: DictConfig) -> str:
    """For messages: the job of a sweep; empty outside a sweep."""
    if hydra_config.mode != RunMode.MULTIRUN:
        return ""
    return f"job {hydra_config.job.num} of the sweep ({' '.join(hydra_config.overrides.task)}): "


def _use_temporary_folders_on_other_ranks() -> None:
    """Under torchrun or srun only rank 0 creates a run folder; otherwise each rank would name one by its own clock."""
    if not is_first_rank() and not any(arg.startswith(("hydra.run.dir=", "hydra.sweep.dir=")) for arg in sys.argv):
        folder = tempfile.mkdtemp(prefix="lmscale_rank_")  # no earlier run is in it
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        sys.argv[1:1] = [f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}"]
