"""Run lock: one live process per output directory, and all ranks in the same directory."""

from __future__ import annotations

import errno
import json
import os
import struct
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from dalsegno.errors import Locked, NotSupported

from .filesystem import open_own
from .posix import O_NOFOLLOW, O_NONBLOCK, can_train, fcntl, host_name, pread

VISIBLE_WITHIN_S = 60.0
"""Seconds until a file written on one host must be visible on all: network disks cache that a file was absent."""

_TAKEN = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class DirectoryLock:
    """Allows one live process at a time in a directory.

    The kernel's lock belongs to the open file, not to the process: if the process opens and closes the lock file
    elsewhere (e.g. to copy the whole folder), the lock stays. (A POSIX record lock would be dropped.) The kernel drops
    the lock once the file is closed everywhere, however the process dies. A forked process, such as a data loader's
    worker, closes its copy at once, so it does not hold the lock longer than its parent.

    The kernel's lock may not work between hosts, so the file also names the holder; release empties it. An entry of
    another host counts as held unless that process is certainly dead.

    Raises:
        Locked: on :meth:`acquire`, if this or another process holds the lock, or may hold it on another host.
        NotSupported: on :meth:`acquire`, on a system where nothing can be trained.
        OSError: on :meth:`acquire`, if the folder is not writable, or its ``.lock`` is a link.
    """

    _held_here: ClassVar[dict[Path, DirectoryLock]] = {}

    def __init__(self, directory: Path, *, take_over: bool = False) -> None:
        """``take_over``: ignore an entry of another host."""
        self._path = _file_of(directory)
        self._take_over = take_over
        self._descriptor: int | None = None

    @classmethod
    def is_held(cls, directory: Path) -> bool:
        """Whether a live process, including this one, holds the lock. Takes no lock, needs no write permission."""
        path = _file_of(directory)
        try:
            descriptor = os.open(path, os.O_RDONLY | O_NOFOLLOW | O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):
                return False
            raise
        try:
            known = _is_locked(descriptor)
            return cls._lives(path, Holder.read(descriptor)) if known is None else known
        finally:
            os.close(descriptor)

    @classmethod
    def _lives(cls, path: Path, holder: Holder | None) -> bool:
        """Whether the holder of the lock at ``path`` is alive on this host, if the kernel cannot tell."""
        if holder is not None and holder.is_me():  # or a process of a former container that had the same pid
            return path in cls._held_here
        return holder is not None and holder.lives_here()

    def acquire(self) -> str:
        """Take the lock. Returns the token in the lock file, for :func:`is_visible`."""
        if not can_train():
            raise NotSupported(f"{self._path.parent}: training needs Linux or macOS; on Windows, train in WSL")
        if self._path in self._held_here:
            raise Locked(f"{self._path.parent}: already in use by another run in this process ({os.getpid()})")
        descriptor = open_own(self._path, os.O_RDWR | os.O_CREAT)
        try:
            self._take(descriptor)
            me = Holder.here()
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(me)).encode(), 0)
            os.fsync(descriptor)  # for other hosts
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self._held_here[self._path] = self
        return me.token

    def _take(self, descriptor: int) -> None:
        holder, folder = Holder.read(descriptor), self._path.parent
        try:
            _lock(descriptor)
            is_alive = False
        except OSError as error:
            if error.errno not in (*_TAKEN, *_NO_LOCKS):
                raise
            is_alive = error.errno in _TAKEN or self._lives(self._path, holder)
        if is_alive:
            who = holder or "another process"
            raise Locked(f"{folder}: in use by {who}; wait for it, stop it, or use another output_dir")
        if holder is not None and not self._take_over:
            holder.raise_if_maybe_alive(folder, self._path.name)

    def release(self) -> None:
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            del self._held_here[self._path]
            os.close(self._descriptor)
            self._descriptor = None

    @classmethod
    def _close_in_child(cls) -> None:
        """Close the lock files in a forked process. Closing leaves the parent its lock; unlocking would release it."""
        for lock in cls._held_here.values():
            assert lock._descriptor is not None, "it is held"
            os.close(lock._descriptor)
            lock._descriptor = None
        cls._held_here.clear()

    def __enter__(self) -> DirectoryLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


