"""The corpus of a run from existing token files: a folder of prepare_data.py, or prefixes of Megatron-LM's tool."""

import hashlib
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..config.checks import refuse
from ..config.data import DataConfig, TokenizerConfig
from ..config.family import CorpusForm
from .bert_index import usable_documents
from .indexed_dataset import CorpusPart, IndexedDataset
from .tokenizer import Tokenizer, load_published_tokenizer, read_tokenizer, write_tokenizer

MANIFEST, MANIFEST_FORMAT = "manifest.json", 1  # of a folder of prepare_data.py
TOKENIZER = "tokenizer.json"
_NUM_PROBES, _PROBE = 64, 1 << 16  # excerpts that represent a token file, and their size in bytes


class IndexedCorpus:
    """The corpus of `data=indexed`, opened without reading whole token files; see `prepare_corpus`.

    The constructor reads no token file: it only checks that they exist and are for the model's family.

    Raises:
        ValueError: files are missing, or a folder was prepared for another family.
    """

    shuffles_documents = True

    def __init__(self, data: DataConfig, form: CorpusForm) -> None:
        self.data, self.form = data, form
        paths = {"train": "path"} | ({} if data.validation_path is None else {"validation": "validation_path"})
        self.sources = {split: _Sources(getattr(data, key), key, form) for split, key in paths.items()}

    def load_tokenizer(self, config: TokenizerConfig, model_vocab_size: int | None, cache: Path) -> Tokenizer:
        """Return the tokenizer stored with the datasets, or the published one named by `tokenizer`.

        Raises:
            ValueError: there is none, several differ, or it lacks a special token of the family.
            OSError: the published one cannot be written into the cache.
        """
        if config.vocab_size is not None:
            rule = "null when `data` is indexed, whose tokenizer is fixed"
            refuse("tokenizer.vocab_size", rule, config.vocab_size)
        folders = [path for held in self.sources.values() for path in held.folders]
        found = {folder: read_tokenizer(folder / TOKENIZER) for folder in folders if (folder / TOKENIZER).is_file()}
        where = [str(folder / TOKENIZER) for folder in found]
        named = load_published_tokenizer(config, self.form.name) if config.kind != "trained" else None
        if named is not None:
            found.setdefault(cache / "tokenizers" / named.file_hash[:24], named)
            where.append(f"that of tokenizer={config.kind}")
        if not found:
            raise ValueError(
                f"`tokenizer` must be gpt2 or bert if there is no {TOKENIZER} beside the dataset, but is {config.kind} "
                f"and {folders[0]} has none"
            )
        if len({tokenizer.fingerprint for tokenizer in found.values()}) > 1:
            way_out = "prepare all texts with one tokenizer" if named is None else "leave tokenizer= out"
            differ = " and ".join(where)
            raise ValueError(f"`tokenizer` must be the one of all datasets, but {differ} differ; {way_out}")
        self.folder, loaded = next(iter(found.items()))
        if not (self.folder / TOKENIZER).is_file():
            write_tokenizer(loaded.inner, self.folder / TOKENIZER)
        for token in self.form.special_tokens:
            if loaded.inner.token_to_id(token) is None:
                raise ValueError(
                    f"`data.path` must be prepared for {self.form.name} (the model), but the tokenizer of "
                    f"{self.folder} has no {token}; prepare the text again with architecture={self.form.name}"
                )
        return loaded

    def open(self, tokenizer: Tokenizer, cache: Path) -> tuple[Path, dict, dict[str, tuple[CorpusPart, ...]]]:
        """Return the tokenizer's folder, the manifest and the parts by split, for `PreparedCorpus`.

        Raises:
            ValueError: files are damaged, the tokenizer is not the dataset's, ids are outside its vocabulary, or a
                split has no documents.
        """
        for held in self.sources.values():
            held.check_tokenizer(tokenizer)
        parts = _split(self.sources, self.data)
        datasets = {part.prefix: IndexedDataset(part.prefix) for held in parts.values() for part in held}
        for dataset in datasets.values():
            _probe_ids(dataset, tokenizer.vocab_size)
        manifest = {split: _counts(held, datasets) for split, held in parts.items()}
        manifest |= {"architecture": self.form.name, "tokenizer": tokenizer.fingerprint}
        manifest["vocab_size"] = tokenizer.vocab_size
        manifest["notes"] = _notes(parts["train"], datasets) if self.form.sequence == "sentence" else []
        return self.folder, manifest, parts


