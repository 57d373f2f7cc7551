"""Open the work folder of a preparation: inputs, shards, tokenizer, evaluation texts."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

from ..config.corpus import PrepareConfig
from ..config.from_dict import to_plain
from ..data.indexed_corpus import MANIFEST, TOKENIZER
from ..data.tokenizer import Tokenizer, check_tokenizer, load_published_tokenizer, write_tokenizer
from .evaluation_sets import EVALUATION_TEXTS, read_evaluation_sets
from .inputs import InputFile, list_inputs
from .language import check_language
from .reading import check_first_documents
from .work_folder import WorkFolder, save_json

FORMAT = 7  # of the intermediate files: incremented when they or the result of the same input change
# Keys that affect how the work is done but not its result; `shard_mb` is checked by its number of shards.
FREE_KEYS = ("launcher", "shard_mb", "keep_work", "output", "max_bad_rows")


def open_work_folder(config: PrepareConfig) -> WorkFolder:
    """Check the configuration and open the work folder; an unfinished preparation with equal inputs is continued.

    Raises:
        ValueError: a source, tokenizer, language or evaluation set cannot be used, the output folder holds something
            else or a different number of shards, or there are too few documents for both splits.
        OSError: the output folder cannot be made, read or written.
    """
    output = Path(config.output).absolute()
    check_tokenizer(config.tokenizer, config.architecture)
    if config.cleaning.language is not None:
        check_language(config.cleaning.language)
    for name, source in config.sources.items():
        if config.architecture not in source.architectures:
            raise ValueError(
                f"`corpus` must not have {name} with architecture={config.architecture}: it is for "
                f"{', '.join(source.architectures)} only"
            )
        path = Path(source.path).resolve() if source.path is not None else None
        if path is not None and output.resolve().is_relative_to(path) and path.is_dir():
            raise ValueError(f"`output` must be outside `sources.{name}.path` ({source.path}), but is {config.output}")
    inputs = tuple(list_inputs(config.sources))
    root = output / ".work"
    trains = config.tokenizer.kind == "trained"
    tokenizer = None if trains else load_published_tokenizer(config.tokenizer, config.architecture)
    items = read_evaluation_sets(config.evaluation_sets)
    facts = _facts(config, inputs, tokenizer, items)
    saved = root / "plan.json"
    before = _read_facts(saved) if saved.is_file() else {}
    _check_output(output, before.get("facts"), facts)
    check_first_documents(inputs, config.sources, config.max_bad_rows)
    size = sum(file.num_bytes for file in inputs)
    num_shards = max(1, -(-size // (config.shard_mb * 10**6)))
    if before and before["num_shards"] != num_shards:
        raise ValueError(
            f"`shard_mb` is fixed for a started preparation, but {config.shard_mb} gives {num_shards} shards and "
            f"{output} was started with {before['num_shards']}; if memory is short, raise `launcher.memory_gb` or "
            "lower `launcher.workers`"
        )
    root.mkdir(parents=True, exist_ok=True)
    work = WorkFolder(config, root, inputs, num_shards)
    if tokenizer is not None:
        write_tokenizer(tokenizer.inner, work.path(TOKENIZER))
    if items:
        save_json(work.path(EVALUATION_TEXTS), items)
    save_json(work.path("plan.json"), {"facts": facts, "num_shards": num_shards})
    return work


def _read_facts(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("facts"), dict) or "num_shards" not in found:
        raise ValueError(f"`output` must hold a preparation that can be continued, but {path} is damaged")
    return found


def _facts(
    config: PrepareConfig, inputs: tuple[InputFile, ...], tokenizer: Tokenizer | None, items: dict[str, list[str]]
) -> dict:
    """Return everything that determines the result, as plain values."""
    values = {key: value for key, value in to_plain(config).items() if key not in FREE_KEYS}
    versions = {name: version(name) for name in ("datatrove", "tokenizers", "ftfy", "numpy")}
    files = [[file.source, file.name, file.num_bytes, file.modified_ns] for file in inputs]
    contents = {  # of files named in the config, which may change under the same name
        "tokenizer": None if tokenizer is None else tokenizer.fingerprint,
        "evaluation": hashlib.sha256(json.dumps(items, sort_keys=True).encode()).hexdigest(),
    }
    facts = {"format": FORMAT, "config": values, "inputs": files, "contents": contents, "versions": versions}
    return json.loads(json.dumps(facts))


def _check_output(output: Path, before: dict | None, facts: dict) -> None:
    """Raise an error if the output is finished or was started with a different configuration, as `before` says."""
    if (output / MANIFEST).exists():
        raise ValueError(f"`output` must be a folder without a finished dataset, but {output} has one (manifest.json)")
    if before is None:
        if output.exists() and (not output.is_dir() or any(path.name != ".work" for path in output.iterdir())):
            raise ValueError(f"`output` must be a new or empty folder, but {output} is not")
        return
    if difference := _difference(before, facts):
        raise ValueError(
            f"`output` must be new or hold the same unfinished preparation, but {output} was started with "
            f"{difference}; choose another folder or remove this one"
        )


def _difference(before: dict, now: dict, prefix: str = "") -> str | None:
    """The first key in which two descriptions of work differ, with both values; None if they mean the same.

    Work that passed a policy of `refuse` would have passed any, so that a refused preparation continues with another.
    """
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if old == new or (old == "refuse" and key in ("undecodable", "duplicate_ids")):
            continue
        if key == "contents":
            return "another tokenizer" if old["tokenizer"] != new["tokenizer"] else "other evaluation texts"
        if isinstance(old, dict) and isinstance(new, dict):
            if found := _difference(old, new, f"{prefix}{key}.".removeprefix("config.")):
                return found
            continue
        if key == "inputs":
            return "other input files"
        return f"{prefix}{key}={old!r} and not {new!r}"
    return None
