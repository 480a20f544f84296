"""What a disk may hold after a power cut: every file operation of a run, recorded, and replayed as disks may do it.

The recorder stands at the system calls, below everything that dalsegno does; that it has seen them all is shown by the
whole recording giving the very folder that is there. The model of the disk is a pessimist's: what was written to a file
is certain after an fsync of that file, a name after an fsync of its folder. Of all else any part may have arrived, in
any order, a write also in part, by sectors; only a rename is all or nothing.
"""

from __future__ import annotations

import os
import random
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SECTOR = 512


@dataclass(frozen=True, slots=True)
class Write:
    file: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    file: int
    length: int


@dataclass(frozen=True, slots=True)
class Sync:
    what: int
    """A file or a folder."""


@dataclass(frozen=True, slots=True)
class Enter:
    """A new file or folder gets its name."""

    folder: int
    name: str
    what: int
    is_folder: bool


@dataclass(frozen=True, slots=True)
class Rename:
    folder: int
    name: str
    to_folder: int
    to_name: str
    target: str
    """The path it leads to, relative to the root: for the test's own questions."""


@dataclass(frozen=True, slots=True)
class Remove:
    folder: int
    name: str


Operation = Write | Truncate | Sync | Enter | Rename | Remove
ROOT = 0


class Recorder:
    """Notes what this process, all its threads, does to the files under ``root`` (an existing, empty folder)."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.operations: list[Operation] = []
        self._ids = {self._inode(root.stat()): ROOT}
        self._next = ROOT + 1
        self._guard = threading.RLock()

    @contextmanager
    def recording(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        real = {name: getattr(os, name) for name in _INTERCEPTED}
        with patch.context() as patched:
            for name, make in _INTERCEPTED.items():
                patched.setattr(os, name, make(self, real[name]))
            yield

    def note(self, operation: Operation) -> None:
        self.operations.append(operation)

    def place(self, path: Any, dir_fd: int | None = None) -> tuple[int, str] | None:
        """The folder's number and the name in it; None for what is not ours."""
        full = _absolute(path, dir_fd)
        if self.root not in full.parents or full.name.startswith((".lock", ".lease")):
            return None
        return self._ids[self._inode(full.parent.stat())], full.name

    def known(self, descriptor: int) -> int | None:
        return self._ids.get(self._inode(os.fstat(descriptor)))

    def enter(self, path: Any, dir_fd: int | None, status: os.stat_result) -> None:
        place = self.place(path, dir_fd)
        assert place is not None
        self._ids[self._inode(status)] = self._next
        self.note(Enter(*place, self._next, stat.S_ISDIR(status.st_mode)))
        self._next += 1

    def forget(self, status: os.stat_result) -> None:
        """Inode numbers are used again."""
        if status.st_nlink <= 1 or stat.S_ISDIR(status.st_mode):
            self._ids.pop(self._inode(status), None)

    @staticmethod
    def _inode(status: os.stat_result) -> tuple[int, int]:
        return status.st_dev, status.st_ino


def _absolute(path: Any, dir_fd: int | None) -> Path:
    folder = Path.cwd() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
    return Path(os.path.abspath(folder / os.fspath(path)))


def _open(recorder: Recorder, real: Callable[..., int]) -> Callable[..., int]:
    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        with recorder._guard:
            ours = flags & os.O_CREAT and recorder.place(path, dir_fd)
            existed = _absolute(path, dir_fd).exists()
            descriptor = real(path, flags, mode, dir_fd=dir_fd)
            if ours and not existed:
                recorder.enter(path, dir_fd, os.fstat(descriptor))
            elif (flags & os.O_TRUNC) and (number := recorder.known(descriptor)) is not None:
                recorder.note(Truncate(number, 0))
            return descriptor

    return open_


def _write(recorder: Recorder, real: Callable[..., int]) -> Callable[..., int]:
    def write(descriptor: int, data: Any) -> int:
        with recorder._guard:
            number = recorder.known(descriptor)
            if number is None:
                return real(descriptor, data)
            offset = os.lseek(descriptor, 0, os.SEEK_CUR)
            count = real(descriptor, data)
            recorder.note(Write(number, offset, bytes(memoryview(data).cast("B")[:count])))
            return count

    return write


def _pwrite(recorder: Recorder, real: Callable[..., int]) -> Callable[..., int]:
    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        with recorder._guard:
            count = real(descriptor, data, offset)
            if (number := recorder.known(descriptor)) is not None:
                recorder.note(Write(number, offset, bytes(memoryview(data).cast("B")[:count])))
            return count

    return pwrite


def _ftruncate(recorder: Recorder, real: Callable[..., None]) -> Callable[..., None]:
    def ftruncate(descriptor: int, length: int) -> None:
        with recorder._guard:
            real(descriptor, length)
            if (number := recorder.known(descriptor)) is not None:
                recorder.note(Truncate(number, length))

    return ftruncate


def _fsync(recorder: Recorder, real: Callable[..., None]) -> Callable[..., None]:
    def fsync(descriptor: int) -> None:
        with recorder._guard:  # the real one is left out: it only costs time here
            if (number := recorder.known(descriptor)) is not None:
                recorder.note(Sync(number))

    return fsync


def _mkdir(recorder: Recorder, real: Callable[..., None]) -> Callable[..., None]:
    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        with recorder._guard:
            real(path, mode, dir_fd=dir_fd)
            if recorder.place(path, dir_fd) is not None:
                recorder.enter(path, dir_fd, os.stat(path, dir_fd=dir_fd))

    return mkdir