class _Sources:
    """The datasets of `data.path` or `data.validation_path`: weights by prefix, or the manifest of a folder.

    Raises:
        ValueError: a file is missing, or the folder was prepared for another kind of model.
    """

    def __init__(self, path: str | dict[str, float], key: str, form: CorpusForm) -> None:
        self.key, self.manifest, self.root = key, None, None
        if isinstance(path, dict):
            self.prefixes = dict(path)
        elif Path(path).is_dir():
            self.root, self.manifest = Path(path).absolute(), _read_manifest(Path(path), key)
        else:
            self.prefixes = {path: 1.0}
        if self.manifest is None:
            for prefix in self.prefixes:
                if not Path(f"{prefix}.idx").is_file():
                    raise ValueError(
                        f"`data.{key}` must be a folder of prepare_data.py or the path of a .bin and .idx without "
                        f"suffix, but there is no {prefix}.idx"
                    )
        elif self.manifest["architecture"] != form.name:
            raise ValueError(
                f"`data.{key}` must be prepared for {form.name} (the model), but {self.root} is for "
                f"{self.manifest['architecture']}; prepare the text again with architecture={form.name}, or choose a "
                f"{self.manifest['architecture']} with model="
            )

    @property
    def folders(self) -> list[Path]:
        """Folders that may hold a tokenizer.json."""
        return [self.root] if self.root else sorted({Path(prefix).absolute().parent for prefix in self.prefixes})

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise an error if the folder was prepared with another tokenizer."""
        if self.manifest is not None and self.manifest["tokenizer"] != tokenizer.fingerprint:
            raise ValueError(
                f"`tokenizer` must be the one that `data.{self.key}` was prepared with, but is another; prepare "
                "training and validation text with one tokenizer"
            )

    def whole(self, splits: Iterable[str] = ("train",)) -> list[CorpusPart]:
        """Return all documents of every dataset; of a folder, those of the first existing split of `splits`."""
        if self.manifest is None:
            return [_part(prefix, weight) for prefix, weight in self.prefixes.items()]
        parts = []
        for name, source in self.manifest["sources"].items():
            split = next((split for split in splits if split in source), None)
            if split is not None:
                part = _part(str(self.root / source[split]["prefix"]), source["weight"], source[split]["sha256"])
                if part.last != source[split]["documents"]:
                    raise ValueError(
                        f"{part.prefix}.idx must have the {source[split]['documents']} documents of {MANIFEST}, but "
                        f"has {part.last}: {name} has changed since it was prepared"
                    )
                parts.append(part)
        return parts


def _split(sources: dict[str, _Sources], data: DataConfig) -> dict[str, tuple[CorpusPart, ...]]:
    """Return training and validation parts, from `data.validation_path`, the folder's splits, or `data.split`."""
    train = sources["train"]
    if "validation" in sources:
        parts = {"train": train.whole(), "validation": sources["validation"].whole(("validation", "train"))}
    elif train.manifest is not None:
        parts = {"train": train.whole(), "validation": train.whole(("validation",))}
    else:
        parts = {"train": [], "validation": []}
        for part in train.whole():
            ranges = split_documents(part.last, data.split_shares())
            for split, (first, last) in zip(parts, ranges[:2], strict=True):
                parts[split].append(CorpusPart(part.prefix, first, last, part.identity, part.weight))
    for split, held in parts.items():
        empty = [part.prefix for part in held if part.first == part.last]
        if not held or empty:
            which = f"{empty[0]} has none" if empty else "there is no dataset"
            raise ValueError(f"`data` must have documents for {split}, but {which} (data.split, data.validation_path)")
    return {split: tuple(held) for split, held in parts.items()}


def split_documents(num_documents: int, shares: tuple[float, ...]) -> list[tuple[int, int]]:
    """Divide documents into contiguous ranges of the given shares.

    Each bound is the previous one plus the rounded share; the excess of the last bound is subtracted from all.

    Source: Megatron-LM's get_train_valid_test_split_.
    """
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + int(round(share * num_documents)))
    surplus = bounds[-1] - num_documents
    bounds[1:] = [bound - surplus for bound in bounds[1:]]
    return [(first, max(first, last)) for first, last in zip(bounds[:-1], bounds[1:], strict=True)]


def _part(prefix: str, weight: float, digest: str = "") -> CorpusPart:
    prefix = os.path.abspath(prefix)
    dataset = IndexedDataset(prefix)
    return CorpusPart(prefix, 0, dataset.num_documents, digest + identity_of(dataset), float(weight))


