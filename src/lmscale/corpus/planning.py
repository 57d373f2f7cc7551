"""What a preparation will do, fixed before it starts: inputs, shards, tokenizer, evaluation texts."""

import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ..corpus_config import PrepareConfig
from ..data.tokenizer import check_tokenizer, load_published_tokenizer
from ..from_plain import to_plain
from .evaluation import EvaluationTexts, collect_evaluation_texts
from .reading import InputFile, list_inputs
from .tokenizing import TOKENIZER
from .work_folder import WorkFolder, complete_file

FORMAT = 1  # of the work: raised when the same input gives another result
MAX_TASKS = 1000  # of the first stage
# Keys that change how the work is done, and not what comes out.
FREE_KEYS = ("launcher", "shard_mb", "keep_work", "output")


@dataclass(frozen=True)
class Plan:
    """Everything the stages need; picklable.

    Args:
        config: as asked for.
        root: of the work folder, inside the output.
        inputs: files (or parts of datasets) in order of source and name.
        num_tasks: of the first stage, which each read some inputs.
        num_shards: ranges of document keys that the other stages work on.
        evaluation: texts not to train on, or None.
    """

    config: PrepareConfig
    root: Path
    inputs: tuple[InputFile, ...]
    num_tasks: int
    num_shards: int
    evaluation: EvaluationTexts | None

    @property
    def output(self) -> Path:
        """The folder of the dataset."""
        return self.root.parent

    @property
    def parts(self) -> list[tuple[str, str]]:
        """(source, split) of the datasets that come out, in order."""
        return [(source, split) for source in sorted(self.config.sources) for split in ("train", "validation")]


def make_plan(config: PrepareConfig) -> Plan:
    """Check what can be checked, and fix what the work is; goes on with the work that is there if it is the same.

    Raises:
        ValueError: a source, tokenizer or evaluation set that cannot be used, an output that holds something else.
    """
    output = Path(config.output).absolute()
    check_tokenizer(config.tokenizer, config.architecture)
    for name, source in config.sources.items():
        if config.architecture not in source.architectures:
            raise ValueError(
                f"`corpus` must not have {name} with architecture={config.architecture}: it is for "
                f"{', '.join(source.architectures)} only"
            )
    inputs = tuple(list_inputs(config.sources))
    folder = WorkFolder(output / ".work")
    facts = _facts(config, inputs)
    _check_output(output, folder.root, facts)
    size = sum(file.num_bytes for file in inputs)
    num_shards = _kept(folder.root, "num_shards") or max(1, -(-size // (config.shard_mb * 10**6)))
    num_tasks = min(len(inputs), MAX_TASKS)
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"`output` must be a folder that can be made, but {output}: {error.strerror}") from None
    if config.tokenizer.kind != "trained":
        tokenizer = load_published_tokenizer(config.tokenizer, config.architecture)
        with complete_file(folder.path(TOKENIZER)) as path:
            tokenizer.inner.save(str(path))
    evaluation = None
    if config.evaluation_sets:
        evaluation = collect_evaluation_texts(config.evaluation_sets, folder.path("evaluation.json"))
    with complete_file(folder.path("plan.json")) as path:
        path.write_text(json.dumps({"facts": facts, "num_shards": num_shards}, indent=1), encoding="utf-8")
    return Plan(config, folder.root, inputs, num_tasks, num_shards, evaluation)


def _facts(config: PrepareConfig, inputs: tuple[InputFile, ...]) -> dict:
    """All that decides the result, as plain values."""
    values = {key: value for key, value in to_plain(config).items() if key not in FREE_KEYS}
    versions = {name: version(name) for name in ("datatrove", "tokenizers", "ftfy", "numpy")}
    files = [[file.source, file.name, file.num_bytes, file.modified_ns] for file in inputs]
    return json.loads(json.dumps({"format": FORMAT, "config": values, "inputs": files, "versions": versions}))


def _kept(root: Path, name: str) -> int | None:
    path = root / "plan.json"
    return json.loads(path.read_text(encoding="utf-8"))[name] if path.is_file() else None


def _check_output(output: Path, root: Path, facts: dict) -> None:
    """Refuse an output that is finished, or whose work was for something else."""
    if (output / "manifest.json").exists():
        raise ValueError(f"`output` must be a folder without a finished dataset, but {output} has one (manifest.json)")
    before = _kept(root, "facts")
    if before is None:
        if output.exists() and (not output.is_dir() or any(path.name != ".work" for path in output.iterdir())):
            raise ValueError(f"`output` must be a new or empty folder, but {output} is not")
        return
    if before != facts:
        raise ValueError(
            f"`output` must be new, or hold the work of the same preparation, but {output} was begun with "
            f"{_difference(before, facts)}; give another folder or remove this one"
        )


def _difference(before: dict, now: dict, prefix: str = "") -> str:
    """The first key in which two nested facts differ, with both values."""
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            return _difference(old, new, f"{prefix}{key}.".removeprefix("config."))
        if key == "inputs":
            return "other input files"
        return f"{prefix}{key}={old!r} and not {new!r}"
    return "the same facts"
