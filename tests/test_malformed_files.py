"""Readers accept or refuse malformed files: checkpoints, token files, manifests, weights and benchmark files.

A refusal is our ValueError of one line. Hypothesis changes values of valid files, with checksums and lengths corrected,
and bytes. `pytest -m slow tests/test_malformed_files.py` tries many new inputs.
"""

import copy
import gzip
import json
import resource
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from corpora import write_dataset
from finetuning import make_task
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from lmscale.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointMetadata,
    CheckpointVersionError,
    TensorEntry,
    list_checkpoints,
    metadata,
)
from lmscale.checkpoint.model_tensors import model_shapes
from lmscale.checkpoint.offline import write_offline
from lmscale.config import TransformerConfig
from lmscale.config.data import DataConfig, TokenizerConfig
from lmscale.config.finetune import TaskConfig
from lmscale.data import indexed_dataset
from lmscale.data.indexed_dataset import IndexedDataset
from lmscale.data.prepare import prepare_corpus
from lmscale.data.tokenizer import read_tokenizer
from lmscale.finetune.tasks import read_examples
from lmscale.hugging_face.config import config_from_hf
from lmscale.hugging_face.files import HuggingFaceReader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
MAX_BYTES, MAX_TIME = 256 << 20, timedelta(seconds=30)
DEEP, DIGITS = "@deep", "@digits"  # values that `render` writes as nested lists and as a long number
VALUES = [None, True, 0, 1, -1, 7, 2**31, 2**63 - 1, -(2**63), 2**64, 1.5, -0.5, 1e308, float("nan"), float("inf")]
VALUES += ["", "\n", "a\nb", "\u2028", "\ud800", "\x00", "..", "../x.safetensors", "F32", "BF16", "1", [], {}, [None]]
VALUES += [DEEP, DIGITS]
# Which file, which of its values or bytes, and the new value or byte; None in second place: the value goes.
CHANGES = st.lists(
    st.tuples(st.integers(0, 99), st.integers(0, 9999), st.integers(0, 3), st.sampled_from(VALUES)),
    min_size=1,
    max_size=3,
)


def render(tree: Any, **options: Any) -> bytes:
    text = json.dumps(tree, **options).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)
    return text.replace(f'"{DIGITS}"', "9" * 5000).encode()


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from places(value)


def change_tree(tree: Any, place: int, action: int, value: Any) -> Any:
    found = list(places(tree))
    if not found:
        return value
    parent, key = found[place % len(found)]
    if action == 0:
        del parent[key]
    elif action == 1 and isinstance(parent[key], (int, str)):  # a value nearby
        parent[key] = parent[key] + (1 if isinstance(parent[key], int) else "\n")
    else:
        parent[key] = copy.deepcopy(value)
    return tree


def change_bytes(data: bytes, place: int, action: int, value: Any) -> bytes:
    place %= len(data) + 1
    if action == 0:
        return data[:place]
    new = (value % 2**64).to_bytes(8, "little") if isinstance(value, int) and action == 1 else bytes([place % 256])
    return data[:place] + new + data[place + len(new) :]