def identity_of(dataset: IndexedDataset) -> str:
    """Hash the whole index and excerpts of the tokens, which may be too many to read at every start.

    Only 64 excerpts of 64 KiB are read, so a change of some tokens that keeps all sizes may go undetected.
    """
    with open(f"{dataset.prefix}.idx", "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    for excerpt in _excerpts(dataset):
        digest.update(excerpt.tobytes())
    return digest.hexdigest()[:32]


def _excerpts(dataset: IndexedDataset) -> Iterable[np.ndarray]:
    length = _PROBE // dataset.dtype.itemsize
    if dataset.num_tokens <= _NUM_PROBES * length:
        yield dataset.tokens
        return
    for number in range(_NUM_PROBES):
        start = (dataset.num_tokens - length) * number // (_NUM_PROBES - 1)
        yield dataset.tokens[start : start + length]


def _probe_ids(dataset: IndexedDataset, vocab_size: int) -> None:
    """Check, before anything starts, that the ids of the excerpts are within the vocabulary."""
    if dataset.dtype.kind == "f":
        raise ValueError(f"{dataset.prefix}.idx: tokens must be whole numbers, but are {dataset.dtype.name}")
    for ids in _excerpts(dataset):
        if len(ids) and (ids.max() >= vocab_size or ids.min() < 0):
            wrong = ids.max() if ids.max() >= vocab_size else ids.min()
            raise ValueError(
                f"{dataset.prefix}.bin: ids must be from 0 to {vocab_size - 1} (the tokenizer's), but there is {wrong}"
            )


def _counts(parts: tuple[CorpusPart, ...], datasets: dict[str, IndexedDataset]) -> dict:
    """Describe a split for the record of a run."""
    sources, identities = [], []
    for part in parts:
        start, end = datasets[part.prefix].document_starts(np.array([part.first, part.last])).tolist()
        counts = {"documents": part.last - part.first, "tokens": end - start}
        sources.append(counts | {"prefix": part.prefix, "weight": part.weight})
        identities.append((part.identity, part.first, part.last, part.weight))
    totals = {key: sum(source[key] for source in sources) for key in ("documents", "tokens")}
    return totals | {"sources": sources, "sha256": hashlib.sha256(repr(identities).encode()).hexdigest()}


def _notes(parts: tuple[CorpusPart, ...], datasets: dict[str, IndexedDataset]) -> list[str]:
    """Return one line per dataset that has skipped documents."""
    notes = []
    for part in parts:
        chunks = usable_documents(datasets[part.prefix], part.first, part.last)
        left_out = part.last - part.first - sum(len(starts) for starts, _ in chunks)
        if left_out:
            notes.append(
                f"{Path(part.prefix).name}: {left_out:,} of {part.last - part.first:,} documents have fewer than two "
                "sentences or one of more than 512 tokens and are skipped"
            )
    return notes


def _read_manifest(folder: Path, key: str) -> dict:
    """Read the manifest of a folder of prepare_data.py.

    Args:
        key: the key below `data` that names the folder, for messages.

    Raises:
        ValueError: it is missing, cannot be read, or lacks something that a run needs.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"`data.{key}` must be a folder of prepare_data.py or the path of a .bin and .idx without suffix, but "
            f"{folder} is a folder without {MANIFEST}"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    found = manifest.get("format") if isinstance(manifest, dict) else manifest
    if not isinstance(manifest, dict) or found != MANIFEST_FORMAT:
        raise ValueError(f"{path}: `format` must be {MANIFEST_FORMAT}, but is {repr(found)[:40]}")
    try:
        _check_manifest(manifest)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must be a manifest of prepare_data.py, but fails with {error!r}"[:300]) from None
    return manifest


def _check_manifest(manifest: dict) -> None:
    """Raise a LookupError, TypeError or AttributeError if what a run needs is missing or of a different type."""
    texts = [manifest["architecture"], manifest["tokenizer"], *manifest["sources"]]
    for source in manifest["sources"].values():
        if type(source["weight"]) not in (int, float) or not 0 <= source["weight"] < math.inf:
            raise TypeError(f"weight {source['weight']!r}")
        for split in source.keys() & {"train", "validation"}:
            texts += [source[split]["prefix"], source[split]["sha256"]]
            if type(source[split]["documents"]) is not int:
                raise TypeError(f"documents {source[split]['documents']!r}")
    for text in texts:
        if not text.isprintable():
            raise TypeError(f"text {text!r}")
