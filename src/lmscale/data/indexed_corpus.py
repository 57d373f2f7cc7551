"""Binary datasets as the corpus of a run: a folder of prepare_data.py, or prefixes of Megatron-LM's own tool."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..config.data import DataConfig, TokenizerConfig
from ..config.family import CorpusForm, family_of
from .bert_index import usable_documents
from .indexed_dataset import IndexedDataset
from .prepared import CorpusPart, PreparedCorpus
from .tokenizer import Tokenizer, load_published_tokenizer, read_tokenizer

INDEX_FOLDER = "indices"  # in the cache
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
MANIFEST_FORMAT = 1
_NUM_PROBES, _PROBE = 64, 1 << 16  # stretches of a token file that stand for it, and their bytes


def open_indexed(
    data: DataConfig, tokenizer: TokenizerConfig, architecture: str, model_vocab_size: int | None, cache: Path
) -> PreparedCorpus:
    """The corpus that `data=indexed` names; no token file is read as a whole.

    Args:
        cache: folder for sample indices and the tokenizer of datasets that have none beside them.

    Raises:
        ValueError: files that are missing or damaged, a tokenizer that is missing or another than the dataset's, ids
            that it has not, or a model with fewer.
    """
    form, sources = family_of(architecture).corpus, {"train": _Sources(data.path, "path")}
    if data.validation_path is not None:
        sources["validation"] = _Sources(data.validation_path, "validation_path")
    for held in sources.values():
        held.check_form(form)
    loaded, folder = _find_tokenizer(
        [path for held in sources.values() for path in held.folders], tokenizer, cache, architecture
    )
    check_vocabulary(loaded, model_vocab_size)
    for held in sources.values():
        held.check_tokenizer(loaded)
    parts = _split(sources, data)
    datasets = {part.prefix: IndexedDataset(part.prefix) for held in parts.values() for part in held}
    for dataset in datasets.values():
        _probe_ids(dataset, loaded.vocab_size)
    manifest = {split: _counts(held, datasets) for split, held in parts.items()}
    manifest |= {"architecture": form.name, "tokenizer": loaded.fingerprint, "vocab_size": loaded.vocab_size}
    manifest["notes"] = _notes(parts["train"], datasets) if form.sequence == "sentence" else []
    return PreparedCorpus(
        str(folder),
        architecture,
        loaded.vocab_size,
        special_ids_of(loaded, form),
        manifest,
        parts,
        str(cache / INDEX_FOLDER),
        shuffles_documents=True,
    )


def check_indexed(data: DataConfig) -> None:
    """Refuse datasets whose files are not there, without reading any.

    Raises:
        ValueError: in that case.
    """
    if data.kind == "indexed":
        for key in ("path", "validation_path") if data.validation_path is not None else ("path",):
            _Sources(getattr(data, key), key)


def special_ids_of(tokenizer: Tokenizer, form: CorpusForm) -> dict[str, int]:
    """Ids of the special tokens that samples need.

    Raises:
        ValueError: the vocabulary lacks one.
    """
    return {token: tokenizer.id_of(token) for token in form.special_tokens}


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int | None) -> None:
    """Refuse a tokenizer with more ids than the model.

    Raises:
        ValueError: in that case.
    """
    if model_vocab_size is not None and tokenizer.vocab_size > model_vocab_size:
        raise ValueError(
            f"`model.vocab_size` must be at least the tokenizer's {tokenizer.vocab_size} ids, but is {model_vocab_size}"
        )


class _Sources:
    """What `data.path` or `data.validation_path` names: weights by prefix, and the manifest where it is a folder."""

    def __init__(self, path: str | dict[str, float], key: str) -> None:
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
                        f"the ending, but there is no {prefix}.idx"
                    )

    @property
    def folders(self) -> list[Path]:
        """Where a tokenizer.json may lie."""
        return [self.root] if self.root else sorted({Path(prefix).absolute().parent for prefix in self.prefixes})

    def check_form(self, form: CorpusForm) -> None:
        """Refuse a folder made for another kind of model."""
        if self.manifest is not None and self.manifest["architecture"] != form.name:
            raise ValueError(
                f"`data.{self.key}` must be prepared for {form.name} (the model), but {self.root} is for "
                f"{self.manifest['architecture']}"
            )

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse a folder made with another tokenizer."""
        if self.manifest is not None and self.manifest["tokenizer"] != tokenizer.fingerprint:
            raise ValueError(f"`tokenizer` must be the one that `data.{self.key}` was made with, but is another")

    def whole(self, splits: Iterable[str] = ("train",)) -> list[CorpusPart]:
        """All documents of every dataset; of a folder those of its first split of `splits` that there is."""
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
                        f"has {part.last}: {name} is not what was prepared"
                    )
                parts.append(part)
        return parts


def _split(sources: dict[str, _Sources], data: DataConfig) -> dict[str, tuple[CorpusPart, ...]]:
    """Training and validation parts, from another path, the folder's own, or by `data.split`."""
    train = sources["train"]
    if "validation" in sources:
        parts = {"train": train.whole(), "validation": sources["validation"].whole(("validation", "train"))}
    elif train.manifest is not None:
        parts = {"train": train.whole(), "validation": train.whole(("validation",))}
    else:
        parts = {"train": [], "validation": []}
        for part in train.whole():
            borders = split_documents(part.last, data.split_shares())
            for split, (first, last) in zip(parts, borders[:2], strict=True):
                parts[split].append(CorpusPart(part.prefix, first, last, part.identity, part.weight))
    for split, held in parts.items():
        empty = [part.prefix for part in held if part.first == part.last]
        if not held or empty:
            which = f"{empty[0]} has none there" if empty else "there is no dataset"
            raise ValueError(f"`data` must have documents for {split}, but {which} (data.split, data.validation_path)")
    return {split: tuple(held) for split, held in parts.items()}