def _link(recorder: Recorder, real: Callable[..., None]) -> Callable[..., None]:
    def link(source: Any, target: Any) -> None:
        with recorder._guard:
            real(source, target)
            if (place := recorder.place(target)) is not None:
                recorder.note(Enter(*place, recorder._ids[recorder._inode(Path(source).stat())], False))

    return link


def _replace(recorder: Recorder, real: Callable[..., None]) -> Callable[..., None]:
    def replace(source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        with recorder._guard:
            before, after = recorder.place(source, src_dir_fd), recorder.place(target, dst_dir_fd)
            goes = Path(target).stat() if Path(target).is_file() else None
            real(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            if before is not None and after is not None:
                path = _absolute(target, dst_dir_fd).relative_to(recorder.root)
                recorder.note(Rename(*before, *after, path.as_posix()))
            if goes is not None:
                recorder.forget(goes)

    return replace


def _remove(recorder: Recorder, real: Callable[..., None]) -> Callable[..., None]:
    def remove(path: Any, *, dir_fd: int | None = None) -> None:
        with recorder._guard:
            place = recorder.place(path, dir_fd)
            status = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
            real(path, dir_fd=dir_fd)
            if place is not None:
                recorder.note(Remove(*place))
                recorder.forget(status)

    return remove


_INTERCEPTED: dict[str, Callable[[Recorder, Callable[..., Any]], Callable[..., Any]]] = {
    "open": _open,
    "write": _write,
    "pwrite": _pwrite,
    "ftruncate": _ftruncate,
    "fsync": _fsync,
    "fdatasync": _fsync,
    "mkdir": _mkdir,
    "link": _link,
    "replace": _replace,
    "rename": _replace,
    "unlink": _remove,
    "remove": _remove,
    "rmdir": _remove,
}


@dataclass(slots=True)
class Disk:
    """Files by number, folders as names to numbers."""

    files: dict[int, bytearray] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})

    def apply(self, operation: Operation, chance: random.Random | None = None) -> None:
        """``chance``: a write arrives in part. What cannot happen, since something before it has not, does not."""
        match operation:
            case Write(file, offset, data):
                content = self.files.setdefault(file, bytearray())
                size = SECTOR if chance else max(1, len(data))
                for begin in range(0, len(data), size):
                    if chance is None or chance.random() < 0.5:
                        piece = data[begin : begin + size]
                        end = offset + begin + len(piece)
                        content.extend(bytes(max(0, end - len(content))))
                        content[offset + begin : end] = piece
            case Truncate(file, length):
                content = self.files.setdefault(file, bytearray())
                del content[length:]
                content.extend(bytes(length - len(content)))
            case Enter(folder, name, what, is_folder):
                if is_folder:
                    self.folders.setdefault(what, {})
                self.folders.setdefault(folder, {}).setdefault(name, what)
            case Rename(folder, name, to_folder, to_name):
                if name in self.folders.setdefault(folder, {}):
                    self.folders.setdefault(to_folder, {})[to_name] = self.folders[folder].pop(name)
            case Remove(folder, name):
                self.folders.setdefault(folder, {}).pop(name, None)

    def tree(self) -> dict[str, bytes | None]:
        """Path to content; None for a folder."""
        return dict(self._walk(ROOT, ""))

    def _walk(self, folder: int, path: str) -> Iterator[tuple[str, bytes | None]]:
        for name, what in self.folders[folder].items():
            if what in self.folders:
                yield f"{path}{name}", None
                yield from self._walk(what, f"{path}{name}/")
            else:
                yield f"{path}{name}", bytes(self.files.get(what, b""))


def after_power_cut(
    operations: Sequence[Operation], certain: Sequence[bool], chance: random.Random | None, share: float
) -> Disk:
    """A disk after these operations: those that are certain, and of the rest about ``share``, by ``chance``, in part.

    Which sectors arrive is drawn one by one, so any order in which they may have been written is among the outcomes;
    two writes to one sector meet in memory before, in their own order.
    """
    disk = Disk()
    for operation, is_certain in zip(operations, certain, strict=True):
        if is_certain:
            disk.apply(operation)
        elif chance is None:
            if share:
                disk.apply(operation)
        elif chance.random() < share:
            disk.apply(operation, chance)
    return disk


def _certain(operations: Sequence[Operation]) -> list[bool]:
    """Which of them a sync behind them has settled."""
    synced: set[int] = set()
    certain = [False] * len(operations)
    for position, operation in reversed(list(enumerate(operations))):
        if isinstance(operation, Sync):
            synced.add(operation.what)
        certain[position] = _settled_by(operation) in synced
    return certain


def _settled_by(operation: Operation) -> int:
    """The file or folder whose sync makes the operation certain."""
    match operation:
        case Write(file) | Truncate(file):
            return file
        case Enter(folder) | Remove(folder):
            return folder
        case Rename(to_folder=folder):
            return folder
        case Sync():
            return -1


def undisturbed(operations: Sequence[Operation]) -> Disk:
    """The disk when all has arrived."""
    return after_power_cut(operations, [True] * len(operations), None, 1.0)


def states(operations: Sequence[Operation], seed: int, subsets: int = 4) -> Iterator[tuple[int, Disk]]:
    """For every prefix: its length, and the disks that a power cut may leave then."""
    for length in range(len(operations) + 1):
        prefix = operations[:length]
        certain = _certain(prefix)
        yield length, after_power_cut(prefix, certain, None, 0.0)
        yield length, undisturbed(prefix)
        for number in range(subsets):
            yield length, after_power_cut(prefix, certain, random.Random(f"{seed}/{length}/{number}"), 0.5)


def write_tree(tree: dict[str, bytes | None], folder: Path) -> None:
    folder.mkdir(parents=True)
    for path, content in tree.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
