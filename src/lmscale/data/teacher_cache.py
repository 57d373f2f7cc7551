"""A teacher's most probable ids for every sample of a run, on disk by sample number.

A folder has `manifest.json`, the facts on which its content depends, and parts of a fixed number of samples. A part is
an array of records of one size: the log-probabilities of the k most probable ids and of all others together, the ids,
and a checksum. A row of a record is a scored position of its sample, in their order; rows that are not needed are 0.
"""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from ..config.checks import refuse
from ..config.family import family_of
from ..shared_files import write_atomically

MANIFEST = "manifest.json"
PART_BYTES, MOST_PARTS_OF_SMALL = 2**26, 64  # a small cache has smaller parts, so that the data ranks share them


def sample_facts(config: Any, family: str) -> dict[str, Any]:
    """By key what the samples of a `RunConfig` or a `CacheConfig` depend on, besides their corpus."""
    masks = ("mask_probability", "short_seq_probability", "max_ngram") if family_of(family).scored_share < 1 else ()
    own = {f"data.{name}": getattr(config.data, name) for name in ("seq_length", *masks)}
    return {"model.family": family, "seed": config.seed} | own


@dataclass(frozen=True)
class TeacherCache:
    """A cache, complete or not; picklable, for loader processes.

    Args:
        facts: by key; also `rows` of a record, `vocab_size` of the teacher, `num_samples`, and `part_samples`, of each
            part but the last.
    """

    folder: Path
    facts: dict[str, Any]

    @classmethod
    def open(cls, folder: str | Path, key: str = "teacher.cache") -> Self:
        """The cache in `folder`, which is the value of `key`.

        Raises:
            ValueError: its manifest is missing or damaged.
        """
        path = Path(folder, MANIFEST)
        with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            saved = json.loads(path.read_bytes())
            cache = cls(path.parent, saved["facts"])
            if saved["checksum"] == cache.origin:
                return cache
        raise ValueError(f"`{key}` must be a folder of src/cache_logits.py, but {path} is missing or damaged")

    @classmethod
    def begin(cls, folder: Path, facts: dict[str, Any]) -> tuple[Self, list[int]]:
        """The cache of these facts, new or begun by an earlier command, and its parts that are not written yet.

        Args:
            folder: exists, and no other command writes into it.

        Raises:
            OSError: the folder cannot be written.
            ValueError: it has the cache of another command, or too little space.
        """
        whole, size = facts["num_samples"], cls(folder, facts).record.itemsize
        length = max(1, min(PART_BYTES // size, -(-whole // MOST_PARTS_OF_SMALL)))
        cache = cls(folder, facts | {"part_samples": length})
        if (folder / MANIFEST).exists():
            cls.open(folder, "output").check(cache.facts)
        elif any(not entry.name.startswith(".") for entry in folder.iterdir()):
            refuse("output", "a new folder, or the cache that this command began", str(folder))
        missing = cache.missing()
        needed, free = size * sum(len(cache.samples(part)) for part in missing), shutil.disk_usage(folder).free
        if needed > free:
            refuse("output", f"on a disk with {needed:,} bytes free", str(folder), f", where {free:,} are")
        saved = {"checksum": cache.origin, "facts": cache.facts}
        write_atomically(folder / MANIFEST, json.dumps(saved, indent=1).encode())
        return cache, missing

    @cached_property
    def origin(self) -> str:
        """16 digits of the facts, which tell caches apart."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.facts, sort_keys=True).encode())

    @cached_property
    def record(self) -> np.dtype:
        """One sample; zeros are an empty one."""
        rows, top_k, values = self.facts["rows"], self.facts["top_k"], {"fp64": "<f8", "fp32": "<f4"}
        values, ids = values.get(self.facts["precision"], "<f2"), "<u2" if self.facts["vocab_size"] <= 2**16 else "<u4"
        return np.dtype([("log_p", values, (rows, top_k + 1)), ("ids", ids, (rows, top_k)), ("checksum", "V8")])

    def path(self, part: int) -> Path:
        """The file of a part."""
        return self.folder / f"part_{part:05d}.bin"

    def samples(self, part: int) -> range:
        """The numbers of a part's samples."""
        first, length = part * self.facts["part_samples"], self.facts["part_samples"]
        return range(first, min(first + length, self.facts["num_samples"]))

    def missing(self) -> list[int]:
        """Parts that are missing or have another size."""
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(self.folder)}
        parts = range(-(-self.facts["num_samples"] // self.facts["part_samples"]))
        return [p for p in parts if sizes.get(self.path(p).name) != len(self.samples(p)) * self.record.itemsize]

    def check(self, own: dict[str, Any]) -> None:
        """Refuse other facts.

        Raises:
            ValueError: names the first key that differs.
        """
        for key, value in own.items():
            if self.facts.get(key) != value:
                refuse(key, f"{self.facts.get(key)!r}, that of the cache in {self.folder}", value)

    def write(self, part: int, records: np.ndarray) -> None:
        """Write a whole part, with checksums.

        Raises:
            ValueError: it cannot be written, or the teacher has predicted what is not a number.
        """
        if (wrong := np.isnan(records["log_p"]).any(axis=(1, 2))).any():
            number = self.samples(part)[int(wrong.argmax())]
            raise ValueError(f"`ckpt` must predict numbers, but its log-probabilities of sample {number} are nan")
        rows = records.view(np.uint8).reshape(len(records), -1)
        for number, row in zip(self.samples(part), rows, strict=True):
            row[-8:] = np.frombuffer(self._checksum(number, row), np.uint8)
        try:
            write_atomically(self.path(part), rows)
        except OSError as error:
            rule, more = "a folder that can be written and has free space", "the same command goes on from this part"
            raise ValueError(f"`output` must be {rule}, but {self.path(part)}: {error.strerror}; {more}") from None

    def read(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Entries of a batch with these sample numbers.

        Shapes:
            numbers int64 [b]; returns teacher_log_p [b, m, k + 1] and teacher_ids int64 [b, m, k].

        Raises:
            ValueError: a record is missing, damaged, or that of another sample or cache.
        """
        rows = np.zeros((len(numbers), self.record.itemsize), np.uint8)
        for number, row in zip(numbers.tolist(), rows, strict=True):
            part, place = divmod(number, self.facts["part_samples"])
            with suppress(OSError), open(self.path(part), "rb") as file:
                file.seek(place * len(row))
                file.readinto(row)
            if row[-8:].tobytes() != self._checksum(number, row):
                path = self.path(part)
                raise ValueError(
                    f"`teacher.cache` must be intact, but {path} lacks sample {number} or is damaged there; without "
                    "this file, the command that began the cache writes it again"
                )
        found = rows.view(self.record)[:, 0]
        return {"teacher_log_p": found["log_p"], "teacher_ids": found["ids"].astype(np.int64)}

    def _checksum(self, number: int, row: np.ndarray) -> bytes:
        """Of a record, by cache and sample, so that one in the place of another is found."""
        return xxhash.xxh3_64_digest(row[:-8], (int(self.origin, 16) + number) % 2**64)
