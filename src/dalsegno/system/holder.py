"""Holder: the process that a lock file names, and whether it is still alive as far as this process can tell."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass

from dalsegno.errors import Locked
from dalsegno.system.machine import boot_id, can_train, host_name, pid_namespace

_LONGEST_LEASE_S = 3600.0


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

    def is_me(self) -> bool:
        """Whether the holder is this process, or an earlier one here with the same pid."""
        return self.is_here() and self.pid == os.getpid()

    def lives_here(self) -> bool:
        """Whether the holder is a live process here. False on Windows, which does not see those of WSL."""
        if not (can_train() and self.is_here()):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's
            pass
        return True

    def is_dead(self) -> bool:
        """Whether a holder that does not live here is dead: it was here, or :meth:`is_certainly_dead`."""
        return self.is_here() or self.is_certainly_dead()

    def is_certainly_dead(self) -> bool:
        """Whether the holder belonged to an earlier start of this process's own job; that start ended before this."""
        return any(
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
