"""One live process at a time in a folder, and all ranks in the same one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from dalsegno.errors import Locked

from .filesystem import open_own

PATIENCE = 60.0
"""Seconds until a file that was written on one host must be seen on all: network disks remember what was not there."""

_TAKEN = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class DirectoryLock:
    """One live process at a time in a directory.

    The kernel's lock belongs to the open file, not to the process: so nothing else that the process opens and closes,
    a copy of the whole folder for example, drops it. (A POSIX record lock is dropped by that.) The kernel drops it
    once the file is closed everywhere, however its process dies; a process that is forked from it, a data loader's
    worker for example, closes its own copy at once, and so does not hold the lock any longer than its parent.

    Between hosts it may not reach, so the file names who holds it, and is emptied at the release. What a process of
    another host has left in it counts, unless that one is certain to be dead.

    Raises:
        Locked: on :meth:`acquire`, if another process, or this one, holds it, or may do so on another host.
        OSError: on :meth:`acquire`, if the folder cannot be written to, or its ``.lock`` is a link.
    """

    _held_here: ClassVar[dict[Path, DirectoryLock]] = {}

    def __init__(self, directory: Path, *, take_over: bool = False) -> None:
        """``take_over``: what a process of another host has left does not count."""
        self._path = _file_of(directory)
        self._take_over = take_over
        self._descriptor: int | None = None

    @classmethod
    def is_held(cls, directory: Path) -> bool:
        """Whether a live process, this one included, holds it. Asking takes no lock, and needs no right to write."""
        path = _file_of(directory)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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
        """Whether the holder of the lock at ``path`` is a live process of this host, where no kernel can tell."""
        if holder is not None and holder.is_me():  # or had this process's number, in a container that is gone
            return path in cls._held_here
        return holder is not None and holder.lives_here()

    def acquire(self) -> str:
        """Hold it from now on. What is returned stands in the file, for :func:`is_seen`."""
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
            holder.expect_dead(folder, self._path.name)

    def release(self) -> None:
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            del self._held_here[self._path]
            os.close(self._descriptor)
            self._descriptor = None

    @classmethod
    def _leave_in_child(cls) -> None:
        """A forked process holds nothing: to close its copy leaves the lock to its parent, to unlock would not."""
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


os.register_at_fork(after_in_child=DirectoryLock._leave_in_child)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock, as the file tells it. ``since``: UTC seconds. ``lives``: which life of which job it is."""

    host: str
    pid: int
    since: float
    token: str
    lives: dict[str, tuple[str, int]]

    @classmethod
    def here(cls) -> Holder:
        """This process."""
        return cls(os.uname().nodename, os.getpid(), time.time(), os.urandom(8).hex(), _lives_of_this_job())

    @classmethod
    def read(cls, descriptor: int) -> Holder | None:
        """As :meth:`parse`, of what a file says."""
        return cls.parse(os.pread(descriptor, 4096, 0))

    @classmethod
    def parse(cls, data: bytes) -> Holder | None:
        """None where it says nothing, or nothing that can be understood."""
        try:
            said = json.loads(data)
            lives = {str(kind): (str(job), int(life)) for kind, (job, life) in said.get("lives", {}).items()}
            return cls(str(said["host"]), int(said["pid"]), float(said["since"]), str(said.get("token", "")), lives)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def is_here(self) -> bool:
        """Whether it is of this host."""
        return self.host == os.uname().nodename

    def is_me(self) -> bool:
        """Whether it is this process, or has had its number in another life of this host."""
        return self.is_here() and self.pid == os.getpid()

    def lives_here(self) -> bool:
        """Whether it is a live process of this host."""
        return self.is_here() and _lives(self.pid)

    def expect_dead(self, place: object, file_name: str) -> None:
        """
        Raises:
            Locked: if it is of another host, and may live.
        """
        if not self.is_here() and not self.is_surely_dead():
            raise Locked(
                f"{place}: in use by {self}, and whether that one still lives cannot be seen from this host "
                f"({os.uname().nodename}); if it does not, delete {file_name} there, or train with "
                "TrainingArguments(take_over_lock=True) once"
            )

    def is_surely_dead(self) -> bool:
        """Whether it was of a former life of the very job that this process is of: those are over before the next."""
        return any(
            self.lives.get(kind, ("", life))[0] == job and self.lives[kind][1] < life
            for kind, (job, life) in _lives_of_this_job().items()
        )

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host} since {since}"


def is_seen(directory: Path, token: str) -> bool:
    """Whether the lock's file, as it is seen from here, is the one that :meth:`DirectoryLock.acquire` has written.

    Waits for it, up to :data:`PATIENCE`. Not for the process that holds the lock.
    """
    deadline = time.monotonic() + PATIENCE
    while (holder := _holder_of(directory)) is None or holder.token != token:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True


def _holder_of(directory: Path) -> Holder | None:
    try:
        list(directory.iterdir())  # a network disk then asks its server
        descriptor = os.open(directory / ".lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        return Holder.read(descriptor)
    finally:
        os.close(descriptor)


def _lives_of_this_job() -> dict[str, tuple[str, int]]:
    """Of what Slurm requeues, and of what torchrun starts again: the job, and how often it was."""
    found = {}
    for kind, job, life in (
        ("slurm", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
        ("torchrun", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ):
        name, count = os.environ.get(job, "none"), os.environ.get(life, "0")
        if name != "none" and count.isdecimal():  # torchrun's name for all jobs that were given none
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
    """The folder may be reached through links; its lock is no link."""
    return directory.resolve() / ".lock"


def _lock(descriptor: int) -> None:
    """Lock the open file, and not for the process, whose every close of the file would drop it.

    An open file description lock is one that POSIX record locks of older versions respect, and that network disks
    know. Elsewhere ``flock``, which Linux's network disks turn into such a lock.

    Raises:
        OSError: if another open file has it (:data:`_TAKEN`), or there are no locks on this disk (:data:`_NO_LOCKS`).
    """
    if sys.platform == "linux":
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file())
            return
        except OSError as error:
            if error.errno != errno.EINVAL:  # an old kernel, or a sandbox, that does not know them
                raise
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_locked(descriptor: int) -> bool | None:
    """Whether a lock of another open file stands in the way of one that is not taken; None where nobody can tell."""
    if sys.platform == "linux":
        try:
            answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _whole_file())
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        else:
            return bool(struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK)
    return None


def _whole_file() -> bytes:
    """``struct flock``: kind, whence, start, length (to the end), process (none: of an open file description)."""
    return struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
