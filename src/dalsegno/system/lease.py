"""Lease: a lock that its holder renews, so that the lock of a dead host expires.

``.lock`` names the holder, ``.lease`` until when it holds. The holder rewrites ``.lease`` every :data:`RENEW_S`
seconds. A process that finds the entry of another host, or of another container of its own, watches ``.lease``: a
change refuses it, none for the entry's whole duration lets it take over. No clock of another host, nor of the store, is
compared with one here: as in the leader election of Kubernetes, an observer counts the seconds since it has last seen a
change.

Every change of the holder is decided by one atomic operation: the new holder creates ``.lock.after-…``, named by the
former entry, which only one process can. It reads ``.lock`` again, writes its own entry, and removes the file. If it
dies before that, the file names it as the holder. A holder that was late to renew (suspended, or cut off from its
store) succeeds itself in the same way: either no other process has taken over, and none can now, or its lease is lost.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Protocol

from dalsegno.errors import LeaseLost, Locked
from dalsegno.system.machine import boot_id, can_train, host_name, pid_namespace

logger = logging.getLogger("dalsegno")

LOCK, LEASE = ".lock", ".lease"

TTL_S = 60.0
"""Seconds without a renewal after which another process may take over."""

RENEW_S = 15.0
"""Seconds between two renewals."""

_clock: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
"""Seconds, also those that the host was suspended, if the system counts them."""

_CERTAIN = 0.75  # share of the duration in which the holder needs no proof: ends before an observer's count can
_LONGEST_LEASE_S = 3600.0

_tokens_here: set[str] = set()  # of this process's leases: a restarted container may have the same host and pid


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder named in a lock file. ``since``: UTC seconds. ``lives``: restart counts by job, see below."""

    host: str
    pid: int
    since: float
    token: str
    lives: dict[str, tuple[str, int]]
    lease: float | None = None
    """Seconds without a renewal after which the entry has expired; None: it never expires."""
    boot: str | None = None
    """Start of the holder's kernel; None, here and below: unknown, and taken to be the same."""
    pid_namespace: str | None = None

    @classmethod
    def here(cls, lease: float | None = None) -> Holder:
        """Describe this process, under a new token."""
        token, lives = os.urandom(8).hex(), _lives_of_this_job()
        return cls(host_name(), os.getpid(), time.time(), token, lives, lease, boot_id(), pid_namespace())

    @classmethod
    def parse(cls, data: bytes | None) -> Holder | None:
        """Return None if ``data`` is None, empty or malformed."""
        try:
            entry = json.loads(data or b"")
            lives = {str(kind): (str(job), int(life)) for kind, (job, life) in entry.get("lives", {}).items()}
            lease = entry.get("lease")
            lease = float(lease) if lease is not None and 0 < float(lease) <= _LONGEST_LEASE_S else None
            token, host, pid, since = str(entry.get("token", "")), str(entry["host"]), int(entry["pid"]), entry["since"]
            return cls(host, pid, float(since), token, lives, lease, entry.get("boot"), entry.get("pid_namespace"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def encoded(self) -> bytes:
        """The entry for :meth:`parse`."""
        return json.dumps(asdict(self)).encode()

    def shares_kernel(self) -> bool:
        """Whether the holder's kernel is this process's, on the same host and not started again since."""
        return self.host == host_name() and self.boot in (None, boot_id())

    def is_here(self) -> bool:
        """Whether this process would see the holder: it shares the kernel and the pid namespace."""
        return self.shares_kernel() and self.pid_namespace in (None, pid_namespace())

    def lives_here(self) -> bool:
        """Whether the holder is a live process here. False on Windows, which does not see those of WSL."""
        if not (can_train() and self.is_here()):
            return False
        if self.pid == os.getpid():  # or an earlier process, of a former container, had the same pid
            return self.token in _tokens_here
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's
            pass
        return True

    def is_dead(self) -> bool:
        """Whether a holder that does not live here is dead: it was here, or belonged to an earlier start of this
        process's own job, which ended before this one."""
        return self.is_here() or any(
            self.lives.get(kind, ("", life))[0] == job and self.lives[kind][1] < life
            for kind, (job, life) in _lives_of_this_job().items()
        )

    def refuse(self, place: str, why: str = "") -> Locked:
        """The error for a process that must not take the lock. ``why``: follows the holder's description."""
        return Locked(f"{place}: in use by {self}{why}; wait for it, stop it, or use another output_dir")

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        is_beside = self.shares_kernel() and not self.is_here()
        return f"process {self.pid} {'in another container ' * is_beside}on {self.host} since {since}"


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


class LeaseFiles(Protocol):
    """The small files of a lease: in a directory or at a URL. All methods may raise OSError, or a library's error."""

    def read(self, name: str) -> bytes | None:
        """Present content, past any cache; None if there is no such file."""

    def write(self, name: str, data: bytes) -> None:
        """Create or overwrite a file."""

    def create(self, name: str, data: bytes) -> bool:
        """Create a file that does not exist yet; returns whether this call has."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; missing ones are skipped."""


def read_holder(files: LeaseFiles) -> Holder | None:
    """The present holder: that of ``.lock``, or the process that is succeeding it."""
    return _read_succession(files)[0]


def _read_succession(files: LeaseFiles) -> tuple[Holder | None, list[str]]:
    """Return the present holder, and the files of takeovers that ``.lock`` does not show yet."""
    holder, takings = Holder.parse(files.read(LOCK)), list[str]()
    while (name := _taking(holder)) not in takings and (successor := Holder.parse(files.read(name))) is not None:
        holder = successor
        takings.append(name)
    return holder, takings


def outlast(files: LeaseFiles, place: str, holder: Holder | None, *, take_over: bool) -> Holder | None:
    """Wait until the lease of ``holder`` has expired, unless it is dead, or to ``take_over`` from. Returns it; None if
    the lock is released by then. Raises Locked if the holder renews the lease."""
    if holder is None or holder.is_dead() or take_over:
        return holder
    if holder.lease is None:
        raise Locked(
            f"{place}: in use by {holder}, and this host ({Holder.here().host}) cannot see whether that process "
            f"is alive; if it is not, delete {LOCK} there, or train with "
            "TrainingArguments(take_over_lock=True) once"
        )
    logger.warning("%s: locked by %s; waiting %.0f s for it to renew its lease", place, holder, holder.lease)
    seen, began = files.read(LEASE), _clock()
    while True:
        is_over = _clock() >= began + holder.lease  # before the look: this process may have been suspended
        lease, present = files.read(LEASE), read_holder(files)
        if present is None:
            return None
        if present.token != holder.token:
            raise present.refuse(place)
        if lease != seen:
            raise holder.refuse(place, f", whose lease is held until {_until(lease)}")
        if is_over:
            logger.warning("%s: the lease of %s has expired; this process takes over", place, holder)
            return holder
        time.sleep(min(1.0, holder.lease / 30))


class Lease:
    """Held from :meth:`acquire` to :meth:`release`, and renewed on a thread of its own. ``place``: directory or URL of
    ``files``, for messages."""

    def __init__(self, files: LeaseFiles, place: str) -> None:
        self._files = files
        self._place = place
        self._me: Holder | None = None
        self._successor: Holder | None = None  # while ``_succeed`` is at work
        self.loss: str | None = None
        """Why this process must not write any more, once that is known."""
        self._certain_until = 0.0
        self._renewing = threading.RLock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dalsegno-lease", daemon=True)

    def acquire(self, former: Holder | None) -> str:
        """Succeed ``former``, which is dead or has released the lock. Returns the token of the new entry."""
        if not self._succeed(former):
            other = read_holder(self._files) or "another process"
            raise Locked(
                f"{self._place}: {other} has just acquired it; wait for it, stop it, or use another output_dir "
                f"(if there is no such process, delete {_taking(former)} there)"
            )
        assert self._me is not None
        try:
            self._renew()
            self._thread.start()
        except BaseException:
            _tokens_here.discard(self._me.token)
            raise
        return self._me.token

    def is_certain(self) -> bool:
        """Whether the last renewal is so recent that no other process can have taken over. Fast: files are not read."""
        return self.loss is None and _clock() < self._certain_until

    def confirm(self) -> None:
        """Read whether this process still holds the lease; renew it if that is overdue. Raises LeaseLost if another
        process has taken over."""
        with self._renewing:
            if self.is_certain():
                self._expect_own()
            else:
                self._renew()

    def release(self) -> bool:
        """End the renewals and delete ``.lease``. Returns whether ``.lock`` still is this process's, to be removed."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5.0)  # it may hang at a store that does not answer
        try:
            self.confirm()
            self._files.delete([LEASE])
        except LeaseLost:
            return False
        finally:
            if self._me is not None:
                _tokens_here.discard(self._me.token)
        return True

    # -- renewal ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause, failed = RENEW_S, False
        while not self._ending.wait(pause):
            try:
                self._renew()
                pause, failed = RENEW_S, False
            except LeaseLost as error:
                logger.error("%s", error)
                return
            except Exception as error:  # any exception of a third-party filesystem
                if not failed:
                    what = f"{type(error).__name__}: {error}"
                    logger.warning("%s: the lease could not be renewed (%s); retrying", self._place, what)
                pause, failed = RENEW_S / 4, True

    def _renew(self) -> None:
        with self._renewing:
            began, is_certain = _clock(), self.is_certain()
            if self.loss is not None:
                raise LeaseLost(self.loss)
            if is_certain or self._certain_until == 0.0:
                self._expect_own()
            elif not self._succeed(self._me):
                self._lose()
            self._files.write(LEASE, self._encoded())
            self._certain_until = began + _CERTAIN * TTL_S

    def _succeed(self, former: Holder | None) -> bool:
        """Try to become the holder after ``former``, by an entry with a new token. To be repeated after an error."""
        me = self._successor = self._successor or Holder.here(TTL_S)
        taking, data = _taking(former), me.encoded()
        if not (self._files.create(taking, data) or self._files.read(taking) == data):  # created before an error
            return False
        obsolete = [taking]
        try:
            present, takings = _read_succession(self._files)
            if present is None or present.token != me.token:  # another process has succeeded ``former``
                return False
            self._files.write(LOCK, data)
            obsolete = takings
        finally:
            self._files.delete(obsolete)
        if self._me is not None:
            _tokens_here.discard(self._me.token)
        _tokens_here.add(me.token)
        self._me, self._successor = me, None
        return True

    def _expect_own(self) -> None:
        if self.loss is not None:
            raise LeaseLost(self.loss)
        holder = read_holder(self._files)
        if holder is None or self._me is None or holder.token != self._me.token:
            self._lose()

    def _lose(self) -> None:
        elsewhere = "a link on its path leads elsewhere now"
        if self._files.read(LOCK) is None:
            why = f"its {LOCK} is gone: it was moved or removed, or {elsewhere}; resume the run where it is now"
        else:
            other = read_holder(self._files) or f"another process, which has ended since (or {elsewhere})"
            why = (
                f"was taken over by {other}: this process did not renew its lease for {TTL_S:.0f} s, or the other was "
                "started with take_over_lock=True"
            )
        self.loss = f"{self._place}: {why}; nothing more is written from here"
        raise LeaseLost(self.loss)

    def _encoded(self) -> bytes:
        """Always of the same length, so that it replaces the former one in place, also on a full disk."""
        assert self._me is not None
        until = datetime.now(UTC) + timedelta(seconds=TTL_S)
        return json.dumps({"token": self._me.token, "until": until.isoformat(timespec="microseconds")}).encode()


def _taking(former: Holder | None) -> str:
    """Name of the file whose creation decides who succeeds ``former``; None: a released lock."""
    token = "" if former is None else former.token
    return f"{LOCK}.after-{hashlib.sha256(token.encode()).hexdigest()[:16] if token else 'release'}"


def is_current(lease: bytes | None) -> bool:
    """Whether a ``.lease`` has not expired, if the holder's clock is as this one: nothing is taken over by that."""
    end = _end_of(lease)
    return end is not None and end > datetime.now(UTC)


def _until(lease: bytes | None) -> str:
    end = _end_of(lease)
    return "an unknown time" if end is None else end.strftime("%Y-%m-%d %H:%M:%S UTC")


def _end_of(lease: bytes | None) -> datetime | None:
    try:
        return datetime.fromisoformat(json.loads(lease or b"")["until"]).astimezone(UTC)
    except (ValueError, KeyError, TypeError):
        return None
