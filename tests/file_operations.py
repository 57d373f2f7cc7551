"""Count, log and cut short a process's file operations, and undo those that a crash of the machine may lose.

`FileOperations` replaces the functions by which Python changes files (opening for writing, write, fsync, rename,
unlink, mkdir, rmdir, link) in the process that calls `install`. Each completed operation below the root is one line of
a log shared by all processes, and so is each attempt to create what already exists. After a given number of them the
process exits at once, without flushing or cleaning up. fsync is logged instead of executed: `lose_unsynced` then
removes from the tree what no fsync had secured. Linux only (/proc).
"""

import builtins
import fcntl
import io
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

CRASHED = 86  # exit code of a process that was cut short


class FileOperations:
    """The operations of one process.

    Args:
        root: folder whose files count.
        log: file of all processes, outside of `root`.
        crash_after: number of operations after which the process exits; None: never.
    """

    def __init__(self, root: Path, log: Path, rank: int = 0, crash_after: int | None = None) -> None:
        self.root, self.log, self.rank, self.crash_after = root.resolve(), log, rank, crash_after
        self.count = 0

    def install(self) -> None:
        """Replace the functions, for the rest of this process."""
        self._file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # its own lock: after a fork, call again
        self._lock = threading.Lock()
        self._write_log = os.write
        self._open_file, self._open_descriptor = builtins.open, os.open
        builtins.open = io.open = self._open
        os.open = self._os_open
        os.write, os.sendfile = self._os_write(os.write), self._os_write(os.sendfile)
        os.fsync = os.fdatasync = self._fsync
        os.rename, os.replace = self._rename(os.rename), self._rename(os.replace)
        os.unlink = os.remove = self._remove("unlink", os.unlink)
        os.rmdir = self._remove("rmdir", os.rmdir)
        os.mkdir = self._create("mkdir", os.mkdir)
        os.link = self._create("link", os.link)

    def _counts(self, path: Any) -> bool:
        return Path(os.path.abspath(path)).is_relative_to(self.root)

    def _do(self, operation: Callable[[], Any], entry: Callable[[Any], dict]) -> Any:
        """Execute one operation and log it, as one step for all processes and threads."""
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)  # released by the kernel if the process exits here
            try:
                result = operation()
                self._write_log(self._file, json.dumps({"rank": self.rank} | entry(result)).encode() + b"\n")
                self.count += 1
                if self.count == self.crash_after:
                    os._exit(CRASHED)
                return result
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _open(self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wax+") or isinstance(file, int) or not self._counts(file):
            return self._open_file(file, mode, buffering, *args, **kwargs)
        is_new = not os.path.exists(file)
        raw_mode = mode.replace("b", "").replace("t", "")
        raw = self._do(lambda: _CountedFile(self, file, raw_mode), lambda raw: _opened(file, raw.fileno(), is_new))
        if buffering == 0:
            return raw
        buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
        if "b" in mode:
            return buffered
        names = ("encoding", "errors", "newline")
        return io.TextIOWrapper(buffered, **(dict(zip(names, args, strict=False)) | kwargs))

    def _os_open(self, path: Any, flags: int, *args: Any, dir_fd: int | None = None) -> int:
        path, name = _full(path, dir_fd), path
        if not flags & os.O_CREAT or not self._counts(path):
            return self._open_descriptor(name, flags, *args, dir_fd=dir_fd)
        is_new = not os.path.exists(path)
        return self._do(
            lambda: self._open_descriptor(path, flags, *args), lambda descriptor: _opened(path, descriptor, is_new)
        )

    def _os_write(self, function: Callable) -> Callable:
        def write(descriptor: int, *args: Any) -> int:
            if not self._counts(os.readlink(f"/proc/self/fd/{descriptor}")):
                return function(descriptor, *args)
            return self._do(lambda: function(descriptor, *args), lambda _: _node("write", descriptor))

        return write

    def _fsync(self, descriptor: int) -> None:
        if self._counts(os.readlink(f"/proc/self/fd/{descriptor}")):
            self._do(lambda: None, lambda _: _node("fsync", descriptor) | {"size": os.fstat(descriptor).st_size})

    def _rename(self, function: Callable) -> Callable:
        def rename(source: Any, target: Any) -> None:
            if not self._counts(target):
                return function(source, target)
            source, target = os.path.abspath(source), os.path.abspath(target)
            assert os.path.dirname(source) == os.path.dirname(target)
            kept = None
            if os.path.isfile(target):
                kept = f"{self.log}.kept_{self.rank}_{self.count}"
                shutil.copyfile(target, kept)
            entry = {"op": "rename", "name": os.path.basename(target), "source": os.path.basename(source), "kept": kept}
            self._do(lambda: function(source, target), lambda _: entry | _parent(target))

        return rename

    def _remove(self, kind: str, function: Callable) -> Callable:
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            full = _full(path, dir_fd)
            if not self._counts(full):
                return function(path, dir_fd=dir_fd)
            entry = {"op": kind, "name": os.path.basename(full), "inode": os.lstat(full).st_ino}
            self._do(lambda: function(full), lambda _: entry | _parent(full))

        return remove

    def _create(self, kind: str, function: Callable) -> Callable:
        def create(*args: Any, **kwargs: Any) -> None:
            if not self._counts(args[-1] if kind == "link" else args[0]):
                return function(*args, **kwargs)
            path = args[-1] if kind == "link" else args[0]
            entry = {"op": kind, "name": os.path.basename(path)}

            def attempt() -> FileExistsError | None:
                try:
                    return function(*args, **kwargs)
                except FileExistsError as error:
                    return error

            # An attempt counts even if another rank was faster, so that the count of a rank does not depend on timing.
            error = self._do(attempt, lambda error: (entry | {"new": error is None}) | _parent(path))
            if error is not None:
                raise error

        return create


class _CountedFile(io.FileIO):
    def __init__(self, operations: FileOperations, path: Any, mode: str) -> None:
        super().__init__(path, mode)
        self.operations = operations

    def write(self, data: Any) -> int:
        write = super().write
        return self.operations._do(lambda: write(data), lambda _: _node("write", self.fileno()))


def _full(path: Any, dir_fd: int | None) -> str:
    return os.path.abspath(path if dir_fd is None else os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path))


