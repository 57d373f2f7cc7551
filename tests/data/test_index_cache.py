"""Cached indices: built once for all processes, even if a builder is killed."""

import errno
import fcntl
import os
import signal
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from lmscale.data.index_cache import cached_index

VALUES = np.arange(12).reshape(6, 2)


def _build(file) -> None:
    np.save(file, VALUES)


def _ask(folder: Path, results) -> None:
    def build(file) -> None:
        (folder / f"built_{os.getpid()}").touch()
        time.sleep(0.5)  # long enough for the others to request it
        _build(file)

    results.put(cached_index(folder / "indices", "gpt", ("fact",), build).rows.tolist())


def _hang(folder: Path) -> None:
    def build(file) -> None:
        file.write(b"half of it")
        file.flush()
        (folder / "started").touch()
        time.sleep(600)

    cached_index(folder / "indices", "gpt", ("fact",), build)


def test_four_processes_build_an_index_once(tmp_path) -> None:
    context = get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_ask, args=(tmp_path, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert found == [VALUES.tolist()] * 4
    assert len(list(tmp_path.glob("built_*"))) == 1
    assert [path.suffix for path in (tmp_path / "indices").glob("gpt_*")] == [".npy"]


def test_a_killed_builder_neither_blocks_nor_leaves_files(tmp_path) -> None:
    process = get_context("fork").Process(target=_hang, args=(tmp_path,))
    process.start()
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    assert len(list((tmp_path / "indices").glob(".*unfinished*"))) == 1
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert np.array_equal(cached_index(tmp_path / "indices", "gpt", ("fact",), _build).rows, VALUES)
    assert not list((tmp_path / "indices").glob(".*unfinished*"))


def test_the_unfinished_file_of_another_users_process_stays(tmp_path, monkeypatch) -> None:
    path = cached_index(tmp_path, "gpt", ("fact",), _build).path
    path.unlink()
    unfinished = tmp_path / f".{path.name}.unfinished_{os.uname().nodename}_1"
    unfinished.touch()

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)
    cached_index(tmp_path, "gpt", ("fact",), _build)
    assert unfinished.exists()


def test_an_index_is_cached_by_its_facts(tmp_path) -> None:
    first = cached_index(tmp_path, "gpt", ("a", 1), _build).rows
    assert isinstance(first, np.memmap) and not first.flags.writeable

    def refuse(file) -> None:
        raise AssertionError("built again")

    assert np.array_equal(cached_index(tmp_path, "gpt", ("a", 1), refuse).rows, VALUES)
    for kind, facts in (("gpt", ("a", 2)), ("bert", ("a", 1))):
        with pytest.raises(AssertionError, match="built again"):
            cached_index(tmp_path, kind, facts, refuse)
    assert len(list(tmp_path.glob("*.npy"))) == 1


def test_a_full_disk_and_an_unwritable_folder_raise_one_line(tmp_path) -> None:
    def fail(file) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="`data.cache_dir` must be a writable folder .*: No space left") as caught:
        cached_index(tmp_path / "a", "gpt", (), fail)
    assert "\n" not in str(caught.value)
    assert [path.suffix for path in (tmp_path / "a").iterdir()] == [".lock"]
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written or read"):
        cached_index(tmp_path / "file", "gpt", (), _build)


@pytest.mark.parametrize("size", [0, 90, 200])
def test_a_truncated_index_is_named(tmp_path, size: int) -> None:
    def build(file) -> None:
        np.save(file, np.arange(64))

    path = cached_index(tmp_path, "gpt", ("fact",), build).path
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=f"{path.name} is damaged; remove it"):
        cached_index(tmp_path, "gpt", ("fact",), build)


@pytest.mark.parametrize("is_removed", [False, True])
def test_builders_without_a_common_lock_do_not_disturb_each_other(tmp_path, monkeypatch, is_removed) -> None:
    def refuse(file, kind) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = cached_index(tmp_path, "gpt", (), _build).path
    path.unlink()
    elsewhere = path.with_name(f".{path.name}.unfinished_otherhost_1")
    elsewhere.touch()

    def build(file) -> None:
        _build(file)
        if is_removed:
            Path(file.name).unlink()
        other = get_context("fork").Process(target=cached_index, args=(tmp_path, "gpt", (), _build))
        other.start()
        other.join()
        assert other.exitcode == 0

    assert np.array_equal(cached_index(tmp_path, "gpt", (), build).rows, VALUES)
    assert list(tmp_path.glob(".*unfinished*")) == [elsewhere]
