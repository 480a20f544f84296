"""Ranks: the processes of one leg on this host, and the life of each from its start to its exit status."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dalsegno.distributed import accelerator, forked
from dalsegno.errors import ConfigurationError, DalsegnoError
from dalsegno.events.registration import register_global_callback
from dalsegno.system.exit_status import ExitStatus, exit_status_of
from dalsegno.system.machine import set_process_title
from dalsegno.training.stop_requests import SIGNALS

from .findings import RankError
from .heartbeats import HeartbeatCallback, Heartbeats, write_stacks_at_signal
from .options import Start
from .parcel import read_private
from .targets import Target, from_tree, name_of, write_outcome

TARGET = "target.json"
HEARTBEATS = "heartbeats"


@dataclass(frozen=True, slots=True)
class RankStart:
    """What a rank's process is started with."""

    local_rank: int
    environment: Mapping[str, str]
    folder: str
    """Private folder of the launch: holds the target, and what ranks report."""
    threads: int | None
    """Threads of each operation; None: torch's own choice."""
    ignored: Sequence[int]
    """Signals that the launcher ignores."""
    launched: float
    """UTC seconds at which the launch began."""
    needs_gpu: bool
    """Whether the launcher sees a GPU, so that not seeing one here is an error."""
    target: Target | None = None
    """Given to a process that is forked from the launcher itself; otherwise it is in the folder."""


def run_rank(start: RankStart) -> None:
    """Run the target; exits with its status."""
    _settle(start)
    folder = Path(start.folder)
    register_global_callback(HeartbeatCallback(Heartbeats(folder / HEARTBEATS), start.local_rank))
    status: int
    try:
        if start.needs_gpu and accelerator.kind() is None:  # it would train on the CPU without a word
            raise ConfigurationError(
                "start='fork': CUDA was initialized before the launch (torch.cuda.is_available() is enough), so the "
                "ranks cannot use it; restart the notebook and launch first, or use start='forkserver'"
            )
        target = start.target or from_tree(read_private(folder / TARGET))
        rank, ranks = start.environment["RANK"], start.environment["WORLD_SIZE"]
        set_process_title(f"rank {rank}/{ranks}: dalsegno launch {name_of(target)}")
        ended = target.run(start.launched)
        if start.local_rank == 0:
            write_outcome(folder, ended.result, ended.callbacks)
        status = ended.status
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        status = exit_status_of(error)
        RankError.write(folder, start.local_rank, error)
        _print(error, start.environment["RANK"])
    sys.exit(status)


def _settle(start: RankStart) -> None:
    forked.settle_after_fork(start.environment, start.threads)
    os.setsid()  # a terminal's Ctrl-C reaches the launcher only, which forwards it
    for number in (*SIGNALS, signal.SIGHUP):
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in start.ignored else default)
    write_stacks_at_signal(Path(start.folder), start.local_rank)
    threading.Thread(target=_end_with_launcher, name="dalsegno-launcher", daemon=True).start()


def _end_with_launcher() -> None:
    """Kill this process once the launcher is gone: the server it was forked from lives as long as its ranks."""
    launcher = parent_process()
    if launcher is not None:
        wait([launcher.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)


def _print(error: BaseException, rank: str) -> None:
    if isinstance(error, KeyboardInterrupt):
        return
    if isinstance(error, DalsegnoError) and exit_status_of(error) in (ExitStatus.WRONG_USE, ExitStatus.IN_USE):
        text = f"dalsegno: {error}"
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
    prefix = f"[rank {rank}] "
    print(prefix + text.replace("\n", f"\n{prefix}"), file=sys.stderr, flush=True)


_REAP_SECONDS = 30.0  # a process in uninterruptible sleep cannot be killed


class Ranks:
    """Started processes, by local rank."""

    def __init__(self, start: Start, starts: Sequence[RankStart]) -> None:
        context: Any = multiprocessing.get_context(start)
        self._processes = [context.Process(target=run_rank, args=(each,)) for each in starts]
        self._killed: set[int] = set()
        for process in self._processes:
            process.start()

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def exits(self) -> dict[int, int]:
        """Exit status, or minus the number of the signal, of each local rank that has ended by itself."""
        codes = {rank: process.exitcode for rank, process in enumerate(self._processes)}
        return {rank: code for rank, code in codes.items() if code is not None and rank not in self._killed}

    def send(self, number: int) -> None:
        """Send a signal to each rank that is alive."""
        for process in self._processes:
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def end(self, grace: float) -> None:
        """Give the ranks ``grace`` seconds to end by themselves, then kill them."""
        deadline = time.monotonic() + grace
        while (alive := [each for each in self._processes if each.exitcode is None]) and time.monotonic() < deadline:
            wait([each.sentinel for each in alive], max(0.0, deadline - time.monotonic()))
        self._killed |= {rank for rank, process in enumerate(self._processes) if process.exitcode is None}
        for process in self._processes:
            if process.exitcode is None or process.exitcode < 0:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # with its children, such as data loader workers
        for rank in self._killed:
            self._processes[rank].kill()  # it may not lead a group yet
            self._processes[rank].join(_REAP_SECONDS)


def warm_up(threads: int | None) -> None:
    """Start the process that ranks are forked from, and let it import torch while the hosts find each other.

    ``threads``: of each operation; libraries read the number when they are imported.
    """
    forkserver.set_forkserver_preload(["dalsegno.launcher.template", *forked.PRELOADED, "dalsegno.launcher.ranks"])
    is_given = "OMP_NUM_THREADS" in os.environ
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        forkserver.ensure_running()
    finally:
        if not is_given:
            os.environ.pop("OMP_NUM_THREADS", None)
