"""Hugging Face datasets as inputs, streamed part by part, a part being one or more of the dataset's files."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.corpus import SourceConfig
from .formats import Row, row_of

if TYPE_CHECKING:
    from .reading import InputFile


def list_parts(source: str, config: SourceConfig) -> list[dict[str, Any]]:
    """The parts of a dataset, as fields of InputFile.

    The revision that the hub has now is kept with them, so that every task reads the same.

    Raises:
        ValueError: a dataset, subset or split that cannot be loaded, a column that is missing.
    """
    import datasets
    import huggingface_hub

    is_local = Path(config.name).exists()
    try:
        revision = None if is_local else huggingface_hub.HfApi().dataset_info(config.name).sha
        builder = datasets.load_dataset_builder(config.name, config.subset, revision=revision)
        dataset = builder.as_streaming_dataset(split=config.split)
        num_parts, columns = dataset.num_shards, dataset.column_names or next(iter(dataset)).keys()
        files = [str(file) for file in builder.config.data_files[config.split]]
        sizes, modified_ns = _sizes(files), 0
        if is_local:
            modified_ns = max(Path(file).stat().st_mtime_ns for file in files)
    except Exception as error:  # the library raises many kinds for: no such dataset, subset, split, no network
        raise ValueError(
            f"`sources.{source}.name` must be a dataset that can be streamed, but {config.name!r}: {_reason(error)}"
        ) from None
    if config.text_field not in columns:
        raise ValueError(
            f"`sources.{source}.text_field` must be one of the dataset's columns ({', '.join(columns)}), "
            f"but is {config.text_field!r}"
        )
    # Where a part is a file it has the file's size; files that are split or grouped share theirs out.
    if len(sizes) != num_parts:
        sizes = [sum(sizes) // num_parts] * num_parts
    version = "" if revision is None else f"@{revision[:12]}"
    prefix = (
        f"{Path(config.name).name if is_local else config.name}{version}/{config.subset or 'default'}/{config.split}"
    )
    return [
        {
            "name": f"{prefix}/{part:05d}-of-{num_parts:05d}",
            "num_bytes": size,
            "modified_ns": modified_ns,
            "revision": revision,
            "part": part,
            "num_parts": num_parts,
        }
        for part, size in enumerate(sizes)
    ]


def read_part(file: "InputFile", config: SourceConfig) -> Iterator[Row]:
    """The rows of one part, numbered from 1.

    Raises:
        ValueError: a dataset that can no longer be loaded, or a connection that ends; with the last row.
    """
    import datasets

    number = 0
    try:
        dataset = datasets.load_dataset(
            config.name, config.subset, split=config.split, revision=file.revision, streaming=True
        )
        for number, values in enumerate(dataset.shard(file.num_parts, file.part), start=1):
            yield row_of(values, number, config.text_field)
    except Exception as error:  # see list_parts
        place = f" after row {number}" if number else ""
        raise ValueError(
            f"{file.name} must be a readable part of a dataset, but is not{place}: {_reason(error)}"
        ) from None


def _sizes(files: list[str]) -> list[int]:
    """Bytes of each file, by path or URL."""
    from fsspec.core import url_to_fs

    found = []
    for file in files:
        system, path = url_to_fs(file)
        found.append(int(system.info(path)["size"]))
    return found


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
