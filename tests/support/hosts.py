"""Processes that take part as hosts or containers of their own: other names, and a disk whose locks reach no other."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.distributed import collectives
from dalsegno.system import lease
from dalsegno.system.lock import DirectoryLock
from dalsegno.testing import FaultPlan
from support.listeners import Listener
from support.small import small_trainer


def name_host(name: str) -> None:
    """Give this process a host name of its own."""
    new_names = 0x04000000  # CLONE_NEWUTS
    if ctypes.CDLL(None, use_errno=True).unshare(new_names) == 0:
        socket.sethostname(name)
    else:  # without the privilege for it
        names = types.SimpleNamespace(nodename=name)
        os.uname = lambda: names  # type: ignore[assignment,return-value]


needs_pid_namespaces = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs the privilege to create pid namespaces",
)


def as_process_one(work: Callable[..., str], *arguments: Any) -> str:
    """The result of ``work``, called in the first process of a new pid namespace, as in a container.

    That process is killed when this one dies.
    """
    new_pids, die_with_parent = 0x20000000, 1  # CLONE_NEWPID, PR_SET_PDEATHSIG
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(new_pids) == 0, os.strerror(ctypes.get_errno())
    receiver, sender = os.pipe()
    if os.fork() == 0:
        libc.prctl(die_with_parent, signal.SIGKILL)
        try:
            assert os.getpid() == 1
            os.write(sender, work(*arguments).encode())
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, encoding="utf-8") as pipe:
        return pipe.read()


def lose_kernel_locks() -> None:
    """From now on the kernel locks no file for this process, as on a network disk without locks."""
    real = fcntl.fcntl

    def refuse(descriptor: int, command: int, *more: Any) -> Any:
        if command in (fcntl.F_OFD_SETLK, fcntl.F_OFD_GETLK):
            raise OSError(errno.ENOLCK, "No locks available")
        return real(descriptor, command, *more)

    fcntl.fcntl = refuse  # type: ignore[assignment]


def _let_time_stand_still() -> None:
    """Until a plan suspends this process, from within this thread: it does not run on until another is suspended."""
    now, real = [1.0], os.kill

    def strike(pid: int, number: int) -> None:
        if number == 0:  # the question whether a process is alive
            real(pid, number)
            return
        signal.pthread_kill(threading.get_ident(), number)
        now[0] += 1000.0

    lease._clock = lambda: now[0]
    os.kill = strike


def host_trainer(run: Path, *callbacks: Any, **settings: Any) -> ds.Trainer:
    """A log record at each step, and a checkpoint every two."""
    chosen = {"logging_steps": 1, "save_steps": 2, "max_steps": 12, **settings}
    return small_trainer(run, JsonLogger(), *callbacks, **chosen)


def train_on_host(
    host: str,
    run: Path,
    ttl: float = 60.0,
    plan: FaultPlan | None = None,
    until: Path | None = None,
) -> str:
    """Train in a shared directory; returns the outcome or the error.

    Args:
        host: name of this process's host.
        run: the directory.
        ttl: seconds of its lease.
        plan: strikes this process. For it, time passes only while it is suspended, so it is not late before.
        until: wait for this file at the end of the fourth step, and stop there.
    """
    name_host(host)
    lose_kernel_locks()
    lease.TTL_S, lease.RENEW_S = ttl, min(0.02, ttl / 4)
    if plan is not None:
        _let_time_stand_still()
        plan.arm()

    def wait_at_the_end(ctx: Any) -> None:
        if until is not None and ctx.step == 4:
            while not until.exists():
                time.sleep(0.02)
            ctx.control.stop("there is a file")

    trainer = host_trainer(run, Listener({"on_step_end": wait_at_the_end}, name="waiting"), save_total_limit=3)
    try:
        return trainer.train().reason
    except (ds.Locked, ds.SaveFailed) as error:
        return f"{type(error).__name__}: {error}"


def be_taken_over(run: Path) -> tuple[str, list[str]]:
    """On each rank: another host takes over in the third step. The error, and what on_train_end was called with."""
    reasons: list[str] = []

    def take_over(ctx: Any) -> None:
        if ctx.state.global_step == 2 and collectives.rank() == 0:
            present = json.loads((run / ".lock").read_text())
            (run / ".other").write_text(json.dumps({**present, "host": "node-17", "token": "0123456789abcdef"}))
            (run / ".other").rename(run / ".lock")
            held = DirectoryLock.lease_of(run)
            assert held is not None
            held._certain_until = 1e-9  # as if its thread had not run for a minute

    listener = Listener({"on_step_begin": take_over, "on_train_end": lambda ctx: reasons.append(ctx.reason)})
    try:
        host_trainer(run, listener, parallel="auto", per_device_train_batch_size=2).train()
    except ds.LeaseLost as error:
        return str(error), reasons
    return "no error", reasons