def split_documents(num_documents: int, shares: tuple[float, ...]) -> list[tuple[int, int]]:
    """Contiguous ranges of documents in these shares.

    Every border is the one before plus the rounded share; what the last is too far is taken off all borders.

    Source: Megatron-LM's get_train_valid_test_split_.
    """
    borders = [0]
    for share in shares:
        borders.append(borders[-1] + int(round(share * num_documents)))
    surplus = borders[-1] - num_documents
    borders[1:] = [border - surplus for border in borders[1:]]
    return [(first, max(first, last)) for first, last in zip(borders[:-1], borders[1:], strict=True)]


def _part(prefix: str, weight: float, digest: str = "") -> CorpusPart:
    prefix = os.path.abspath(prefix)
    dataset = IndexedDataset(prefix)
    return CorpusPart(prefix, 0, dataset.num_documents, digest + identity_of(dataset), float(weight))


def identity_of(dataset: IndexedDataset) -> str:
    """A hash of the whole index and of stretches spread over the tokens, which may be too many to read at every start.

    A change of some tokens that leaves all sizes may go unnoticed, as 64 stretches of 64 KiB are looked at.
    """
    with open(f"{dataset.prefix}.idx", "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    for stretch in _stretches(dataset):
        digest.update(stretch.tobytes())
    return digest.hexdigest()[:32]


def _stretches(dataset: IndexedDataset) -> Iterable[np.ndarray]:
    length = _PROBE // dataset.dtype.itemsize
    if dataset.num_tokens <= _NUM_PROBES * length:
        yield dataset.tokens
        return
    for number in range(_NUM_PROBES):
        start = (dataset.num_tokens - length) * number // (_NUM_PROBES - 1)
        yield dataset.tokens[start : start + length]


def _probe_ids(dataset: IndexedDataset, vocab_size: int) -> None:
    """Refuse, before anything starts, ids that are not of the vocabulary, as far as the stretches show them."""
    if dataset.dtype.kind == "f":
        raise ValueError(f"{dataset.prefix}.idx: tokens must be whole numbers, but are {dataset.dtype.name}")
    for ids in _stretches(dataset):
        if len(ids) and (ids.max() >= vocab_size or ids.min() < 0):
            wrong = ids.max() if ids.max() >= vocab_size else ids.min()
            raise ValueError(
                f"{dataset.prefix}.bin: ids must be from 0 to {vocab_size - 1} (the tokenizer's), but there is {wrong}"
            )


def _read_manifest(folder: Path, key: str) -> dict:
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"`data.{key}` must be a folder of prepare_data.py or the path of a .bin and .idx without the ending, but "
            f"{folder} is a folder without {MANIFEST}"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if manifest.get("format") != MANIFEST_FORMAT or "sources" not in manifest:
        raise ValueError(f"{path}: `format` must be {MANIFEST_FORMAT}, but is {manifest.get('format')!r}")
    return manifest


def _find_tokenizer(
    folders: list[Path], config: TokenizerConfig, cache: Path, architecture: str
) -> tuple[Tokenizer, Path]:
    """The tokenizer beside the datasets, else the published one that `tokenizer` names; and the folder it is in."""
    if config.vocab_size is not None:
        raise ValueError(
            "`tokenizer.vocab_size` must be null when `data` is indexed, whose tokenizer is made, but is "
            f"{config.vocab_size}"
        )
    beside = {folder: read_tokenizer(folder / TOKENIZER) for folder in folders if (folder / TOKENIZER).is_file()}
    named = load_published_tokenizer(config, architecture) if config.kind != "trained" else None
    prints = {tokenizer.fingerprint for tokenizer in beside.values()}
    if len(prints | ({named.fingerprint} if named else set())) > 1:
        where = ", ".join(str(folder / TOKENIZER) for folder in beside)
        raise ValueError(f"`tokenizer` must be the one of all datasets, but {where} and what is named differ")
    if beside:
        return next((tokenizer, folder) for folder, tokenizer in beside.items())
    if named is None:
        raise ValueError(
            f"`tokenizer` must be gpt2 or bert where no {TOKENIZER} lies beside the dataset, but is {config.kind} and "
            f"{folders[0]} has none"
        )
    folder = cache / "tokenizers" / named.fingerprint[:24]
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{TOKENIZER}.{os.getpid()}"
    named.inner.save(str(temporary))
    os.replace(temporary, folder / TOKENIZER)
    return named, folder


def _counts(parts: tuple[CorpusPart, ...], datasets: dict[str, IndexedDataset]) -> dict:
    """What the record of a run says of a split."""
    sources, identities = [], []
    for part in parts:
        start, end = datasets[part.prefix].document_starts(np.array([part.first, part.last])).tolist()
        counts = {"documents": part.last - part.first, "tokens": end - start}
        sources.append(counts | {"prefix": part.prefix, "weight": part.weight})
        identities.append((part.identity, part.first, part.last, part.weight))
    totals = {key: sum(source[key] for source in sources) for key in ("documents", "tokens")}
    return totals | {"sources": sources, "sha256": hashlib.sha256(repr(identities).encode()).hexdigest()}


def _notes(parts: tuple[CorpusPart, ...], datasets: dict[str, IndexedDataset]) -> list[str]:
    """A line for each dataset of which documents are left out."""
    notes = []
    for part in parts:
        chunks = usable_documents(datasets[part.prefix], part.first, part.last)
        left_out = part.last - part.first - sum(len(starts) for starts, _ in chunks)
        if left_out:
            notes.append(
                f"{Path(part.prefix).name}: {left_out:,} of {part.last - part.first:,} documents have fewer than two "
                "sentences or one of more than 512 tokens and are left out"
            )
    return notes
