"""Atomic file operations: files are complete or absent.

Every change that dalsegno makes to its files goes through this module, so that a test can observe or interrupt the
exact sequence of operations: see :data:`watcher`. A process that has lost the lock of a directory changes nothing below
it: see :func:`add_fence`.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from dalsegno.errors import ConfigurationError
from dalsegno.system.machine import O_BINARY, O_DIRECT, O_DIRECTORY, O_NOFOLLOW, fcntl

if TYPE_CHECKING:
    from dalsegno.system.lease import Lease

Buffer = bytes | bytearray | memoryview
Watcher = Callable[[str, Path], None]

PAGE = 4096
"""Alignment of direct writes, in memory and on disk, in bytes."""

DIRECT_PIECE = 16 << 20
"""Size of one direct write in bytes."""

watcher: Watcher | None = None
"""Called with (operation, path) before each write, fsync, truncate, rename, link, mkdir and unlink. For tests."""

_fences: tuple[tuple[tuple[str, ...], Lease], ...] = ()  # replaced, never changed: other threads iterate


def add_fence(directory: Path, lease: Lease) -> None:
    """From now on, change files below ``directory`` only while this process holds ``lease``."""
    global _fences
    roots = {f"{os.path.abspath(each).rstrip('/')}/" for each in (directory, directory.resolve())}
    _fences = (*_fences, (tuple(roots), lease))


def remove_fence(lease: Lease) -> None:
    global _fences
    _fences = tuple((roots, each) for roots, each in _fences if each is not lease)


def notify_watcher(operation: str, path: Path) -> None:
    """Notify the watcher, if any, of an operation that is about to change ``path``."""
    if watcher is not None:
        watcher(operation, path)


def _ask_fences(operation: str, path: Path) -> None:
    """Raises LeaseLost if another process has taken over the directory of ``path``, or it is not there any more."""
    for roots, lease in _fences:  # a rename publishes, and a mkdir would begin anew: worth a look at the disk
        is_worth_a_look = operation in ("rename", "mkdir") or not lease.is_certain()
        if is_worth_a_look and f"{os.path.abspath(path)}/".startswith(roots):
            lease.confirm()


def _begin(operation: str, path: Path) -> None:
    """Called before each operation that changes ``path``. The fences are asked last: the watcher may take long."""
    notify_watcher(operation, path)
    _ask_fences(operation, path)


def open_own(path: Path, flags: int, mode: int = 0o644) -> int:
    """Open a file of a run for writing; returns the descriptor. ``mode``: permissions of a file that this creates.

    ``path`` may be reached through linked folders, but must itself be a regular file: a link would redirect the write,
    or the truncation, to its target. A file that is replaced, and has further names (an unchanged file of several
    checkpoints), keeps its content under these.
    """
    if flags & (os.O_CREAT | os.O_TRUNC):
        _ask_fences("open", path)
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            what = "a symbolic link, which is not followed" if stat.S_ISLNK(status.st_mode) else "not a regular file"
            raise OSError(errno.EINVAL, f"this is {what}; remove it, or use another output_dir", str(path))
        if flags & os.O_TRUNC and status.st_nlink > 1:
            path.unlink()
    return os.open(path, flags | O_NOFOLLOW | O_BINARY, mode)


@contextlib.contextmanager
def _notifying(operation: str, path: Path) -> Iterator[None]:
    """Begin the operation, and add the file name to an OSError: the kernel knows only the descriptor."""
    _begin(operation, path)
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_all(descriptor: int, data: Buffer, path: Path) -> None:
    """Write every byte of ``data`` at the descriptor's position; ``path`` is for messages only."""
    with _notifying("write", path):
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(descriptor, view) :]


def start_writeback(descriptor: int, begin: int, length: int) -> None:
    """Let the disk begin with these bytes of a file, which were written and stay in the page cache meanwhile: an fsync
    later takes less time. Each call costs about 0.1 ms."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(descriptor, begin, length, os.POSIX_FADV_DONTNEED)


def truncate(descriptor: int, length: int, path: Path) -> None:
    """Truncate a file to ``length`` bytes."""
    with _notifying("truncate", path):
        os.ftruncate(descriptor, length)


def fsync(descriptor: int, path: Path) -> None:
    """Flush a file's bytes to disk."""
    with _notifying("fsync", path):
        os.fsync(descriptor)


