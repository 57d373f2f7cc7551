"""The teacher's cache on disk: what is read equals what was written, or one line says which file is wrong."""

import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

from lmscale.config.teacher import cache_record_bytes
from lmscale.data.loading import cut_step
from lmscale.data.teacher_cache import MANIFEST, TeacherCache

FACTS = {"seed": 7, "temperature": 2.0, "top_k": 3, "rows": 5, "vocab_size": 100, "precision": "bf16"}
FACTS |= {"num_samples": 150}  # parts of 3 samples


def records(cache: TeacherCache, part: int) -> np.ndarray:
    """A part with numbers of its own; -inf and the largest id are among them."""
    draw, made = np.random.default_rng(part), np.zeros(len(cache.samples(part)), cache.record)
    made["log_p"] = -draw.exponential(5.0, made["log_p"].shape)
    made["log_p"][:, 0, -1] = -np.inf
    made["ids"] = cache.facts["vocab_size"] - 1 - draw.integers(0, 50, made["ids"].shape)
    made["ids"][:, 0, 0] = cache.facts["vocab_size"] - 1
    return made


def begin(folder: Path, facts: dict = FACTS) -> tuple[TeacherCache, list[int]]:
    folder.mkdir(parents=True, exist_ok=True)
    return TeacherCache.begin(folder, facts)


def fill(folder: Path, facts: dict = FACTS) -> TeacherCache:
    cache, missing = begin(folder, facts)
    for part in missing:
        cache.write(part, records(cache, part))
    return cache


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("precision, width", [("bf16", 2), ("fp16", 2), ("fp32", 4), ("fp64", 8)])
@pytest.mark.parametrize("vocab_size", [100, 2**16, 2**16 + 1])
def test_what_is_read_equals_what_was_written(precision, width, vocab_size, tmp_path) -> None:
    facts = FACTS | {"precision": precision, "vocab_size": vocab_size, "num_samples": 151}
    written = fill(tmp_path / "a" / "cache", facts)
    cache = pickle.loads(pickle.dumps(TeacherCache.open(written.folder)))
    assert (cache, cache.missing(), len(cache.samples(50))) == (written, [], 1)
    assert cache.record.itemsize == cache_record_bytes(5, 3, vocab_size, width)
    whole = np.concatenate([records(cache, part) for part in range(51)])
    for numbers in ([0], [149, 150], [7, 150, 3, 8], range(151)):
        found = cache.read(np.array(numbers))
        assert found["teacher_ids"].dtype == np.int64 and found["teacher_log_p"].dtype.itemsize == width
        assert np.array_equal(found["teacher_ids"], whole["ids"][numbers])
        assert np.array_equal(found["teacher_log_p"], whole["log_p"][numbers])


def test_a_micro_batch_has_the_rows_of_the_scored_positions_of_each_sample() -> None:
    labels = torch.tensor([[-100, 1, -100], [2, 3, -100], [-100, -100, -100], [-100, -100, 4]])
    rows = torch.arange(4 * 2 * 3).view(4, 2, 3)  # two rows of a sample, three numbers each
    step = {"tokens": labels, "labels": labels, "teacher_log_p": rows.float(), "teacher_ids": rows}
    for part, places in zip(cut_step(step, 3), ([0, 2, 3], [6]), strict=True):
        assert torch.equal(part["teacher_ids"], rows.flatten(0, 1)[places])
        assert torch.equal(part["teacher_log_p"], part["teacher_ids"].float())


def flip(folder: Path) -> None:
    with open(folder / "part_00001.bin", "r+b") as file:
        file.seek(11)
        byte = file.read(1)
        file.seek(11)
        file.write(bytes([byte[0] ^ 1]))


def cut(folder: Path) -> None:
    os.truncate(folder / "part_00001.bin", (folder / "part_00001.bin").stat().st_size - 1)


def swap(folder: Path) -> None:
    shutil.copy(folder / "part_00001.bin", folder / "kept")
    shutil.copy(folder / "part_00002.bin", folder / "part_00001.bin")


def take_another_caches(folder: Path) -> None:
    other = fill(folder.parent / "other", FACTS | {"temperature": 1.0})
    shutil.copy(other.path(1), folder / "part_00001.bin")


def remove(folder: Path) -> None:
    (folder / "part_00001.bin").unlink()


