"""Files that are whole or absent.

Every change that dalsegno makes to its files goes through this module, so that a test can watch, or cut short, the
exact sequence of operations: see :data:`watcher`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Buffer = bytes | bytearray | memoryview
Watcher = Callable[[str, Path], None]

PAGE = 4096
"""Bytes: to what direct writes, in memory and on disk, are aligned."""

DIRECT_PIECE = 16 << 20
"""Bytes handed to the disk in one direct write."""

_DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none

watcher: Watcher | None = None
"""Called with (operation, path) before each write, fsync, truncate, rename, mkdir and unlink. For tests."""


def notify_watcher(operation: str, path: Path) -> None:
    """Tell the watcher, if there is one, what is about to happen to ``path``."""
    if watcher is not None:
        watcher(operation, path)


def open_own(path: Path, flags: int) -> int:
    """Open a file of a run's folder to be written; the descriptor.

    ``path`` may be reached through linked folders, but is a regular file itself: one that is a link would lead the
    writing, or the truncation, to wherever it points.

    Raises:
        OSError: if it is something else, or cannot be opened.
    """
    with contextlib.suppress(FileNotFoundError):
        kind = path.lstat().st_mode
        if not stat.S_ISREG(kind):
            what = "a symbolic link, which is not followed" if stat.S_ISLNK(kind) else "not a regular file"
            raise OSError(errno.EINVAL, f"this is {what}; remove it, or use another output_dir", str(path))
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


@contextlib.contextmanager
def _announced(operation: str, path: Path) -> Iterator[None]:
    """Tell the watcher, and name the file in what the kernel raises, which knows a descriptor only."""
    notify_watcher(operation, path)
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_all(descriptor: int, data: Buffer, path: Path) -> None:
    """Write every byte of ``data`` at the descriptor's position; ``path`` is for messages only."""
    with _announced("write", path):
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(descriptor, view) :]


def truncate(descriptor: int, length: int, path: Path) -> None:
    """Cut a file to ``length`` bytes."""
    with _announced("truncate", path):
        os.ftruncate(descriptor, length)


def fsync(descriptor: int, path: Path) -> None:
    """Force a file's bytes to the disk."""
    with _announced("fsync", path):
        os.fsync(descriptor)


def fsync_directory(path: Path) -> None:
    """Force a directory's entries (names, renames) to the disk."""
    notify_watcher("fsync", path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create ``path`` and its parents, and force their names to the disk; nothing happens where it exists.

    What is later forced into a directory is lost all the same if the directory's own name never got there.
    """
    if not path.is_dir():
        make_directory(path.parent)
        notify_watcher("mkdir", path)
        path.mkdir(exist_ok=True)
        fsync_directory(path.parent)


def mkdir_nosync(path: Path) -> None:
    """Create ``path`` in a directory that is there; nothing happens where it exists.

    Its name is forced to the disk when it is published, or what it is a part of: until then nobody needs it.
    """
    if not path.is_dir():
        notify_watcher("mkdir", path)
        path.mkdir(exist_ok=True)


def rename(source: Path, target: Path) -> None:
    """Rename, then force the new name to the disk. An existing file of that name is replaced."""
    notify_watcher("rename", target)
    source.replace(target)
    fsync_directory(target.parent)


def remove(path: Path) -> None:
    """Remove a file or a whole directory; nothing happens where there is none."""
    if path.is_dir() and not path.is_symlink():
        notify_watcher("unlink", path)
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        notify_watcher("unlink", path)
        path.unlink()


def write_durably(path: Path, data: Buffer) -> None:
    """Create ``path`` with ``data`` and force both to the disk. For files in a directory that is not yet published."""
    _write_pieces(path, [data])


def _write_pieces(path: Path, pieces: Iterable[Buffer]) -> None:
    descriptor = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for piece in pieces:
            write_all(descriptor, piece, path)
        fsync(descriptor, path)
    finally:
        os.close(descriptor)


def write_direct(path: Path, pieces: Iterator[memoryview], length: int) -> None:
    """Create ``path`` with ``pieces``, one behind the other, and force it to the disk, past the page cache.

    Each piece begins at a page boundary in memory and is a whole number of pages long, since direct writes want it so;
    what lies after ``length`` bytes is cut off again. The next piece is asked for, on a thread beside the write, while
    one is being written, so two of them are in use at any time. Where direct writes are refused (tmpfs, some network
    disks) the same pieces are written plainly, each forced to the disk before the next: else one fsync at the end
    would take as long as all of it, and nobody could tell whether anything moves.
    """
    descriptor = _open_direct(path)
    try:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="dalsegno-pieces") as beside:
            begin = 0
            coming = beside.submit(next, pieces, None)
            while (piece := coming.result()) is not None:
                coming = beside.submit(next, pieces, None)
                _write_piece(descriptor, piece, begin, path)
                begin += len(piece)
        truncate(descriptor, length, path)
        fsync(descriptor, path)
    finally:
        os.close(descriptor)


def _write_piece(descriptor: int, piece: memoryview, begin: int, path: Path) -> None:
    try:
        write_all(descriptor, piece, path)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        os.lseek(descriptor, begin, os.SEEK_SET)
        write_all(descriptor, piece, path)
    if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT:
        fsync(descriptor, path)


def _open_direct(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return open_own(path, flags | _DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return open_own(path, flags)


def replace_durably(path: Path, data: Buffer) -> None:
    """Replace ``path`` by ``data``: after a crash at any moment it holds the old bytes or the new ones.

    Only one process may do so at a time; what a killed one has left beside it is overwritten by the next.
    """
    replace_durably_in_pieces(path, [data])


def replace_durably_in_pieces(path: Path, pieces: Iterable[Buffer]) -> None:
    """As :func:`replace_durably`, with data that is made while it is written, and never all in memory."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        _write_pieces(temporary, pieces)
        rename(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def numbered(directory: Path, name: str) -> Path:
    """The first free ``directory/name.0001``, ``.0002`` …: a place for something that is moved aside."""
    number = 1
    while (path := directory / f"{name}.{number:04d}").exists():
        number += 1
    return path
