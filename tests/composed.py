"""What an entry point's configuration composes to."""

import copy
import functools
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lmscale.config.pretrain import RunConfig

CONF = Path(__file__).resolve().parents[1] / "conf"


@functools.cache
def _composed(entry_point: str, overrides: tuple[str, ...], complete: bool) -> dict:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        values = compose(entry_point, list(overrides))
    return OmegaConf.to_container(values, resolve=True, throw_on_missing=complete)


def composed(entry_point: str, *overrides: str, complete: bool = True) -> dict:
    """Plain values, as the entry point's task gets them.

    Args:
        complete: whether a missing value raises.
    """
    return copy.deepcopy(_composed(entry_point, overrides, complete))


def composed_run(*overrides: str, run_dir: Path | str = "/somewhere") -> RunConfig:
    """The typed configuration of a pretraining."""
    return RunConfig.from_dict(composed("train", *overrides) | {"run_dir": str(run_dir)})
