"""What `fuzz_readers.py` fuzzes: for each reader valid inputs, how a tree becomes files, and what is read from them."""

import base64
import dataclasses
import gzip
import json
import shutil
import struct
import tempfile
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from lmscale.checkpoint import CheckpointMetadata, CheckpointReader, TensorEntry, find_damage, list_checkpoints
from lmscale.checkpoint.hf_config import config_from_hf
from lmscale.checkpoint.hf_files import HuggingFaceReader
from lmscale.checkpoint.model_tensors import model_shapes
from lmscale.checkpoint.offline import write_offline
from lmscale.checkpoint.reshard import open_source
from lmscale.checkpoint.tensor_file import TensorFileReader
from lmscale.config import TransformerConfig
from lmscale.config.data import DataConfig, TokenizerConfig
from lmscale.config.finetune import TaskConfig
from lmscale.data import indexed_dataset
from lmscale.data.indexed_dataset import HEADER, IndexedDataset
from lmscale.data.indexed_writer import IndexedWriter
from lmscale.data.prepare import prepare_corpus
from lmscale.data.tokenizer import read_tokenizer
from lmscale.finetune.tasks import read_examples

DEEP, DIGITS = "@deep", "@digits"  # in a tree: nested lists and a long number, see `render`
MODEL = {"family": "gpt", "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
MODEL |= {"vocab_multiple": 8, "max_position_embeddings": 8, "hidden_dropout": 0.0, "attention_dropout": 0.0}


@dataclasses.dataclass(frozen=True)
class Target:
    """A reader.

    Attributes:
        seeds: valid inputs as trees.
        write: turns a tree into files in an empty folder (or one with the content of `base`).
        read: reads them.
        prepare: writes what all inputs share, into the folder `base` of a working folder.
    """

    name: str
    seeds: Callable[[], list[Any]]
    write: Callable[[Any, Path], None]
    read: Callable[[Path], None]
    prepare: Callable[[Path], None] = lambda work: None


def render(value: Any, **options: Any) -> bytes:
    """JSON of a tree; `@deep<n>` becomes n nested lists, `@digits` a number of 5,000 digits."""
    parts = json.dumps(value, **options).split(f'"{DEEP}')
    for number, part in enumerate(parts[1:], start=1):
        depth, rest = part.split('"', 1)
        levels = int(depth) if depth.isdigit() and len(depth) < 7 else 3
        parts[number] = "[" * levels + "]" * levels + rest
    return "".join(parts).replace(f'"{DIGITS}"', "9" * 5000).encode()


def edited(data: bytes, edits: Any) -> bytes:
    """Bytes after edits [position, value], where value is a byte or null: the end."""
    for position, value in edits:
        position %= len(data) + 1
        data = data[:position] + (b"" if value is None else bytes([value % 256]) + data[position + 1 :])
    return data


def write_checkpoint(tree: Any, folder: Path) -> None:
    """`metadata` with a correct checksum (unless it has one), `headers` and `sizes` of files by name."""
    path = folder / "step_5.ckpt"
    path.mkdir()
    values = tree["metadata"]
    if isinstance(values, dict) and "checksum" not in values:
        text = render(values, sort_keys=True, separators=(",", ":"))
        values = {"checksum": xxhash.xxh3_128_hexdigest(text)} | values
    (path / "metadata.json").write_bytes(edited(render(values), tree["edits"]))
    for name, file in tree["files"].items():
        if "/" not in name:
            (path / name).write_bytes(render_tensors(file))


def render_tensors(file: dict) -> bytes:
    """A safetensors file of a header, whose length is right unless given, and base64 data."""
    header = render(file["header"], separators=(",", ":"))
    header += b" " * (-len(header) % 8)
    length = len(header) if file["length"] is None else file["length"] % 2**64
    return edited(length.to_bytes(8, "little") + header + base64.b64decode(file["data"]), file["edits"])


def parse_tensors(path: Path) -> dict:
    """The inverse of `render_tensors`."""
    data = path.read_bytes()
    stop = 8 + int.from_bytes(data[:8], "little")
    return {
        "header": json.loads(data[8:stop]),
        "length": None,
        "data": base64.b64encode(data[stop:]).decode(),
        "edits": [],
    }


def checkpoint_seeds() -> list[Any]:
    """Checkpoints of two layouts."""
    generator, found = torch.Generator().manual_seed(1), []
    dtypes, tensors = cycle((torch.float32, torch.bfloat16, torch.float64)), {}
    for name, (shape, dim) in model_shapes(TransformerConfig.from_dict(MODEL)).items():
        for kind in ("model", "exp_avg", "exp_avg_sq"):
            tensors[f"{kind}/{name}"] = torch.randn(shape, generator=generator).to(next(dtypes)), dim
    entries = {key: TensorEntry(tuple(t.shape), t.dtype, dim) for key, (t, dim) in tensors.items()}
    optimizer = {"num_updates": 5, "loss_scale": 1.0}
    metadata = CheckpointMetadata(
        5, {"tp_size": 1, "dp_size": 1}, MODEL, entries, {}, optimizer, {"name": "x"}, {"a": 1}
    )
    for tp_size in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            path = write_offline(folder, metadata, tp_size, [(key, t) for key, (t, _) in sorted(tensors.items())])
            values = json.loads((path / "metadata.json").read_text())
            del values["checksum"]
            files = {file.name: parse_tensors(file) for file in path.glob("*.safetensors")}
            found.append({"metadata": values, "files": files, "edits": []})
    return found


def read_checkpoint(folder: Path) -> None:
    """Everything that resuming, evaluation and conversion read; tensors also if they are damaged."""
    (path,) = list_checkpoints(folder)
    with CheckpointReader(path) as reader:
        for key, entry in reader.metadata.tensors.items():
            reader.read(key)
            if entry.shard_dim is not None and entry.shape[entry.shard_dim] % 2 == 0:
                reader.read(key, 1, 2)
            if entry.shape:
                reader.read_rows(key, 0, entry.shape[0])
        find_damage(path, reader.metadata)
    open_source(path)


def write_tensors(tree: Any, folder: Path) -> None:
    """One safetensors file."""
    (folder / "x.safetensors").write_bytes(render_tensors(tree))


def read_tensors(folder: Path) -> None:
    """All tensors of it."""
    with TensorFileReader(folder / "x.safetensors") as file:
        for name in file.entries:
            file.read(name)
            file.checksum(name)


def write_indexed(tree: Any, folder: Path) -> None:
    """The fields of an `.idx`, and the tokens."""
    head = tree["magic"].encode("latin-1")[:9], tree["version"] % 2**64, tree["code"] % 256
    data = HEADER.pack(*head, tree["n"] % 2**64, tree["m"] % 2**64)
    for name, kind, bits in (("sizes", "i", 32), ("pointers", "q", 64), ("documents", "q", 64)):
        half = 1 << (bits - 1)
        data += b"".join(struct.pack(f"<{kind}", (value + half) % (2 * half) - half) for value in tree[name])
    (folder / "x.idx").write_bytes(edited(data, tree["edits"]))
    tokens = np.array([token % 2**16 for token in tree["tokens"]], dtype="<u2")
    (folder / "x.bin").write_bytes(tokens.tobytes() + b"\0" * (tree["odd"] % 8))


def indexed_seeds() -> list[Any]:
    """Documents of one and of several sequences."""
    found = []
    for sizes, documents in (([3, 0, 2], [0, 1, 2, 3]), ([2, 2, 1, 4], [0, 2, 2, 4]), ([], [0])):
        pointers = np.cumsum([0, *sizes])[:-1].tolist() if sizes else []
        tree = {"magic": "MMIDIDX\0\0", "version": 1, "code": 8, "n": len(sizes), "m": len(documents), "sizes": sizes}
        tree |= {"pointers": [2 * p for p in pointers], "documents": documents, "tokens": list(range(sum(sizes)))}
        found.append(tree | {"odd": 0, "edits": []})
    return found


def read_indexed(folder: Path) -> None:
    """All sequences and documents."""
    indexed_dataset._VALIDATED.clear()
    dataset = IndexedDataset(folder / "x")
    for number in range(len(dataset)):
        dataset.sequence(number)
    starts = dataset.document_starts(np.arange(dataset.num_documents))
    dataset.read_ranges(starts, dataset.document_sizes(0, dataset.num_documents).astype(np.int64), 100)


def prepare_manifest(work: Path) -> None:
    """Two datasets and their tokenizer."""
    base = work / "base"
    base.mkdir()
    (work / "text.txt").write_text("\n\n".join(f"Number {i} is here. It has {7 * i} words." for i in range(40)))
    config = DataConfig("local", 16, str(work / "text.txt"), cache_dir=str(work / "cache"))
    corpus = prepare_corpus(config, TokenizerConfig("trained", vocab_size=290), "gpt", None)
    shutil.copyfile(Path(corpus.folder) / "tokenizer.json", base / "tokenizer.json")
    for name in ("a", "b"):
        writer = IndexedWriter(base / name, "uint16")
        for number in range(4):
            writer.add_document([[number, 1, 2]])
        writer.finish()
    fingerprint = read_tokenizer(base / "tokenizer.json").fingerprint
    MANIFEST.update({"format": 1, "architecture": "gpt", "tokenizer": fingerprint, "vocab_size": 290})
    split = {"prefix": "a", "documents": 4, "tokens": 12, "sha256": "1"}
    MANIFEST["sources"] = {"x": {"weight": 3.0, "train": split, "validation": split | {"prefix": "b"}}}


MANIFEST: dict[str, Any] = {}


def write_manifest(tree: Any, folder: Path) -> None:
    """`manifest.json` of a prepared folder."""
    (folder / "manifest.json").write_bytes(edited(render(tree["manifest"]), tree["edits"]))


def read_manifest(folder: Path) -> None:
    """Open the folder as a run does."""
    config = DataConfig("indexed", 16, str(folder), cache_dir=str(folder.parent / "cache"), split="8,2,0")
    prepare_corpus(config, TokenizerConfig("trained"), "gpt", None)


def hugging_face_seeds() -> list[Any]:
    """A GPT-2 in one file and in two with an index."""
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
    header = {"transformer.wte.weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}}
    other = {"ln_f.bias": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}
    one, two = (
        {"header": h, "length": None, "data": base64.b64encode(bytes(n)).decode(), "edits": []}
        for h, n in ((header, 32), (other, 8))
    )
    names = {"transformer.wte.weight": "model-1.safetensors", "ln_f.bias": "model-2.safetensors"}
    files = {"model-1.safetensors": one, "model-2.safetensors": two}
    whole = {"config": config, "index": None, "files": {"model.safetensors": one}, "edits": []}
    return [whole, whole | {"index": {"weight_map": names}, "files": files}]


def write_hugging_face(tree: Any, folder: Path) -> None:
    """`config.json`, weight files and perhaps an index."""
    (folder / "config.json").write_bytes(edited(render(tree["config"]), tree["edits"]))
    if tree["index"] is not None:
        (folder / "model.safetensors.index.json").write_bytes(render(tree["index"]))
    for name, file in tree["files"].items():
        if "/" not in name:
            (folder / name).write_bytes(render_tensors(file))


def read_hugging_face(folder: Path) -> None:
    """The configuration, and all tensors."""
    with HuggingFaceReader(folder) as reader:
        config_from_hf(reader.values)
        for name in sorted(reader.names()):
            reader.read(name)
        reader.check_aliases()


def task_target(name: str, file: str, seeds: list[Any]) -> Target:
    """A benchmark file: JSON, JSON lines or a table, also compressed."""

    def write(tree: Any, folder: Path) -> None:
        content = tree["content"]
        if file.endswith(".json"):
            data = render(content)
        elif file.endswith(".tsv"):
            text = "\n".join("\t".join(str(cell) for cell in row) for row in content)
            data = text.encode("utf-8", "surrogatepass")
        else:
            data = b"\n".join(render(line) for line in content)
        path = folder / f"{file}{'.gz' if tree['gzip'] else ''}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(edited(gzip.compress(data, mtime=0) if tree["gzip"] else data, tree["edits"]))

    def read(folder: Path) -> None:
        (path,) = (path for path in folder.rglob("*") if path.is_file())
        read_examples(TaskConfig(name, None, {}, {}, "none", **LENGTHS, **COLUMNS.get(name, {})), str(path))

    trees = [{"content": seed, "gzip": zipped, "edits": []} for seed in seeds for zipped in (0, 1)]
    return Target(name, lambda: trees, write, read)


COLUMNS = {"table": {"columns": {"id": "n", "first": "a", "second": "b", "label": "c"}, "labels": ["no", "yes"]}}
LENGTHS = {"max_seq_length": 40, "max_qa_length": 16, "doc_stride": 8, "max_query_length": 12}
LENGTHS |= {"max_answer_length": 8, "num_best": 5}
_PASSAGE = {"article": "An article.", "questions": ["What _ ?", "Why?"], "options": [["a", "b", "c", "d"]] * 2}
_PASSAGE |= {"answers": ["A", "D"], "id": "middle1.txt"}


def squad(version_2: bool) -> Any:
    """SQuAD's JSON with two questions."""
    answer = {"text": "context", "answer_start": 2}
    qas = [{"id": "q1", "question": "What?", "answers": [answer, answer]}]
    qas += [{"id": "q2", "question": "Why?", "answers": [] if version_2 else [answer]}]
    if version_2:
        qas = [qa | {"is_impossible": not qa["answers"]} for qa in qas]
    return {"version": "x", "data": [{"title": "T", "paragraphs": [{"context": "A context.", "qas": qas}]}]}


_MNLI = ["index", "genre", "sentence1", "sentence2", "gold_label"]
_QQP = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]


def pairs(header: list[str], *labels: str) -> list[list[str]]:
    """A table of two rows with these labels."""
    return [
        header,
        *([str(row), *(f"{name} {row}" for name in header[1:-1]), label] for row, label in enumerate(labels)),
    ]


TARGETS = {
    target.name: target
    for target in (
        Target("checkpoint", checkpoint_seeds, write_checkpoint, read_checkpoint),
        Target(
            "tensors",
            lambda: [f for tree in checkpoint_seeds() for f in tree["files"].values()],
            write_tensors,
            read_tensors,
        ),
        Target("indexed", indexed_seeds, write_indexed, read_indexed),
        Target(
            "manifest", lambda: [{"manifest": MANIFEST, "edits": []}], write_manifest, read_manifest, prepare_manifest
        ),
        Target("hugging_face", hugging_face_seeds, write_hugging_face, read_hugging_face),
        task_target("squad_v1", "x.json", [squad(False)]),
        task_target("squad_v2", "x.json", [squad(True)]),
        task_target("mnli", "x.tsv", [pairs(_MNLI, "neutral", "entailment"), pairs(_MNLI[:4] + ["x"], "", "")]),
        task_target("qqp", "x.tsv", [pairs(_QQP, "0", "1"), pairs(["id", "question1", "question2", "x"], "", "")]),
        task_target("race", "middle/1.txt", [[_PASSAGE]]),
        task_target(
            "table", "x.jsonl", [[{"n": 1, "a": "t", "b": "u", "c": "no"}, {"n": 2, "a": "v", "b": "w", "c": 1}]]
        ),
    )
}
