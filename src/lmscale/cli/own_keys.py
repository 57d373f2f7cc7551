"""`resume=auto` with the run's folder alone: the keys of the run are in its folder."""

import json
import sys
from pathlib import Path

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser

from ..runtime.world import is_first_rank
from .next_command import command

_SAY_WHAT_TO_TRAIN = {"model", "experiment", "sweep"}
_START_KEYS = ("resume.path", "resume.weights_only", "trainer.stop_after_steps")  # of one start, not of the run


def add_own_keys() -> None:
    """Complete a command line with `resume=auto` by the keys with which the run in `hydra.run.dir` was last started.

    A key on the command line precedes the run's own. One line says which keys were taken and which ones differ; what a
    checkpoint does not allow to differ is refused when it is read.

    Raises:
        ValueError: the folder's keys cannot be read or are of a finetuning; it has no run, and the command does not
            say what to train; or its run began from a checkpoint elsewhere and has none of its own.
    """
    given, _ = get_args_parser().parse_known_args()
    typed = {_name(word): word for word in given.overrides}
    resume = typed.get("resume.path", "").partition("=")[2].strip("'\"")
    if given.multirun or resume != "auto" or "hydra.run.dir" not in typed:
        return
    folder = OverridesParser.create().parse_overrides([typed["hydra.run.dir"]])[0].value()
    saved, config = Path(str(folder)) / ".hydra", Path(str(folder)) / "config.json"
    try:
        if saved.is_dir() or not config.is_file():
            words = yaml.safe_load((saved / "overrides.yaml").read_text(encoding="utf-8"))
            settings = yaml.safe_load((saved / "hydra.yaml").read_text(encoding="utf-8"))["hydra"]
            is_finetuning = settings["job"]["config_name"] == "finetune"
            sources = settings["runtime"]["config_sources"]
            folders = [source["path"] for source in sources if source["provider"] == "command-line"]
        else:  # copied without hidden files
            words, is_finetuning, folders = json.loads(config.read_text(encoding="utf-8"))["overrides"], False, []
        own = {_name(word): word for word in words if _name(word) not in _START_KEYS}
    except FileNotFoundError:  # nothing was trained in it
        if _SAY_WHAT_TO_TRAIN & typed.keys() or Path(str(folder), "checkpoints").exists():
            return
        raise ValueError(
            f"`hydra.run.dir` must be the folder of a run to continue with resume=auto, but {folder} has none; to "
            "start one in it, say what to train: model=, experiment= or sweep="
        ) from None
    except (OSError, yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the keys of the run in {folder} cannot be read: {error}") from None
    more = [word for path in folders for word in ("--config-dir", path)]
    if is_finetuning:
        again = command("finetune/run.py", *more, "hydra.mode=RUN", *words, hydra__run__dir=Path(str(folder)))
        raise ValueError(
            f"`hydra.run.dir` must be the folder of a pretraining to continue with resume=auto, but {folder} is of a "
            f"finetuning, which starts again with the command {again}"
        )
    began = next((word.partition("=")[2] for word in words if _name(word) == "resume.path"), "none")
    if began not in ("none", "auto") and not any(Path(str(folder), "checkpoints").glob("step_*.ckpt")):
        raise ValueError(
            f"`resume` must not be auto where the run in {folder} began from {began} and has no checkpoint of its own "
            f"yet; start it in another folder with resume={began}"
        )
    kept = [word for name, word in own.items() if name not in typed]
    differing = [
        f"{word} ({'was ' + own[name].partition('=')[2] if name in own else 'new'})"
        for name, word in typed.items()
        if name.partition(".")[0] not in ("hydra", "resume") and word != own.get(name)
    ]
    sys.argv[1:1] = ["hydra.mode=RUN", *kept]  # the run may be a job of a sweep
    if given.config_dir is None:
        sys.argv += more
    if (kept or differing) and is_first_rank():
        changed = f"; different here: {' '.join(differing)}" if differing else ""
        print(f"keys of the run in {folder}: {' '.join(kept) or 'all given'}{changed}", flush=True)


def _name(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]
