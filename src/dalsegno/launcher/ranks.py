"""Ranks: the processes of one leg on this host."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import Any

from dalsegno.distributed import forked

from .options import Start
from .rank import RankStart, run_rank

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
    forkserver.set_forkserver_preload(["dalsegno.launcher.template", *forked.PRELOADED, "dalsegno.launcher.rank"])
    is_given = "OMP_NUM_THREADS" in os.environ
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        forkserver.ensure_running()
    finally:
        if not is_given:
            os.environ.pop("OMP_NUM_THREADS", None)