if can_train():
    os.register_at_fork(after_in_child=DirectoryLock._close_in_child)


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder named in a lock file. ``since``: UTC seconds. ``lives``: restart counts by job, see below."""

    host: str
    pid: int
    since: float
    token: str
    lives: dict[str, tuple[str, int]]

    @classmethod
    def here(cls) -> Holder:
        """Describe this process."""
        return cls(host_name(), os.getpid(), time.time(), os.urandom(8).hex(), _lives_of_this_job())

    @classmethod
    def read(cls, descriptor: int) -> Holder | None:
        """Like :meth:`parse`, for the content of an open file."""
        return cls.parse(pread(descriptor, 4096, 0))

    @classmethod
    def parse(cls, data: bytes) -> Holder | None:
        """Return None if ``data`` is empty or malformed."""
        try:
            entry = json.loads(data)
            lives = {str(kind): (str(job), int(life)) for kind, (job, life) in entry.get("lives", {}).items()}
            return cls(str(entry["host"]), int(entry["pid"]), float(entry["since"]), str(entry.get("token", "")), lives)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def is_here(self) -> bool:
        """Whether the holder is on this host."""
        return self.host == host_name()

    def is_me(self) -> bool:
        """Whether the holder is this process, or an earlier one of this host with the same pid."""
        return self.is_here() and self.pid == os.getpid()

    def lives_here(self) -> bool:
        """Whether the holder is a live process of this host. False on Windows, which does not see those of WSL."""
        return can_train() and self.is_here() and _lives(self.pid)

    def raise_if_maybe_alive(self, place: object, file_name: str) -> None:
        """
        Raises:
            Locked: if the holder is on another host and may be alive.
        """
        if not self.is_here() and not self.is_certainly_dead():
            raise Locked(
                f"{place}: in use by {self}, and this host ({host_name()}) cannot see whether that process "
                f"is alive; if it is not, delete {file_name} there, or train with "
                "TrainingArguments(take_over_lock=True) once"
            )

    def is_certainly_dead(self) -> bool:
        """Whether the holder belonged to an earlier start of this process's own job; that start ended before this."""
        return any(
            self.lives.get(kind, ("", life))[0] == job and self.lives[kind][1] < life
            for kind, (job, life) in _lives_of_this_job().items()
        )

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host} since {since}"


def is_visible(directory: Path, token: str) -> bool:
    """Whether the lock file, as seen from this host, contains the token that :meth:`DirectoryLock.acquire` returned.

    Waits for it, up to :data:`VISIBLE_WITHIN_S`. Not for the process that holds the lock.
    """
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while (holder := _holder_of(directory)) is None or holder.token != token:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True


def _holder_of(directory: Path) -> Holder | None:
    try:
        list(directory.iterdir())  # makes a network disk ask its server
        descriptor = os.open(directory / ".lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        return Holder.read(descriptor)
    finally:
        os.close(descriptor)


def _lives_of_this_job() -> dict[str, tuple[str, int]]:
    """Job id and restart count by launcher: of Slurm, which requeues jobs, and torchrun, which restarts them."""
    found = {}
    for kind, job, life in (
        ("slurm", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
        ("torchrun", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ):
        name, count = os.environ.get(job, "none"), os.environ.get(life, "0")
        if name != "none" and count.isdecimal():  # torchrun's default id, shared by all unnamed jobs
            found[kind] = (name, int(count))
    return found


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _file_of(directory: Path) -> Path:
    """Path of the lock file. The folder may be reached through links; the lock file must not be a link."""
    return directory.resolve() / ".lock"


def _lock(descriptor: int) -> None:
    """Lock the open file rather than the process, whose lock would be dropped by any close of the file.

    An open file description lock conflicts with the POSIX record locks of older versions and works on network disks.
    On other systems ``flock``, which Linux's network disks implement by such a lock.

    Raises:
        OSError: if another open file holds it (:data:`_TAKEN`), or the disk has no locks (:data:`_NO_LOCKS`).
    """
    if sys.platform == "linux":
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file())
            return
        except OSError as error:
            if error.errno != errno.EINVAL:  # an old kernel, or a sandbox, without such locks
                raise
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_locked(descriptor: int) -> bool | None:
    """Whether another open file holds a conflicting lock; None if that cannot be determined."""
    if sys.platform == "linux" and can_train():
        try:
            answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _whole_file())
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        else:
            return bool(struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK)
    return None


def _whole_file() -> bytes:
    """``struct flock``: kind, whence, start, length (0: to the end), pid (0: for an open file description)."""
    return struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
