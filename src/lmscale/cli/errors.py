"""Report errors in overrides or configuration in one line, `error: ...`, with exit code 2."""

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TextIO

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import MarkedYAMLError

from ..config.checks import closest, did_you_mean
from ..config.family import corpus_forms
from ..output import escape_unknown_letters
from ..runtime.exit_codes import USER_ERROR
from .conf_files import CONF, entry_point, files_of

WANTS_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")  # before `run_hydra_main` sets it for Hydra

# Arguments of Lightning's Trainer, by what says the same here.
_OF_LIGHTNING = {
    "accumulate_grad_batches": ("micro_batch_size", "global_batch_size"),
    "devices": ("parallel.tp_size", "parallel.dp_size"),
    "gradient_clip_val": ("optimizer.max_grad_norm",),
    "limit_val_batches": ("trainer.num_validation_samples",),
    "log_every_n_steps": ("logger.log_every_steps",),
    "num_nodes": ("parallel.tp_size", "parallel.dp_size"),
    "strategy": ("parallel.tp_size", "parallel.dp_size"),
    "val_check_interval": ("trainer.validate_every_steps",),
}
# What a choice without a file needs, by its group.
_OWN_FILE = {
    "model": "; a model of your own needs model/{0}.yaml and recipe/{0}.yaml in conf/ or in --config-dir",
    "task": "; a table of your own needs task/{0}.yaml in --config-dir",
    "recipe": "; model={0} needs recipe/{0}.yaml beside its model file, such as conf/recipe/gpt_tiny.yaml, or recipe= "
    "one of these",
}


def exit_with(error: Exception, job: str = "") -> NoReturn:
    """Print the error in one line, after the name of the sweep's job if any, and end with exit code 2."""
    line = _one_line(error)
    if job:  # below the command line, a run does not know that a sweep names its folder
        line = line.replace("hydra.run.dir", "hydra.sweep.dir")
    print(f"error: {job}{line}", file=sys.stderr, flush=True)
    sys.exit(USER_ERROR)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Decorate the main function of a script without Hydra: the user's errors, and the failure of a script that it
    ran, end it by `exit_with`.
    """
    escape_unknown_letters()
    try:
        yield
        print(end="", flush=True)  # nothing where stdout is closed
    except BrokenPipeError:
        end_without_reader()
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        if WANTS_TRACEBACK:
            raise
        text = str(error)
        if isinstance(error, OSError):
            text = f"{error.filename or 'a file'} cannot be read or written: {error.strerror or error}"
        exit_with(error if isinstance(error, ValueError) else ValueError(text))


def end_without_reader() -> NoReturn:
    """In the handler of a BrokenPipeError: end quietly if the reader of the output, such as `head`, has gone."""
    if not any(_has_no_reader(stream) for stream in (sys.stdout, sys.stderr) if stream is not None):
        raise  # it was another pipe, such as that to a process of ours
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
    sys.exit(128 + signal.SIGPIPE)


def _has_no_reader(stream: TextIO) -> bool:
    """Whether the reader of a pipe has gone."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)  # errors are always reported
    return bool(poll.poll(0))


