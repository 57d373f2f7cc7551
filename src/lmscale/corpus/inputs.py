"""Inputs of a preparation: the files of local sources and the parts of Hugging Face datasets."""

import os
from dataclasses import dataclass
from pathlib import Path

from ..config.checks import refuse
from ..config.corpus import SourceConfig
from ..text.documents import reason_of
from ..text.input_files import list_files


@dataclass(frozen=True)
class InputFile:
    """One file, or one part of a Hugging Face dataset.

    Args:
        source: name of its source.
        name: path relative to the source's path; for a dataset its name, revision, subset, split and part.
        num_bytes: stored size; for a dataset's part its share of the files' sizes.
        modified_ns: modification time, nanoseconds since the epoch; 0 for a hub dataset, identified by its revision.
        path: absolute path; None for a dataset.
        revision: commit of a dataset on the hub; None for a local dataset.
        part, num_parts: which part of the dataset, of how many.
    """

    source: str
    name: str
    num_bytes: int
    modified_ns: int
    path: str | None = None
    revision: str | None = None
    part: int = 0
    num_parts: int = 1


def list_inputs(sources: dict[str, SourceConfig]) -> list[InputFile]:
    """List all files and dataset parts of the sources, ordered by source and name.

    Raises:
        ValueError: a path is missing or has no file of a known suffix, a dataset cannot be loaded, or all files are
            empty.
    """
    found: list[InputFile] = []
    for source, config in sources.items():
        if config.kind == "huggingface":
            found += _list_parts(source, config)
        else:
            files = list_files(Path(config.path), f"sources.{source}.path")
            found += [_describe(source, path, files.root) for path in files.paths]
    if not any(file.num_bytes for file in found):
        first = found[0].path or found[0].name
        raise ValueError(f"`sources` must hold text, but all {len(found)} files are empty, the first is {first}")
    return sorted(found, key=lambda file: (file.source, file.name))


def list_skipped(sources: dict[str, SourceConfig]) -> list[str]:
    """Describe, in one line per source, what its folder holds but is not read."""
    keys = {f"sources.{name}.path": config.path for name, config in sources.items() if config.kind == "local"}
    found = {key: list_files(Path(path), key).skipped for key, path in keys.items()}
    return [f"{key}: {skipped}" for key, skipped in found.items() if skipped]


def _describe(source: str, path: Path, root: Path) -> InputFile:
    stat = path.stat()
    # A file name may hold arbitrary bytes, but ids and reports are text.
    name = os.fsencode(path.relative_to(root).as_posix()).decode("utf-8", "replace")
    return InputFile(source, name, stat.st_size, stat.st_mtime_ns, str(path.absolute()))


def _list_parts(source: str, config: SourceConfig) -> list[InputFile]:
    """List the parts of a Hugging Face dataset, where a part is one or more of its files.

    The hub's current revision is stored with them, so that every task reads the same data.

    Raises:
        ValueError: the dataset, subset or split cannot be loaded, or the text column is missing.
    """
    import datasets
    import huggingface_hub
    from fsspec.core import url_to_fs

    is_local = Path(config.name).exists()
    try:
        revision = None if is_local else huggingface_hub.HfApi().dataset_info(config.name).sha
        builder = datasets.load_dataset_builder(config.name, config.subset, revision=revision)
        dataset = builder.as_streaming_dataset(split=config.split)
        num_parts, columns = dataset.num_shards, dataset.column_names or next(iter(dataset)).keys()
        files = [str(file) for file in builder.config.data_files[config.split]]
        sizes = [int(system.info(path)["size"]) for system, path in map(url_to_fs, files)]
        modified_ns = max(Path(file).stat().st_mtime_ns for file in files) if is_local else 0
    except Exception as error:  # the library raises many types: no such dataset, subset or split, no network
        raise ValueError(
            f"`sources.{source}.name` must be a dataset that can be streamed, but {config.name!r}: {reason_of(error)}"
        ) from None
    if config.text_field not in columns:
        rule = f"one of the dataset's columns ({', '.join(columns)})"
        refuse(f"sources.{source}.text_field", rule, config.text_field)
    # A part that is one file has that file's size; otherwise the total size is divided evenly.
    if len(sizes) != num_parts:
        sizes = [sum(sizes) // num_parts] * num_parts
    name = Path(config.name).name if is_local else config.name
    version = "" if revision is None else f"@{revision[:12]}"
    prefix = f"{name}{version}/{config.subset or 'default'}/{config.split}"
    return [
        InputFile(source, f"{prefix}/{part:05d}-of-{num_parts:05d}", size, modified_ns, None, revision, part, num_parts)
        for part, size in enumerate(sizes)
    ]