def fsync_file(path: Path) -> None:
    """Flush the bytes of a file that another program has written."""
    descriptor = os.open(path, os.O_RDONLY | O_NOFOLLOW)
    try:
        fsync(descriptor, path)
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Flush a directory's entries (names, renames) to disk. Does nothing on Windows, which cannot open directories."""
    if not O_DIRECTORY:
        return
    _begin("fsync", path)
    descriptor = os.open(path, os.O_RDONLY | O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create ``path`` and its parents and fsync their names. Does nothing if ``path`` exists. Raises
    ConfigurationError if what is there is not a directory.

    Without the fsync, a crash can lose the directory's name, and with it all files that were fsynced inside.
    """
    if not path.is_dir():
        make_directory(path.parent)
        _begin("mkdir", path)
        try:
            path.mkdir(exist_ok=True)
        except FileExistsError as error:
            raise ConfigurationError(f"{path}: is there, and is not a directory; remove it, or name another") from error
        fsync_directory(path.parent)


def make_private_directory(path: Path) -> None:
    """Create ``path``, with its parents, for this user alone (0700); an existing directory is made so. Raises
    PermissionError if ``path`` belongs to another user."""
    make_directory(path.parent)
    _begin("mkdir", path)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    descriptor = os.open(path, os.O_RDONLY | O_DIRECTORY | O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "belongs to another user", str(path))
        if status.st_mode & 0o077:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def mkdir_nosync(path: Path) -> None:
    """Create ``path`` in an existing directory, without fsync. Does nothing if ``path`` exists.

    Publishing the directory, or its parent, later fsyncs the name; it is not needed before.
    """
    if not path.is_dir():
        _begin("mkdir", path)
        path.mkdir(exist_ok=True)


def rename(source: Path, target: Path) -> None:
    """Rename and fsync the new name. Replaces an existing file."""
    _begin("rename", target)
    source.replace(target)
    fsync_directory(target.parent)


def rename_nosync(source: Path, target: Path) -> None:
    """Rename, without fsync: for a name that may be lost. Replaces an existing file."""
    _begin("rename", target)
    source.replace(target)


def link(source: Path, target: Path) -> None:
    """Give the file ``source`` a second name ``target``, in a directory that is not published yet.

    Flushes the file's bytes, which another program may have written.
    """
    fsync_file(source)
    _begin("link", target)
    os.link(source, target)


def count_names(path: Path) -> int:
    """How many names (hard links) the file at ``path`` has; 0 if there is none."""
    try:
        return path.lstat().st_nlink
    except FileNotFoundError:
        return 0


def remove(path: Path) -> None:
    """Remove a file or a directory tree. Does nothing if ``path`` does not exist."""
    if path.is_dir() and not path.is_symlink():
        _begin("unlink", path)
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        _begin("unlink", path)
        path.unlink()


def write_durably(path: Path, data: Buffer) -> None:
    """Create ``path`` with ``data`` and fsync it. For files in a directory that is not published yet."""
    with written_durably(path, [data]):
        pass


@contextlib.contextmanager
def written_durably(path: Path, pieces: Iterable[Buffer], mode: int = 0o644) -> Iterator[None]:
    """Create ``path`` from ``pieces``, and fsync it when the context is left. By then the disk may have the bytes, and
    what it notes about several files takes it as long as for one."""
    descriptor = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        for piece in pieces:
            write_all(descriptor, piece, path)
        start_writeback(descriptor, 0, 0)
        yield
        fsync(descriptor, path)
    finally:
        os.close(descriptor)


def write_direct(path: Path, pieces: Iterable[memoryview], length: int) -> None:
    """Create ``path`` from ``pieces``, written one after another past the page cache, and fsync it.

    Direct writes require that each piece starts at a page boundary in memory and is a whole number of pages long; the
    file is truncated to ``length`` bytes at the end. Where direct writes are refused (tmpfs, some network disks) the
    same pieces are written normally, with an fsync after each: a single fsync at the end would take as long as the
    whole write, during which progress could not be observed.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        descriptor = open_own(path, flags | O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = open_own(path, flags)
    try:
        begin = 0
        for piece in pieces:
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
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~O_DIRECT)
        os.lseek(descriptor, begin, os.SEEK_SET)
        write_all(descriptor, piece, path)
    if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & O_DIRECT:
        fsync(descriptor, path)


def map_new(path: Path, length: int) -> mmap.mmap:
    """Create ``path`` with ``length`` zero bytes, for this user alone, and map it shared: what is written to the
    mapping, which has whole pages, is in the file at once.

    Call :func:`reserve` before a write: it cannot report that there is no memory left, the process is killed.
    """
    with _notifying("write", path):
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, whole_pages(length))
            memory = mmap.mmap(descriptor, whole_pages(length))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)  # takes effect where the kernel gives shared memory such pages
            os.ftruncate(descriptor, length)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
    return memory