def _node(kind: str, descriptor: int) -> dict:
    return {"op": kind, "inode": os.fstat(descriptor).st_ino}


def _parent(path: Any) -> dict:
    return {"parent": os.stat(os.path.dirname(os.path.abspath(path))).st_ino}


def _opened(path: Any, descriptor: int, is_new: bool) -> dict:
    size = os.fstat(descriptor).st_size
    return _node("open", descriptor) | {"name": os.path.basename(path), "new": is_new, "size": size} | _parent(path)


def read_log(log: Path) -> list[dict]:
    """The logged operations, in the order of execution."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []


def count_operations(log: Path, num_ranks: int) -> list[int]:
    """Number of logged operations by rank."""
    entries = read_log(log)
    return [sum(entry["rank"] == rank for entry in entries) for rank in range(num_ranks)]


def unsynced(log: Path) -> tuple[dict[int, int], list[dict]]:
    """What a crash of the machine may lose: files' secured sizes by inode, and directory entries in order.

    Conservative (POSIX): an fsync of a file secures its content but no name; one of a directory secures its entries.
    """
    sizes: dict[int, int] = {}
    names: list[dict] = []
    secured: dict[int, int] = {}
    for entry in read_log(log):
        kind, inode = entry["op"], entry.get("inode")
        if kind == "fsync":
            secured[inode] = entry["size"]
            sizes.pop(inode, None)
            names = [name for name in names if name["parent"] != inode]
        elif kind == "open":
            secured[inode] = 0 if entry["new"] else min(secured.get(inode, entry["size"]), entry["size"])
        elif kind == "write":
            sizes[inode] = secured[inode]
        elif kind in ("unlink", "rmdir"):  # the number may be used again
            sizes.pop(inode, None)
            names = [name for name in names if name["parent"] != inode]
        if "name" in entry and entry.get("new", True) and kind != "unlink":
            names.append(entry)
    return sizes, names


def lose_unsynced(root: Path, copy: Path, log: Path, num_names: int) -> None:
    """Copy a tree without what was not synced: end of files, and the last `num_names` unsynced entries of directories.

    Removals of files are never undone, so that a lost rename before them does the most harm.
    """
    sizes, names = unsynced(log)
    shutil.copytree(root, copy)
    inodes = {path.stat().st_ino: (copy / path.relative_to(root)).stat().st_ino for path in [root, *root.rglob("*")]}
    sizes = {inodes[inode]: size for inode, size in sizes.items() if inode in inodes}
    for path in copy.rglob("*"):
        size = sizes.get(path.stat().st_ino)
        if path.is_file() and size is not None and path.stat().st_size > size:
            os.truncate(path, size)
    for entry in names[len(names) - num_names :][::-1]:
        folders = {path.stat().st_ino: path for path in [copy, *copy.rglob("*")] if path.is_dir()}
        folder = folders.get(inodes.get(entry["parent"]))
        if folder is None:
            continue  # it was removed or lost
        path = folder / entry["name"]
        if entry["op"] == "rmdir":
            path.mkdir(exist_ok=True)
        elif entry["op"] == "mkdir":
            shutil.rmtree(path, ignore_errors=True)
        elif entry["op"] in ("open", "link"):
            path.unlink(missing_ok=True)
        elif path.exists():  # a rename
            path.rename(path.with_name(entry["source"]))
            if entry["kept"]:
                shutil.copyfile(entry["kept"], path)
