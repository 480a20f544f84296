"""Run lock: one live process per output directory, and all ranks in the same directory."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from dalsegno.errors import Locked, NotSupported
from dalsegno.system.machine import O_BINARY, O_NOFOLLOW, O_NONBLOCK, can_train, fcntl, pread

from .filesystem import add_fence, open_own, remove_fence
from .lease import LEASE, LOCK, Holder, Lease, is_current, outlast, read_holder

VISIBLE_WITHIN_S = 60.0
"""Seconds until a file written on one host must be visible on all: network disks cache that a file was absent."""

_ENTRY_BYTES = 1024

_MODE = 0o600
"""Whoever can read the lock file can lock it, and so stop the run."""

_TAKEN = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


class DirectoryLock:
    """Allows one live process at a time in a directory.

    Between processes of one kernel, its lock decides. It belongs to the open file, not to the process: if the process
    opens and closes the lock file elsewhere (e.g. to copy the whole folder), the lock stays. (A POSIX record lock would
    be dropped.) The kernel drops the lock once the file is closed everywhere, however the process dies. A forked
    process, such as a data loader's worker, closes its copy at once, so it does not hold the lock longer than its
    parent.

    The kernel's lock may not work between hosts, so the file also names the holder, which renews a
    :class:`~dalsegno.system.lease.Lease`; release empties the file. Once this process has lost the lease,
    :mod:`~dalsegno.system.filesystem` changes nothing below the directory. Raises Locked on :meth:`acquire`, if this or
    another process holds the lock, or may hold it out of sight; NotSupported on :meth:`acquire`, on a system where
    nothing can be trained; OSError on :meth:`acquire`, if the folder is not writable, or its ``.lock`` is a link.
    """

    _held_here: ClassVar[dict[Path, DirectoryLock]] = {}

    def __init__(self, directory: Path, *, take_over: bool = False) -> None:
        """``take_over``: take the lock from a process that this one cannot see."""
        self._directory = directory
        self._path = _file_of(directory)
        self._take_over = take_over
        self._descriptor: int | None = None
        self._lease: Lease | None = None

    @classmethod
    def is_held(cls, directory: Path) -> bool:
        """Whether a live process, including this one, holds the lock. Takes no lock, needs no write permission.

        What the kernel does not tell, of another user or host, the lease does: a killed process then counts as live for
        a minute. Raises PermissionError if another user holds it, or held it last, and there is no lease to read."""
        path = _file_of(directory)
        lease = path.with_name(LEASE)
        try:
            descriptor = os.open(path, os.O_RDONLY | O_NOFOLLOW | O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):
                return False
            if not isinstance(error, PermissionError) or (content := _read_fresh(lease)) is None:
                raise
            return is_current(content)
        try:
            known = _is_locked(descriptor)
            holder = Holder.parse(pread(descriptor, 4096, 0))
        finally:
            os.close(descriptor)
        if known or holder is None or (known is False and holder.shares_kernel()):
            return bool(known)
        return holder.lives_here() if holder.is_here() else is_current(_read_fresh(lease))

    @classmethod
    def lease_of(cls, directory: Path) -> Lease | None:
        """The lease of this process, which has locked ``directory`` by this path; None if it has not."""
        held = cls._held_here.values()
        return next((lock._lease for lock in held if lock._directory == directory), None)  # no look at the disk

    @classmethod
    def loss(cls, directory: Path) -> str | None:
        """Why this process, which has locked ``directory`` by this path, must not write there; None if it may."""
        lease = cls.lease_of(directory)
        if lease is None:
            return None
        if not lease.is_certain():
            with contextlib.suppress(OSError):  # LeaseLost, which is noted; or an error that a write would meet, too
                lease.confirm()
        return lease.loss

    def acquire(self) -> str:
        """Take the lock; returns its token, for :func:`is_visible`. Waits, if this process cannot see the holder, until
        the lease is renewed or has expired."""
        place = str(self._path.parent)
        if not can_train():
            raise NotSupported(f"{place}: training needs Linux or macOS; on Windows, train in WSL")
        if self._path in self._held_here:
            raise Locked(f"{place}: already in use by another run in this process ({os.getpid()})")
        try:
            descriptor = open_own(self._path, os.O_RDWR | os.O_CREAT, _MODE)
        except PermissionError as error:
            if not self._path.exists():
                raise
            try:
                user = self._path.owner()
            except KeyError:  # without a name on this host
                user = str(self._path.stat().st_uid)
            raise Locked(
                f"{place}: user {user} has trained here, and alone may open {LOCK}; that user resumes the run, or "
                f"removes {self._path} once it is not in use; or use another output_dir"
            ) from error
        with contextlib.suppress(PermissionError):  # another user's file, which its group may write
            os.fchmod(descriptor, _MODE)
        files = _DirectoryFiles(self._directory, descriptor)  # by the path that the run is written by
        lease = Lease(files, place)
        try:
            token = lease.acquire(self._former(files, place, descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor, self._lease = descriptor, lease
        self._held_here[self._path] = self
        add_fence(self._directory, lease)
        return token

    def _former(self, files: _DirectoryFiles, place: str, descriptor: int) -> Holder | None:
        """The holder to succeed; None if the lock was released."""
        known: bool | None = False
        try:
            _lock(descriptor)
        except OSError as error:
            if error.errno not in (*_TAKEN, *_NO_LOCKS):
                raise
            known = True if error.errno in _TAKEN else None
        holder = read_holder(files)
        if known or (known is None and holder is not None and holder.lives_here()):
            if holder is None:
                raise Locked(
                    f"{place}: in use by another process, which has not written its name into {LOCK}: a run that "
                    "begins or ends just now, or another program that has locked this file; try again, look for it "
                    f"with 'lslocks' or 'fuser {self._path}', or use another output_dir"
                )
            raise holder.refuse(place)
        if known is False and holder is not None and holder.shares_kernel():  # which has just granted its lock
            return holder
        return outlast(files, place, holder, take_over=self._take_over)

    def release(self) -> None:
        if self._descriptor is None or self._lease is None:
            return
        remove_fence(self._lease)
        del self._held_here[self._path]
        try:
            if self._lease.release():
                os.ftruncate(self._descriptor, 0)
        finally:
            os.close(self._descriptor)
            self._descriptor = self._lease = None

    @classmethod
    def _close_in_child(cls) -> None:
        """Close the lock files in a forked process. Closing leaves the parent its lock; unlocking would release it."""
        for lock in cls._held_here.values():
            assert lock._descriptor is not None and lock._lease is not None, "it is held"
            remove_fence(lock._lease)
            os.close(lock._descriptor)
            lock._descriptor = lock._lease = None
        cls._held_here.clear()

    def __enter__(self) -> DirectoryLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


if can_train():
    os.register_at_fork(after_in_child=DirectoryLock._close_in_child)


class _DirectoryFiles:
    """The files of a lease in a directory, seen past the caches of a network disk."""

    def __init__(self, directory: Path, lock: int) -> None:
        """``lock``: descriptor of the lock file, which is written in place: the kernel's lock is on that file."""
        self._directory = directory
        self._lock = lock

    def read(self, name: str) -> bytes | None:
        return _read_fresh(self._directory / name)

    def write(self, name: str, data: bytes) -> None:
        if name == LOCK:
            data = data.ljust(_ENTRY_BYTES)  # one write replaces the former entry: no reader finds half of it
            os.pwrite(self._lock, data, 0)
            os.ftruncate(self._lock, len(data))
            os.fsync(self._lock)  # for other hosts
            return
        descriptor = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | O_NOFOLLOW, 0o644)
        try:
            os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)  # which sends it to the server of a network disk

    def create(self, name: str, data: bytes) -> bool:
        path, draft = self._directory / name, self._directory / f"{name}.{os.urandom(8).hex()}"
        try:
            _create(draft, data)
            os.link(draft, path)  # complete from the first moment, and atomic on every version of NFS
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                _create(path, data)
            except FileExistsError:
                return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                draft.unlink()
        return True

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                (self._directory / name).unlink()