def change_file(path: Path, place: int, action: int, value: Any) -> None:
    """Change one value of a file, or its bytes."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.compress(change_bytes(gzip.decompress(data), place, action, value), mtime=0)
    elif path.suffix == ".json" and action < 3:
        tree = change_tree(json.loads(data), place, action, value)
        if path.name == metadata.METADATA and isinstance(tree, dict) and tree.pop("checksum", None):
            text = render(tree, sort_keys=True, separators=(",", ":"))
            tree = {"checksum": xxhash.xxh3_128_hexdigest(text)} | tree
        data = render(tree)
    elif path.suffix == ".safetensors" and action < 3:
        stop = 8 + int.from_bytes(data[:8], "little")
        header = render(change_tree(json.loads(data[8:stop]), place, action, value), separators=(",", ":"))
        data = len(header).to_bytes(8, "little") + header + data[stop:]
    elif path.suffix == ".tsv" and action < 3:
        rows = change_tree([line.split("\t") for line in data.decode().splitlines()], place, action, value)
        rows = [row if isinstance(row, list) else [row] for row in rows]
        data = "\n".join("\t".join(map(str, row)) for row in rows).encode("utf-8", "surrogatepass")
    else:
        data = change_bytes(data, place, action, value)
    path.write_bytes(data)


def write_checkpoint(folder: Path) -> None:
    model = {"family": "gpt", "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    model |= {"vocab_multiple": 8, "max_position_embeddings": 8, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    tensors = {
        f"{kind}/{name}": (torch.ones(shape, dtype=dtype), dim)
        for name, (shape, dim) in model_shapes(TransformerConfig.from_dict(model)).items()
        for kind, dtype in (("model", torch.float32), ("exp_avg", torch.bfloat16), ("exp_avg_sq", torch.float64))
    }
    entries = {key: TensorEntry(tuple(t.shape), t.dtype, dim) for key, (t, dim) in tensors.items()}
    counters = {"num_updates": 5, "loss_scale": 1.0}
    about = CheckpointMetadata(5, {"tp_size": 1, "dp_size": 1}, model, entries, {}, counters, {"name": "x"}, {"a": 1})
    write_offline(str(folder), about, 2, [(key, t) for key, (t, _) in sorted(tensors.items())])


def read_checkpoint(folder: Path) -> None:
    """All that resuming, evaluation and conversion read."""
    (path,) = list_checkpoints(folder)
    checkpoint = Checkpoint.open(path)
    with checkpoint.reader() as reader:
        for key, entry in checkpoint.metadata.tensors.items():
            reader.read(key)
            if entry.shape and entry.shard_dim in (None, 0):
                reader.read(key, 0, entry.shape[0])
    checkpoint.check_intact()
    checkpoint.model_config()


def write_indexed(folder: Path) -> None:
    for name in ("a", "b"):
        write_dataset(folder / name, [[[number, 1, 2], []] for number in range(4)])


def read_indexed(folder: Path) -> None:
    indexed_dataset._VALIDATED.clear()
    for name in ("a", "b"):
        dataset = IndexedDataset(folder / name)
        dataset.tokens.sum()
        starts = dataset.document_starts(np.arange(dataset.num_documents))
        dataset.read_ranges(starts, dataset.document_sizes(0, dataset.num_documents).astype(np.int64), 100)


def write_prepared(folder: Path) -> None:
    text = folder.parent / "text.txt"
    text.write_text("\n\n".join(f"Number {i} is here. It has {7 * i} words." for i in range(40)))
    config = DataConfig("local", 16, str(text), cache_dir=str(folder.parent / "cache"))
    corpus = prepare_corpus(config, TokenizerConfig("trained", vocab_size=290), "gpt", None)
    shutil.copyfile(Path(corpus.folder) / "tokenizer.json", folder / "tokenizer.json")
    write_indexed(folder)
    fingerprint = read_tokenizer(folder / "tokenizer.json").fingerprint
    split = {"prefix": "a", "documents": 4, "tokens": 12, "sha256": "1"}
    sources = {"x": {"weight": 3.0, "train": split, "validation": split | {"prefix": "b"}}}
    manifest = {"format": 1, "architecture": "gpt", "tokenizer": fingerprint, "vocab_size": 290, "sources": sources}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def read_prepared(folder: Path) -> None:
    config = DataConfig("indexed", 16, str(folder), cache_dir=str(folder.parent / "cache"), split="8,2,0")
    prepare_corpus(config, TokenizerConfig("trained"), "gpt", None)


def write_hugging_face(folder: Path) -> None:
    sizes = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
    (folder / "config.json").write_text(json.dumps(sizes))
    save_file({"transformer.wte.weight": torch.zeros(4, 2)}, folder / "model-1.safetensors")
    save_file({"ln_f.bias": torch.zeros(4, dtype=torch.bfloat16)}, folder / "model-2.safetensors")
    names = {"transformer.wte.weight": "model-1.safetensors", "ln_f.bias": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def read_hugging_face(folder: Path) -> None:
    with HuggingFaceReader(folder) as reader:
        config_from_hf(reader.values)
        for name in sorted(reader.names()):
            reader.read(name)
        reader.check_aliases()


_ANSWER = {"text": "context", "answer_start": 2}
_QUESTION = {"id": "q1", "question": "What?", "answers": [_ANSWER, _ANSWER], "is_impossible": False}
_SQUAD = {"version": "x", "data": [{"title": "T", "paragraphs": [{"context": "A context.", "qas": [_QUESTION]}]}]}
_RACE = {"article": "An article.", "questions": ["What _ ?"], "options": [["a", "b", "c", "d"]], "answers": ["A"]}
EXAMPLES = {  # task -> name and content of its file
    "squad_v1": ("x.json", json.dumps(_SQUAD)),
    "squad_v2": ("x.json", json.dumps(_SQUAD)),
    "race": ("1.json", json.dumps(_RACE | {"id": "middle1.txt"})),
    "table": ("x.jsonl", json.dumps({"n": 1, "a": "t", "b": "u", "c": "no"})),
    "mnli": ("x.tsv", "index\tsentence1\tsentence2\tgold_label\n0\tone\ttwo\tneutral"),
    "qqp": ("x.tsv", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\tone\ttwo\t1"),
    "cola": ("x.tsv", "gj04\t1\t\tOne sleeps .\nks08\t0\t*\tOne sleep ."),
    "stsb": ("x.tsv", "index\tsentence1\tsentence2\tscore\n0\tone\ttwo\t3.2"),
}
TABLE = {"columns": {"id": "n", "first": "a", "second": "b", "label": "c"}, "labels": ["no", "yes"]}


def write_examples(task: str) -> Callable[[Path], None]:
    file, text = EXAMPLES[task]
    return lambda folder: (folder / file).write_text(text) and None


def read_task(task: str) -> Callable[[Path], None]:
    config = TaskConfig(task, None, {}, **TABLE) if task == "table" else make_task(task)
    return lambda folder: read_examples(config, str(next(folder.iterdir()))) and None


READERS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "checkpoint": (write_checkpoint, read_checkpoint),
    "indexed": (write_indexed, read_indexed),
    "prepared": (write_prepared, read_prepared),
    "hugging_face": (write_hugging_face, read_hugging_face),
} | {task: (write_examples(task), read_task(task)) for task in EXAMPLES}


@contextmanager
def limited_memory() -> Iterator[None]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def is_accepted(read: Callable[[Path], None], folder: Path) -> bool:
    """Read a folder.

    Raises:
        Exception: what the reader raised, if it is not a ValueError of one line that the package raises itself.
    """
    try:
        with limited_memory():
            read(folder)
    except (ValueError, CheckpointError, CheckpointVersionError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if (
            len(str(error).splitlines()) != 1
            or "/lmscale/" not in frame.filename
            or not frame.line.startswith("raise ")
        ):
            raise
        return False
    return True


@pytest.fixture(scope="module", params=READERS)
def valid(request, tmp_path_factory) -> tuple[Path, Callable[[Path], None]]:
    """A folder of valid files, and what reads it."""
    write, read = READERS[request.param]
    folder = tmp_path_factory.mktemp(request.param) / "valid"
    folder.mkdir()
    write(folder)
    assert is_accepted(read, folder)
    return folder, read


def try_changes(valid: tuple[Path, Callable[[Path], None]], changes: list[tuple]) -> bool:
    folder, read = valid
    changed = folder.parent / "changed"
    shutil.rmtree(changed, ignore_errors=True)
    shutil.copytree(folder, changed)
    files = sorted(path for path in changed.rglob("*") if path.is_file())
    for file, *change in changes:
        try:
            change_file(files[file % len(files)], *change)
        except (ValueError, RecursionError, AttributeError, TypeError):  # an earlier change has made it unreadable
            break
    return is_accepted(read, changed)


@settings(max_examples=30, deadline=MAX_TIME, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(changes=CHANGES)
def test_a_malformed_file_is_accepted_or_refused_in_one_line(valid, changes) -> None:
    try_changes(valid, changes)


@pytest.mark.slow
@settings(max_examples=2000, deadline=MAX_TIME, suppress_health_check=list(HealthCheck))
@given(changes=CHANGES)
def test_many_malformed_files_are_accepted_or_refused_in_one_line(valid, changes) -> None:
    try_changes(valid, changes)
