"""Report errors in overrides or configuration in one line, `error: ...`, with exit code 2."""

import os
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TextIO

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

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
        exit_with(error if isinstance(error, ValueError | OSError) else ValueError(str(error)))


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
    """The error in one line, with the rule, the name and the value; a message that is not known here as it is."""
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
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        given = (argument.partition("=") for argument in sys.argv[1:])
        for key, _, path in (each for each in given if each[0] in ("hydra.run.dir", "hydra.sweep.dir")):
            if error.filename and Path(os.path.expanduser(path.strip("'\""))).is_relative_to(str(error.filename)):
                return f"`{key}` must be a folder that can be made and written, but {error.filename}: {error.strerror}"
        return f"{error.filename or 'a file'} cannot be read or written: {error.strerror or error}"
    text = re.sub(r"^Caught \w+ in DataLoader .*^\w+: ", "", str(error), flags=re.S | re.M)  # of a loader process
    has_options = isinstance(error, MissingConfigException) and error.options
    if has_options or text.startswith("Config group override must be"):
        text = _wrong_choice(error) or text
    raised_here = re.search(r"^ValueError raised while resolving interpolation: (`.*)$", text, re.M)
    if raised_here:
        return raised_here.group(1)
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
            group = unknown[1].partition(".")[0]
            return f"`{unknown[1]}` needs {' or '.join(choices)}, but `{group}` is another choice"
        return f"`{unknown.group(1)}` is not a known key or group of the configuration{_closest(unknown.group(1))}"
    no_row = re.search(r"Interpolation key 'task\.by_size\[([^]]+)\]\.(\w+)", text)
    if no_row:
        rows = [*map(str, error.parent_node._get_root().task.by_size)]
        if no_row[1] in rows:
            return f"`task.by_size.{no_row[1]}` must have global_batch_size, lr and num_epochs, but lacks {no_row[2]}"
        rule = f"one of {', '.join(rows)}, the rows that the task's file has in `by_size`"
        keys = "global_batch_size, optimizer.lr and trainer.num_epochs"
        return f"`size` must be {rule}, but is {no_row[1]}; or give {keys}"
    if not isinstance(error, (ValueError, HydraException, OmegaConfBaseException, YAMLError)):
        text = f"the command line cannot be used: {type(error).__name__} {text}".rstrip()
    return re.sub(r"\s+", " ", text).strip()


def _wrong_choice(error: Exception) -> str | None:
    """Message for a choice that its group does not have; None for a number where no group is typed so."""
    typed = [argument.lstrip("+").partition("=")[::2] for argument in sys.argv[1:]]
    if isinstance(error, MissingConfigException):  # the choice may have a slash, or be that of another one
        missing, options = error.missing_cfg_file, error.options
        group, choice = next((pair for pair in typed if "/".join(pair) == missing), missing.rsplit("/", 1))
    else:
        known = {group: [path.stem for path in files_of(group)] for group, _ in typed}
        group, choice = next((pair for pair in typed if known[pair[0]] and pair[1] not in known[pair[0]]), (None, None))
        options = known.get(group)
    if group is None:
        return None
    choices = [option for option in options if not option.startswith("base")]
    takes_own = "/" not in choice and (group != "task" or entry_point() == "finetune")
    own_file = _OWN_FILE.get(group, "").format(choice) if takes_own else ""
    meant = _of_hugging_face(group, choice) or did_you_mean(choice, choices) + own_file
    return f"`{group}` must be one of {', '.join(choices)}, but is {choice!r}{meant}"


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

    None if this entry point has a section of that name, but no such group; or if the group's choice has a file of the
    user's, which may have any key.
    """
    group, _, rest = key.partition(".")
    defaults, found = OmegaConf.load(CONF / f"{entry_point()}.yaml").defaults, []
    if not any(group in entry.keys() for entry in defaults if entry != "_self_"):
        return found
    given = [argument.partition("=")[2] for argument in sys.argv[1:] if argument.startswith(f"{group}=")]
    if {choice for choices in given for choice in choices.split(",")} - {path.stem for path in files_of(group)}:
        return found
    for path in files_of(group):
        if rest in list(OmegaConf.load(path)):
            choice = f"{group}={path.stem}"
            about, is_given, _ = path.read_text(encoding="utf-8").removeprefix("# ").partition(f": {choice} ")
            found.append(f"{choice} ({about[0].lower()}{about[1:]})" if is_given else choice)
    return found


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
