"""run_ranks, start_ranks: ranks as real processes, started in 0.1 s, joined over gloo.

They are forked from a server process that has torch loaded. Functions and arguments are pickled, as in
``multiprocessing``: a function must be at the top level of an importable module.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from dalsegno.distributed import forked
from dalsegno.errors import RankFailed

T = TypeVar("T")

PRELOADED = [*forked.PRELOADED, "dalsegno.testing"]
"""Modules that the server imports before it forks the first ranks; extend it before that if your functions import more.
"""

_GRACE = 20.0  # seconds that the other ranks have to end once one has failed


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended."""

    rank: int
    exit_code: int
    """Exit status, or minus the number of the signal that killed it."""
    value: Any = None
    """Return value of the function."""
    error: str | None = None
    """Traceback of the exception it raised, or that it was killed because it waited for a rank that had failed."""

    @property
    def was_killed(self) -> bool:
        """Whether by SIGKILL, and not only because it waited for a rank that had failed."""
        return self.exit_code == -signal.SIGKILL and self.error is None


class Ranks:
    """Processes that run a function as the ranks of one job."""

    def __init__(self, function: Callable[..., Any], world_size: int, args: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="dalsegno-ranks-")
        store = Path(self._folder.name) / "store"
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank,
                args=(rank, world_size, str(store), dict(os.environ), theirs, function, args),
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def kill(self, rank: int = 0) -> None:
        """Send SIGKILL to one rank."""
        self._processes[rank].kill()

    @property
    def alive(self) -> bool:
        return any(process.is_alive() for process in self._processes)

    def wait(self, timeout: float = 300.0) -> list[Outcome]:
        """Wait for all ranks to end; after a failure, the others have 20 s, and are killed then, as a launcher does:
        one that is just about to connect to a lost one waits for it until its process group's time is over.

        No process is left behind, whatever ends the wait (Ctrl-C, for example).

        Raises:
            RankFailed: after that time without a failure; the ranks are killed.
        """
        try:
            begun = time.monotonic()
            deadline = begun + timeout
            outcomes: dict[int, Outcome] = {}
            while len(outcomes) < len(self._processes):
                waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in outcomes}
                ready = wait([*waiting], max(0.0, deadline - time.monotonic()))
                for rank in (waiting[cast(Connection, pipe)] for pipe in ready):
                    outcomes[rank] = self._outcome(rank)
                failed = [rank for rank, outcome in outcomes.items() if outcome.exit_code != 0]
                if ready and failed:
                    deadline = min(deadline, time.monotonic() + _GRACE)
                elif failed:
                    for rank in waiting.values():
                        outcomes[rank] = self._ended(rank, f"killed {_GRACE:g} s after rank {failed[0]} had failed")
                elif not ready:
                    passed, ended = time.monotonic() - begun, f"ranks {sorted(outcomes)} of {len(self._processes)}"
                    raise RankFailed(f"timeout after {passed:.3g} s; ended: {ended}")
            return [outcomes[rank] for rank in sorted(outcomes)]
        finally:
            self._end()

    def _ended(self, rank: int, why: str) -> Outcome:
        process = self._processes[rank]
        process.kill()
        process.join()
        return Outcome(rank, process.exitcode or 0, error=why)

    def _outcome(self, rank: int) -> Outcome:
        value, error = None, None
        with suppress(EOFError):  # killed before it could send anything
            value, error = self._pipes[rank].recv()
        process = self._processes[rank]
        process.join()
        return Outcome(rank, process.exitcode or 0, value, error)

    def _end(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
            pipe.close()
        self._folder.cleanup()


def start_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> Ranks:
    """Run ``function(*args)`` in ``world_size`` new processes, joined in a gloo process group if there are several."""
    return Ranks(function, world_size, args)


def run_ranks(function: Callable[..., T], world_size: int, *args: Any, timeout: float = 300.0) -> list[T]:
    """Run ``function(*args)`` on ``world_size`` ranks and wait; returns each rank's return value.

    Raises:
        RankFailed: if a rank raised or was killed, with the tracebacks; or after ``timeout`` seconds.
    """
    return [cast(T, value) for value in values(start_ranks(function, world_size, *args).wait(timeout))]


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """Return value of each rank.

    Raises:
        RankFailed: if a rank raised or was killed, with the error of every failed rank: that of one is often only the
            loss of another.
    """
    if failures := _failures(outcomes):
        raise RankFailed("\n".join(failures))
    return [outcome.value for outcome in outcomes]


def _failures(outcomes: Iterable[Outcome]) -> list[str]:
    failed = [outcome for outcome in outcomes if outcome.exit_code != 0]
    return [f"rank {each.rank} ended with {each.exit_code}\n{each.error or ''}" for each in failed]


def _run_rank(
    rank: int,
    world_size: int,
    store: str,
    environment: dict[str, str],
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    if world_size > 1:  # Accelerate and Lightning look for all that torchrun sets, although the group is there
        ranks |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    forked.settle_after_fork(environment | ranks, threads=1)  # the same order of summation under any load
    value, error = None, None
    try:
        if world_size > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=120),
            )
            dist.barrier()  # a rank that ends while another still connects to it would make that one fail
        value = function(*args)
        if world_size > 1:
            dist.destroy_process_group()
    except BaseException:
        error = traceback.format_exc()
    pipe.send((value, error))
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else 1)  # skips teardown that could hang on dead ranks
