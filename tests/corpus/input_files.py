"""Write input files for tests, and read them."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import zstandard

from lmscale.config.corpus import (
    CleaningConfig,
    DedupConfig,
    EvaluationSetConfig,
    LauncherConfig,
    OverlapConfig,
    PrepareConfig,
    SourceConfig,
)
from lmscale.config.data import TokenizerConfig
from lmscale.corpus.inputs import list_inputs
from lmscale.corpus.reading import SourceReader
from lmscale.corpus.work_folder import WorkFolder

TEXTS = ["First text,\nof two lines.", "Second: naïve café ☕.", "Third."]


def source(path: Path, **more: object) -> SourceConfig:
    return SourceConfig("local", path=str(path), **more)


def work_of(
    root: Path,
    sources: dict[str, SourceConfig] | None = None,
    num_tasks: int | None = None,
    num_shards: int = 1,
    dedup: DedupConfig | None = None,
    evaluation_sets: dict[str, EvaluationSetConfig] | None = None,
    **keys: object,
) -> WorkFolder:
    """The work folder `root`, for single steps."""
    rest = (
        TokenizerConfig("trained"),
        CleaningConfig(False, None, 0.0, 0),
        dedup or DedupConfig(None),
        evaluation_sets or {},
        OverlapConfig(),
    )
    named = sources or {"local": source(root)}
    config = PrepareConfig(str(root.parent), "gpt", named, *rest, LauncherConfig("local"), **keys)
    inputs = tuple(list_inputs(sources)) if num_tasks is None else (None,) * num_tasks
    return WorkFolder(config, root, inputs, num_shards)


def read(path: Path, max_bad_rows: int = 0, world_size: int = 1, **more: object) -> tuple[list, list[dict]]:
    """Documents of a local source, and the entries of its report."""
    sources = {"books": source(path, **more)}
    root = (path if path.is_dir() else path.parent).with_name("work")
    reader = SourceReader(work_of(root, sources, max_bad_rows=max_bad_rows))
    documents = [document for rank in range(world_size) for document in reader.run(None, rank, world_size)]
    entries = [json.loads((root / "inputs" / f"{rank:05d}.json").read_text()) for rank in range(world_size)]
    return documents, sum(entries, [])


def problems(entries: list[dict]) -> dict:
    """Problems of all files by kind, as [count, first row]."""
    return {kind: [held["count"], held["first_row"]] for e in entries for kind, held in e["problems"].items()}


def pack(content: bytes, path: Path) -> Path:
    if path.suffix == ".gz" or path.suffix == ".tgz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = zstandard.compress(content)
    path.write_bytes(content)
    return path


def lines(rows: list) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def archive(members: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return target.getvalue()
