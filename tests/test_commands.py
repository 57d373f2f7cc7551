"""The commands of README, CONTRIBUTING and docs: each is valid, and uses what an earlier command has made.

The slow test in cli/test_runs.py runs those of the `bash` fences with a tiny model.
"""

import functools
import re
import shlex
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lmscale.cli.conf_files import CONF, groups_of
from lmscale.cli.reference import ENTRY_POINTS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES.remove(ROOT / "docs" / "log.md")  # commands of earlier versions
GIVEN = {"MODEL": "gpt_tiny", "CLUSTER": "h100", "N": "8", "NAME": "deepnorm"}  # words that a reader replaces
READS = re.compile(
    r"(ckpt|source|resume|teacher\.(path|cache)|(data|task|sources\.local)\.path|task\.(train|validation\.\w+))$"
)
WRITES = ("hydra.run.dir", "hydra.sweep.dir", "output", "target")


@dataclass(frozen=True)
class Command:
    """One command of a page.

    Args:
        kind: language of its fence, or `text`.
        script: the Python file that it runs; empty: it runs another program.
        arguments: after the script.
    """

    page: Path
    kind: str
    words: tuple[str, ...]
    script: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def overrides(self) -> dict[str, str]:
        """Values by key."""
        return dict(word.partition("=")[::2] for word in self.arguments if "=" in word and not word.startswith("--"))

    def option(self, name: str) -> list[str]:
        """The value after an option; empty without it."""
        return [self.arguments[self.arguments.index(name) + 1]] if name in self.arguments else []


@functools.cache
def commands(page: Path) -> list[Command]:
    """The commands of a page's fences without a language and of `bash`, and those in its text, in order."""
    found, text = [], page.read_text(encoding="utf-8")
    for language, fence, code in re.findall(r"^ *```(.*?)\n(.*?)^ *```$|`([^`]+)`", text, re.S | re.M):
        kind = "text" if code else language
        for line in (code or fence).replace("\\\n", " ").splitlines() if kind in ("", "bash", "text") else []:
            try:
                words = tuple(shlex.split(line, comments=True))
            except ValueError:  # an apostrophe in a comment of another language
                continue
            scripts = [n for n, w in enumerate(words) if re.fullmatch(r"(src|finetune|analysis|tests)/[\w/]+\.py", w)]
            if scripts and len(words) > 1 and scripts[0] > 0:
                found.append(Command(page, kind, words, words[scripts[0]], words[scripts[0] + 1 :]))
            elif words[:1] in (("make",), ("bash",), ("pip",), ("lmscale",)) and len(words) > 1:
                found.append(Command(page, kind, words))
    return found


ALL = [command for page in PAGES for command in commands(page)]
HYDRA = {(c.script, c.arguments): c for c in ALL if c.script in ENTRY_POINTS and c.overrides}
PARAMETERS = [
    pytest.param(c, id=" ".join([c.script, *c.arguments])[:70], marks=[pytest.mark.slow] * (c.kind == "bash"))
    for c in HYDRA.values()
]


def own_files(page: Path) -> dict[str, str]:
    """The files that a page tells the reader to write."""
    text = page.read_text(encoding="utf-8")
    return dict(re.findall(r"^```yaml (\S+)\n(.*?)^```$", text, re.S | re.M))


def compose_command(command: Command, folder: Path) -> tuple[dict, dict]:
    """The composed values, of a sweep's first job, and the overrides without a path of the reader's shell."""
    given = {key: GIVEN.get(value, value) for key, value in command.overrides.items()}
    given = {key: value if value.startswith(("[", "{")) else value.partition(",")[0] for key, value in given.items()}
    entry_point, own = "finetune" if command.script == "finetune/run.py" else Path(command.script).stem, []
    for name in command.option("--config-dir"):
        for path, text in own_files(command.page).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        groups = re.search(r"groups_of:(\w+)", (CONF / f"{entry_point}.yaml").read_text(encoding="utf-8"))[1]
        own = [f"hydra.searchpath=[{groups_of(groups)},file://{folder / name}]"]
    typed = [f"{'resume.path' if key == 'resume' else key}={value}" for key, value in given.items()]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(entry_point, typed + own, return_hydra_config=True), given


@pytest.mark.parametrize("command", PARAMETERS)
def test_every_command_of_an_entry_point_is_valid(command: Command, tmp_path) -> None:
    composed, given = compose_command(command, tmp_path)
    for key, value in given.items():
        if key.startswith(("hydra.", "model.", "parallel.", "task.columns.")) and not value.startswith("$"):
            assert OmegaConf.select(composed, key) == yaml.safe_load(value), key
    config = ENTRY_POINTS[command.script]
    OmegaConf.set_struct(composed, False)
    composed.pop("hydra")
    values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    added = {"run_dir": "/somewhere"} if "run_dir" in {field.name for field in fields(config)} else {}
    config.from_dict(values | added)


def paths_read(command: Command) -> list[str]:
    found = [value for key, value in command.overrides.items() if READS.match(key)]
    found += command.option("--config-dir")
    if command.script in ("finetune/median.py", "finetune/ensemble.py"):
        found += [word for word in command.arguments if not word.startswith("--")]
        found = [path for path in found if path not in command.option("--out")]
    return [path for path in found if not re.search(r"\b[A-Z]{2,}$", path) and path not in ("auto", "none", "hub")]


def paths_written(command: Command) -> list[str]:
    return [value for key, value in command.overrides.items() if key in WRITES] + command.option("--out")


def unmade(page: Path, known: list[str]) -> list[str]:
    """What commands of `bash` fences read that neither the repository nor `known` has, nor an earlier one has made."""
    known, missing = known + [str(Path(path).parent.parent) for path in own_files(page)], []
    for command in (c for c in commands(page) if c.kind == "bash"):
        for path in paths_read(command):
            made = any(f"{path}/".startswith(f"{folder}/") for folder in known)
            if not made and (path.startswith("outputs") or not (ROOT / path).exists()):
                missing.append(f"{path} in {' '.join(command.words)}")
        known += paths_written(command)
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_reads_what_the_repository_has_or_an_earlier_command_made(page: Path) -> None:
    """Earlier: on the same page, in the README, or on a page that this one links to."""
    earlier = [page.parent / link for link in re.findall(r"\]\((\w+\.md)", page.read_text(encoding="utf-8"))]
    earlier = [ROOT / "README.md", *earlier] if page != ROOT / "README.md" else []
    known = [path for other in earlier for c in commands(other) if c.kind == "bash" for path in paths_written(c)]
    assert unmade(page, known) == []


def test_other_programs_have_what_the_pages_name() -> None:
    """Targets of make, scripts and their options, extras of pip, commands of lmscale."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wrong = []
    for command in ALL:
        first, *rest = command.words
        if first == "make" and f"\n{rest[0]}:" not in makefile:
            wrong.append(command)
        elif first == "bash" and not (ROOT / rest[0]).is_file():
            wrong.append(command)
        elif first == "pip" and not set(re.findall(r"\.\[([\w,]+)\]", rest[-1])) <= set(extras):
            wrong.append(command)
        elif command.script:
            source = (ROOT / command.script).read_text(encoding="utf-8") if (ROOT / command.script).is_file() else ""
            options = [word for word in command.arguments if word.startswith("--") and word != "--config-dir"]
            if not source or not all(f'"{option}"' in source for option in options):
                wrong.append(command)
    assert wrong == []
