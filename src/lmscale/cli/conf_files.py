"""The files of `conf/`, and the resolvers that they use, which the import registers."""

import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

CONF = Path(__file__).resolve().parents[3] / "conf"


def look_up(name: str, table: dict, *, _root_: DictConfig) -> Any:
    """`${look_up:NAME,TABLE}` in a file of `conf/`: the table's entry for the value of the key NAME.

    Raises:
        ValueError: the table has no entry for the value.
    """
    value = OmegaConf.select(_root_, name)
    if value not in table:
        raise ValueError(f"`{name}` must be one of {', '.join(map(str, table))}, but is {value!r}")
    return table[value]


def entry_point() -> str:
    """The name of this entry point's file and folder in `conf/`."""
    script = Path(sys.argv[0]).resolve()
    return script.parent.name if script.name == "run.py" else script.stem


def files_of(group: str) -> list[Path]:
    """The choices of a group, shared or specific to this entry point."""
    folders = (CONF / group, CONF / entry_point() / group) if group else ()
    return sorted(path for folder in folders for path in folder.glob("*.yaml"))


def groups_of(entry_point: str) -> str:
    """`${groups_of:train}` in `hydra.searchpath`: the folder of groups specific to an entry point."""
    return f"file://{CONF / entry_point}"


def check_folder(key: str, folder: str) -> None:
    """Refuse a value of `hydra.run.dir` or `hydra.sweep.dir` that Hydra would take as it is.

    Raises:
        ValueError: it is empty, as of a variable of the shell that is not set, or has a `~` that a file gives.
    """
    if not folder:
        raise ValueError(f"`{key}` must name a folder, but is empty")
    if folder.startswith("~"):
        raise ValueError(f"`{key}` must be given with ${{oc.env:HOME}} in a file, but is {folder}")


OmegaConf.register_new_resolver("look_up", look_up, replace=True)
OmegaConf.register_new_resolver("groups_of", groups_of, replace=True)