def reserve(path: Path, begin: int, length: int) -> None:
    """Reserve memory for ``length`` bytes of a file from ``begin`` on, as far as it has them: 0.1 s and more per GB.
    Raises OSError if there is not enough."""
    with _notifying("write", path):
        descriptor = open_own(path, os.O_WRONLY)
        try:
            inside = min(length, os.fstat(descriptor).st_size - begin)
            if inside > 0:
                os.posix_fallocate(descriptor, begin, inside)
        finally:
            os.close(descriptor)


def rewrite_in_place(path: Path, pieces: Iterable[Buffer], length: int) -> None:
    """Write ``length`` bytes to ``path``, a file in memory, into the pages that it has; for this user alone.

    A file that has further names keeps its content under these: it gets pages of its own. Raises OSError if there is
    not enough memory, before the first piece is taken.
    """
    if count_names(path) > 1:
        remove(path)
    descriptor = open_own(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        if length:
            os.posix_fallocate(descriptor, 0, length)
        for piece in pieces:
            write_all(descriptor, piece, path)
        truncate(descriptor, length, path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(descriptor)


def whole_pages(length: int) -> int:
    """``length`` bytes, rounded up to whole pages."""
    return -(-length // PAGE) * PAGE


def replace_durably(path: Path, data: Buffer, mode: int = 0o644) -> None:
    """Replace ``path`` atomically: after a crash at any time it contains the old bytes or the new ones.

    Only one process may call this at a time. The next call overwrites a temporary file left by a killed process.
    ``mode``: the file's permissions, from the moment it exists.
    """
    replace_durably_in_pieces(path, [data], mode)


def replace_durably_in_pieces(path: Path, pieces: Iterable[Buffer], mode: int = 0o644) -> None:
    """Like :func:`replace_durably`, for data that is produced while it is written and never held in memory whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    _ask_fences("rename", path)  # before the temporary file, which may be another process's by now
    try:
        with written_durably(temporary, pieces, mode):
            pass
        rename(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


@contextlib.contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that a user names as an output: it takes the place of a former one, behind a symbolic link, when it
    is complete. A pipe or a device stays, and is written into."""
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
        rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def numbered(directory: Path, name: str) -> Path:
    """Return the first unused path of ``directory/name.0001``, ``.0002`` …, for something that is moved aside."""
    number = 1
    while (path := directory / f"{name}.{number:04d}").exists():
        number += 1
    return path


# --- going back or starting over moves files into ``rewound/`` and deletes nothing ----------------------------------


def new_archive_dir(output_dir: Path) -> Path:
    """Return an unused path for an abandoned timeline, ``rewound/timeline.0001`` and so on. Does not create it."""
    return numbered(output_dir / "rewound", "timeline")


def run_files(output_dir: Path) -> list[Path]:
    """What the run in ``output_dir`` consists of: files and directories; nothing if there is no run."""
    names = ("checkpoints", "recoveries.jsonl", "control.jsonl", "logs", "witness", "run.json", "config.json")
    return [path for name in names if (path := output_dir / name).exists()]


def archive_run(files: Iterable[Path], place: Path) -> None:
    """Move a run into an archive, one file after another. If the process is killed meanwhile, call it again."""
    for path in files:
        make_directory(place)
        rename(path, place / path.name)
        fsync_directory(path.parent)