def _one_line(error: Exception) -> str:
    """The error in one line, with the rule, the name and the value."""
    if isinstance(error, MissingConfigException) and (hint := _hint_at_path(sys.argv[1:])):
        return hint
    if isinstance(error, MissingConfigException) and error.options:
        missing = error.missing_cfg_file or ""
        given = (override for override in sys.argv[1:] if override.replace("=", "/", 1) == missing)
        group, _, choice = next(given, "=".join(missing.rsplit("/", 1))).partition("=")  # a choice may have a slash
        bases = [f"base/{path.stem}" for path in files_of(f"{group}/base") if choice.startswith("base/")]
        choices = bases or [option for option in error.options if not option.startswith("base")]
        own_file = "" if bases else _OWN_FILE.get(group, "").format(choice)
        meant = (not bases and _of_hugging_face(group, choice)) or did_you_mean(choice, choices) + own_file
        return f"`{group}` must be one of {', '.join(choices)}, but is {choice!r}{meant}"
    if isinstance(error, MissingMandatoryValue):
        return f"`{error.full_key}` must be given{_how_to_make(error.full_key)}"
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        quoted = shlex.quote(f'{key}="{value}"')
        form = f" ({quoted})" if value and '"' not in value else ""
        return (
            f"an argument must be of the form key=value, with quotes around what is special{form}, but is "
            f"{error.override!r}"
        )
    text = str(error)
    included = re.match(r"In '(.+)': Could not load '((.+)/(.+))'", text)
    if included:
        known = [path.stem for path in files_of(included[3])]
        there = f"conf/{included[3]} has {', '.join(known)}{did_you_mean(included[4], known)}"
        return f"`defaults` of {included[1]}.yaml must name files that exist, but {included[2]}.yaml does not; {there}"
    if isinstance(error, MarkedYAMLError):
        return f"{error.problem_mark.name} must be YAML, but line {error.problem_mark.line + 1} is not: {error.problem}"
    frames = (frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__))
    read = [names["full_path"] for names in frames if "full_path" in names]  # as Hydra calls a configuration file
    if read and isinstance(error, UnicodeDecodeError | OSError):
        reason = getattr(error, "strerror", error)
        return f"{read[-1]} must be a configuration file in UTF-8 that can be read, but: {reason}"
    raised_here = re.search(r"^ValueError raised while resolving interpolation: (`.*)$", text, re.M)
    if raised_here:
        return raised_here.group(1)
    twice = re.match(r"(?:Multiple values for )?(\S+?)(?:\. To override| appears more than once)", text)
    if twice and any(arg.startswith(f"+{twice[1]}=") for arg in sys.argv):
        return f"`{twice[1]}` must be given without +, as {twice[1]}=VALUE: the configuration has one already"
    ungiven = re.search(r"You must specify '([^']+)'.*Available options:(.*)", text, re.S)
    if ungiven:
        return f"`{ungiven.group(1)}` must be one of {', '.join(ungiven.group(2).split())}, but is not given"
    swept = re.search(r"Ambiguous value for argument '([^'=]+)=([^']*)'", text)
    if swept:
        return f"`{swept[1]}` must be one value without -m, which sweeps over several, but is {swept[2]}"
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown:
        choices = _choices_with(unknown[1])
        if choices and entry_point() != "plan":  # a plan has groups of training that it does not read
            needs = f"needs {' or '.join(choices)}, but `{unknown[1].partition('.')[0]}` is another choice"
            return f"`{unknown[1]}` {_missing_path(unknown[1])}{needs}"
        return f"`{unknown.group(1)}` is not a known key or group of the configuration{_closest(unknown.group(1))}"
    if text.startswith(("Config group override must be", "Error resolving interpolation '${model}'")):
        text = _wrong_choice(sys.argv[1:]) or text
    if isinstance(error, OSError) and not isinstance(error, HydraException):  # Hydra makes the folder
        if error.filename is not None:
            sweeps = any(frame.name == "multirun" for frame in traceback.extract_tb(error.__traceback__))  # Hydra's
            key = "hydra.sweep.dir" if sweeps else "hydra.run.dir"
            return f"`{key}` must be a folder that can be made and written, but {error.filename}: {error.strerror}"
        if isinstance(error, FileNotFoundError):  # of os.getcwd
            return "the working directory must exist, but was removed"
        return f"the run folder cannot be written: {error.strerror}"
    no_row = re.search(r"Interpolation key 'task\.by_size\[([^]]+)\]", text)
    if no_row:
        rows = ", ".join(map(str, error.parent_node._get_root().task.by_size))
        return f"`size` must be one of {rows}, the rows that the task's file has in `by_size`, but is {no_row[1]}"
    if not isinstance(error, (ValueError, HydraException, OmegaConfBaseException)):
        text = f"the command line cannot be used: {type(error).__name__} {text}".rstrip()
    return re.sub(r"\s+", " ", text).strip()


