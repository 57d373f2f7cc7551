"""The commands to type after a run: evaluate, export, plot, or continue it."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from ..config.family import family_of
from ..config.plan import PlanConfig
from ..config.pretrain import RunConfig
from ..results import CHECKPOINTS, RECORD, read_record
from ..runtime.world import world_from_outside
from .conf_files import CONF

ROOT = CONF.parent
GRID = ("parallel", *(f"parallel.{name}" for name in ("tp_size", "pp_size", "dp_size", "zero1", "batch_halves")))
_PLAIN = re.compile(r"[\w./\-+:@%?*]+", re.ASCII)  # what the grammar of Hydra takes without quotes


def command(script: str, *arguments: str, **keys: str | Path) -> str:
    """A command line that a shell in the working directory runs as it is printed.

    Args:
        script: relative to the clone.
        arguments: overrides as they were typed.
        keys: names and plain values of further ones, which are quoted for Hydra.
    """
    words = [_python(), _from_here(ROOT / script), *arguments]
    words += [f"{key.replace('__', '.')}={_for_hydra(value)}" for key, value in keys.items()]
    return shlex.join(words)


def after_training(values: Mapping) -> str:
    """What follows a pretraining, by what its run folder holds: a record, checkpoints or nothing.

    Args:
        values: the resolved configuration, with `run_dir`.
    """
    run = Path(values["run_dir"])
    has_checkpoint = any((run / CHECKPOINTS).glob("step_*.ckpt"))
    if not (run / RECORD).is_file():
        if has_checkpoint and world_from_outside() is not None:
            return _start_same_ranks("hydra.run.dir", run)
        again = command("src/train.py", hydra__run__dir=run, resume="auto")
        return f"continue: {again}" if has_checkpoint else ""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return ""
    lines = [f"plot:     {command('analysis/report/your_runs.py', _from_here(run))}"]
    if has_checkpoint and not _ended_above_start(run):
        model = values["model"]
        used = use_model(run, model["family"], model["max_position_embeddings"])
        lines = [f"use:      {used}", _export(run), *lines]
    return "\n".join(lines)


def continue_trainings() -> str:
    """Continue the sweep of pretrainings whose job this is."""
    folder = Path(HydraConfig.get().sweep.dir)
    if world_from_outside() is not None:
        return _start_same_ranks("hydra.sweep.dir", folder)
    keys = "hydra.sweep.dir", "resume", "resume.path"
    typed = [word for word in sys.argv[1:] if word.partition("=")[0] not in keys]
    return f"continue: {command('src/train.py', f'hydra.sweep.dir={_for_hydra(folder)}', 'resume=auto', *typed)}"


def _start_same_ranks(key: str, folder: Path) -> str:
    keys = shlex.join(["resume=auto", f"{key}={_for_hydra(folder)}"])
    return f"continue: start the same ranks by the same launcher, with {keys}"


def of_training(overrides: list[str]) -> list[str]:
    """The words of a plan's command that a training takes, without its grid of ranks."""
    own = {field.name for field in fields(PlanConfig)} - {field.name for field in fields(RunConfig)}
    names = [(override, override.lstrip("+~").partition("=")[0]) for override in overrides]
    return _config_dir() + [o for o, name in names if name not in GRID and name.partition(".")[0] not in own]


def use_model(
    checkpoint: str | Path,
    family: str,
    num_positions: int = 64,
    tokenizer: Sequence[str] = (),
    drawn: Collection[str] = (),
) -> str:
    """Generate from a GPT, or finetune a BERT on the table of this clone, which needs no network.

    Args:
        drawn: parameters that the checkpoint has from a seed, untrained.
    """
    if family_of(family).is_causal:  # its `ckpt` is taken literally
        return command("src/generate.py", f"ckpt={_from_here(checkpoint)}", *tokenizer, "prompt=The")
    table = ROOT / "finetune" / "example_qqp.tsv"
    data = {"task__train": table, "task__validation__dev": table, "task__max_seq_length": str(min(64, num_positions))}
    pooler = {"new_pooler": "true"} if "pooler.weight" in drawn else {}
    return command("finetune/run.py", task="qqp", ckpt=checkpoint, **pooler, **data)


def load_published(folder: Path, model_class: str) -> str:
    """Load an exported model with transformers alone, by its class there."""
    load = f"{model_class}.from_pretrained({str(_from_here(folder))!r})"
    code = f"from transformers import {model_class}; print({load})"
    return shlex.join([_python(), "-c", code])


def after_finetuning(values: Mapping) -> str:
    """Score the finetuned checkpoint again, at any layout, and export it; empty if none was saved."""
    run = Path(values["run_dir"])
    if not any((run / CHECKPOINTS).glob("step_*.ckpt")) or HydraConfig.get().mode == RunMode.MULTIRUN:
        return ""
    if (run / RECORD).is_file() and _ended_above_start(run):
        return ""
    own = ("ckpt", "trainer.num_epochs", "from_scratch", "new_pooler")
    kept = [o for o in values["overrides"] if o.lstrip("+").partition("=")[0] not in own]
    scored = command("finetune/run.py", *_config_dir(), *kept, ckpt=run, trainer__num_epochs="0")
    return f"score:    {scored}\n{_export(run)}"


def _export(run: Path) -> str:
    exported = command("src/convert.py", source=run, target=run / "hugging_face", format="hugging_face")
    return f"export:   {exported}"


def _ended_above_start(run: Path) -> bool:
    """Whether a run has trained to a higher loss than it began with; its last lines do not offer its model."""
    return read_record(run / RECORD).get("ended_above_start", False)


def _config_dir() -> list[str]:
    sources = HydraConfig.get().runtime.config_sources
    folders = [source.path for source in sources if source.provider == "command-line"]
    return [word for folder in folders for word in ("--config-dir", _from_here(folder))]


def _for_hydra(value: str | Path) -> str:
    text = _from_here(value) if isinstance(value, Path) or os.path.isabs(value) else value
    if _PLAIN.fullmatch(text):
        return text
    # Backslashes are escaped only before a quote.
    return '"' + re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + ('\\"' if found[2] else ""), text) + '"'


def _from_here(path: str | Path) -> str:
    """Relative to the working directory if the path is in it."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _python() -> str:
    """`python`, if that is this one."""
    found = shutil.which("python")
    is_this = found is not None and os.path.abspath(found) == os.path.abspath(sys.executable)
    return "python" if is_this else _from_here(sys.executable)