@pytest.mark.parametrize(
    "damage, is_seen_at_start",
    [(flip, False), (swap, False), (take_another_caches, False), (cut, True), (remove, True)],
)
def test_damage_names_the_part_and_the_sample(damage: Callable[[Path], None], is_seen_at_start: bool, tmp_path) -> None:
    cache, sample = fill(tmp_path / "cache"), 5 if damage is cut else 3
    damage(cache.folder)
    assert cache.missing() == [1] * is_seen_at_start
    cache.read(np.arange(6, 150)), cache.read(np.arange(3))
    with pytest.raises(
        ValueError, match=f"`teacher.cache` must be intact, but .*part_00001.bin lacks sample {sample} or"
    ):
        cache.read(np.arange(2, 6))


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: None,
        lambda saved: saved | {"facts": saved["facts"] | {"seed": 8}},
        lambda saved: saved | {"checksum": None},
        lambda saved: [saved],
        lambda saved: {"facts": 3, "checksum": ""},
    ],
)
def test_a_damaged_manifest_is_refused(change: Callable, tmp_path) -> None:
    path = fill(tmp_path / "cache").folder / MANIFEST
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    for key, command in {
        "teacher.cache": lambda: TeacherCache.open(path.parent),
        "output": lambda: TeacherCache.begin(path.parent, FACTS),
    }.items():
        with pytest.raises(ValueError, match=f"`{key}` must be .*, but .*{MANIFEST} is missing or damaged"):
            command()
    with pytest.raises(ValueError, match="missing or damaged"):
        TeacherCache.open(tmp_path)


@pytest.mark.parametrize("name, value", [("seed", 8), ("temperature", 1.0), ("num_samples", 149), ("rows", 4)])
def test_another_command_does_not_continue_a_cache(name, value, tmp_path) -> None:
    before = contents(fill(tmp_path / "cache").folder)
    message = f"`{name}` must be {FACTS[name]}, that of the cache in .*cache, but is {value}"
    with pytest.raises(ValueError, match=message):
        begin(tmp_path / "cache", FACTS | {name: value})
    assert contents(tmp_path / "cache") == before


def _fill_until_killed(folder: Path, survives: int) -> None:
    cache, missing = begin(folder)
    for part in missing[:survives]:
        cache.write(part, records(cache, part))
    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    cache.write(missing[survives], records(cache, missing[survives]))


def test_the_same_command_continues_after_a_kill_with_equal_bytes(tmp_path) -> None:
    whole = contents(fill(tmp_path / "whole").folder)
    for survives in (4, 0, 20):
        process = get_context("fork").Process(target=_fill_until_killed, args=(tmp_path / "cache", survives))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    cache, missing = begin(tmp_path / "cache", FACTS)
    assert missing == list(range(24, 50))
    assert contents(fill(cache.folder).folder) == whole


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, monkeypatch) -> None:
    cache, _ = begin(tmp_path / "cache", FACTS)
    for part in (0, 1):
        cache.write(part, records(cache, part))
    with monkeypatch.context() as patch:

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "fsync", full)
        message = (
            r"`output` must be .* free space, but .*part_00002.bin: No space left on device; the same command goes on"
        )
        with pytest.raises(ValueError, match=message):
            cache.write(2, records(cache, 2))
    assert TeacherCache.begin(cache.folder, FACTS)[1] == list(range(2, 50))


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path) -> None:
    message = r"`output` must be on a disk with [\d,]{15,} bytes free, but is .*, where [\d,]+ are"
    with pytest.raises(ValueError, match=message):
        begin(tmp_path / "cache", FACTS | {"num_samples": 2**12, "rows": 2**26})
    assert contents(tmp_path / "cache") == {}


def test_predictions_that_are_not_numbers_are_refused(tmp_path) -> None:
    cache, _ = begin(tmp_path / "cache", FACTS)
    poisoned = records(cache, 3)
    poisoned["log_p"][-1, -1, 0] = np.nan
    with pytest.raises(ValueError, match=f"`ckpt` must predict numbers, .* of sample {cache.samples(3)[-1]} are nan"):
        cache.write(3, poisoned)
    assert not cache.path(3).exists()


def test_a_folder_with_other_files_is_refused(tmp_path) -> None:
    (tmp_path / "record.json").write_text("{}")
    with pytest.raises(ValueError, match="`output` must be a new folder, or the cache that this command began, but is"):
        TeacherCache.begin(tmp_path, FACTS)
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]
