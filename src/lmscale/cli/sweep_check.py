"""The jobs of a `-m` sweep, checked before the first one starts."""

from pathlib import Path
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from .conf_files import check_folder
from .errors import WANTS_TRACEBACK, exit_with
from .literal import put_back


class SweepCheck(Callback):
    """A Hydra callback that checks every job of a `-m` sweep before the first one starts.

    Args:
        check: dotted path of a function of the resolved configuration (plain values, `run_dir` and `overrides` added)
            that raises ValueError if it is invalid. It is imported only for a sweep.
    """

    def __init__(self, check: str) -> None:
        self.check = check

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Compose and check each job as Hydra's basic sweeper will; exit code 2 at the first invalid one."""
        folders = {word.lstrip("+").partition("=")[0]: word for word in config.hydra.overrides.hydra}
        if "hydra.run.dir" in folders and "hydra.sweep.dir" not in folders:  # Hydra would not read it
            given = folders["hydra.run.dir"]
            exit_with(ValueError(f"`hydra.sweep.dir` must name the folder of a sweep, but only {given} is given"))
        try:
            check_folder("hydra.sweep.dir", config.hydra.sweep.dir)
        except ValueError as error:
            exit_with(error)
        if not config.hydra.sweeper._target_.endswith("BasicSweeper"):
            return  # a searching sweeper chooses its jobs as it runs
        swept = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        check, loader = hydra.utils.get_method(self.check), GlobalHydra.instance().hydra.config_loader
        parser = OverridesParser.create(loader)
        jobs = BasicSweeper.split_arguments(parser.parse_overrides([*swept, *config.hydra.overrides.task]), None)[0]
        job_of: dict[Path, int] = {}
        for number, overrides in enumerate(jobs):
            try:
                job = loader.load_sweep_config(config, list(overrides))
                with read_write(job), open_dict(job):
                    job.hydra.job.num = number
                    run_dir = Path(config.hydra.sweep.dir, job.hydra.sweep.subdir).absolute()
                    del job["hydra"]
                if "${" in str(run_dir):  # a job would refuse it after Hydra has written multirun.yaml
                    raise ValueError(f"`hydra.sweep.dir` must not have ${{ in it, but is {run_dir}")
                if job_of.setdefault(run_dir, number) != number:
                    raise ValueError(
                        "`hydra.sweep.subdir` must give each job a folder of its own, but that of job "
                        f"{job_of[run_dir]} is the same: {run_dir}"
                    )
                values = OmegaConf.to_container(job, resolve=True, throw_on_missing=True)
                check(put_back(values | {"run_dir": str(run_dir), "overrides": list(overrides)}))
            except (ValueError, HydraException, OmegaConfBaseException) as error:
                if WANTS_TRACEBACK:
                    raise
                exit_with(error, f"job {number} of the sweep ({' '.join(overrides)}): ")