def _create(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | O_NOFOLLOW | O_BINARY, 0o644)
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_fresh(path: Path) -> bytes | None:
    try:
        list(path.parent.iterdir())  # makes a network disk ask its server
        descriptor = os.open(path, os.O_RDONLY | O_NOFOLLOW | O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        return pread(descriptor, 4096, 0)
    finally:
        os.close(descriptor)


def is_visible(directory: Path, token: str) -> bool:
    """Whether the lock file, as seen from this host, contains the token that :meth:`DirectoryLock.acquire` returned, or
    will within :data:`VISIBLE_WITHIN_S`. Not for the process that holds the lock."""
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while True:
        with contextlib.suppress(OSError):
            if (holder := Holder.parse(_read_fresh(directory / LOCK))) is not None and holder.token == token:
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)


def _file_of(directory: Path) -> Path:
    """Path of the lock file. The folder may be reached through links; the lock file must not be a link."""
    return directory.resolve() / LOCK


def _lock(descriptor: int) -> None:
    """Lock the open file rather than the process, whose lock would be dropped by any close of the file.

    An open file description lock conflicts with the POSIX record locks of older versions and works on network disks. On
    other systems ``flock``, which Linux's network disks implement by such a lock. An OSError is one of :data:`_TAKEN`,
    by another open file, or of :data:`_NO_LOCKS`, which the disk has not.
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