def _closest(key: str) -> str:
    """A question that names the known key or group most like `key`, in any group; empty if none is like it."""
    # It imports every configuration class: needed after a mistake only.
    from .reference import ENTRY_POINTS, known_keys, meaning_of

    name = _script_name()
    of_training = known_keys("src/train.py") if name == "src/plan.py" else []
    if key in {*of_training, *(other.partition(".")[0] for other in of_training)}:
        return "; src/train.py has it, src/plan.py does not: leave it out"
    known = known_keys(name) if name in ENTRY_POINTS else []
    known += {key.partition(".")[0] for key in known}
    known += [folder.name for folder in (CONF / entry_point()).glob("*/")]
    if key in known:
        return f"; conf/ has no default for it: type +{key}="
    if key.count(".") == 2 and meaning_of(key, name):  # it is below a name that the user chooses
        group, own, _ = key.split(".")
        return f"; `{group}` has no {own} with that key: add {own} by '+{group}.{own}={{...}}', or the key by +{key}="
    by_last_word = {other.rpartition(".")[2]: other for other in reversed(known)}
    last_word = key.rpartition(".")[2]
    same = [f"`{name}`" for name in _OF_LIGHTNING.get(last_word, ()) if name in known]
    if same:
        return f"; {' and '.join(same)} {'says' if len(same) == 1 else 'say'} that here"
    if last_word in by_last_word:
        return f"; did you mean `{by_last_word[last_word]}`?"
    if "." in key:
        return did_you_mean(key, known)
    close = closest(key, by_last_word)
    return f"; did you mean `{by_last_word[close]}`?" if close else ""


def _script_name() -> str:
    """This entry point's name among those of the reference."""
    script = Path(sys.argv[0]).resolve()
    return f"{script.parent.name}/{script.name}"


def _choices_with(key: str) -> list[str]:
    """The choices of the key's group whose files have the key, as they are typed, with what their files say of them.

    None if this entry point has a section of that name, but no such group.
    """
    group, _, rest = key.partition(".")
    defaults, found = OmegaConf.load(CONF / f"{entry_point()}.yaml").defaults, []
    if not any(group in entry.keys() for entry in defaults if entry != "_self_"):
        return found
    for path in files_of(group):
        if rest in list(OmegaConf.load(path)):
            choice = f"{group}={path.stem}"
            about, is_given, _ = path.read_text(encoding="utf-8").removeprefix("# ").partition(f": {choice} ")
            found.append(f"{choice} ({about[0].lower()}{about[1:]})" if is_given else choice)
    return found


def _missing_path(key: str) -> str:
    """What the message begins with if the key's value is a path that does not exist."""
    path = next((arg.partition("=")[2] for arg in sys.argv[1:] if arg.lstrip("+").startswith(f"{key}=")), "")
    is_missing = key.endswith("path") and not (Path(path).exists() or Path(f"{path}.idx").exists())
    return f"must exist, but {path} does not; it " if is_missing else ""


def _how_to_make(key: str) -> str:
    """Where the checkpoint comes from that an entry point needs."""
    if key != "ckpt":
        from .reference import meaning_of  # imports every configuration class: needed after a mistake only

        meaning = meaning_of(key, _script_name())
        return f", as {key}=VALUE ({meaning})" if meaning else ""
    model = "bert_tiny" if entry_point() == "finetune" else "gpt_tiny"
    return f": a checkpoint or a run folder, such as that of `python src/train.py model={model}`"


def _of_hugging_face(group: str, choice: str) -> str:
    """How a model or a tokenizer is given that has a name of Hugging Face's hub; empty for other choices."""
    if not re.search(r"/|^gpt2|^(megatron-)?bert-", choice):
        return ""
    if group == "model":
        return "; import one of Hugging Face: python src/convert.py source=FOLDER target=NEW_FOLDER"
    if group == "tokenizer":
        return (
            f"; one of Hugging Face is given by its kind, {' or '.join(corpus_forms())}, with tokenizer.name={choice}"
        )
    return ""


def _wrong_choice(overrides: list[str]) -> str | None:
    """Message for the first group whose value is not one of its choices; None if there is none."""
    for override in overrides:
        group, _, choice = override.partition("=")
        choices = [path.stem for path in files_of(group)]
        if choices and choice.strip("'\"") not in choices:
            return f"`{group}` must be one of {', '.join(choices)}, but is {choice}{did_you_mean(choice, choices)}"
    return None


def _hint_at_path(overrides: list[str]) -> str | None:
    """Message if a group is given a user's file as its choice, although it takes the file under `path`."""
    for override in overrides:
        group, _, choice = override.partition("=")
        if choice.endswith((".yaml", ".yml")) and group.isidentifier():
            files = files_of(group)
            if any(f"# {group}.path=" in path.read_text(encoding="utf-8") for path in files):
                choices = ", ".join(path.stem for path in files)
                return (
                    f"`{group}` must be one of {choices}, or {group}.path=FILE for a file of your own, but is {choice}"
                )
    return None
