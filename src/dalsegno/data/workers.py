"""Signals in a data loader's worker processes: workers keep running when the run is asked to stop.

torchrun and Slurm send a rank's signal to all of its processes, and so does a terminal at Ctrl-C. A worker that ended
at once would break the current step, and with it the save that follows.

Workers end when their loader tells them over its queues, when this process dies, or at the latest when it exits.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch

from dalsegno.system.machine import extend_process_title

from .torchdata_loaders import StatefulDataLoader

_GRACE = 1.0  # seconds at exit


def ignore_stop_signals(loader: DataLoader[Any]) -> None:
    """From its next iterator on, only SIGKILL ends the loader's workers."""
    if loader.num_workers and not isinstance(loader.worker_init_fn, _IgnoreSignals):
        loader.worker_init_fn = _IgnoreSignals(loader.worker_init_fn)
        _terminate_at_exit()


@contextlib.contextmanager
def keep_exhausted_workers(loader: Any, state: Any) -> Iterator[None]:
    """Enclose the creation of the iterator that resumes from ``state``, a ``StatefulDataLoader``'s own.

    The state contains which workers had exhausted their part of the stream. torchdata requests one more batch from
    them anyway, and a dataset that restarts when exhausted would repeat all of it.
    """
    is_meant = isinstance(loader, StatefulDataLoader) and loader.num_workers > 0
    init = loader.worker_init_fn if is_meant else None
    if not isinstance(init, _IgnoreSignals):
        yield
        return
    workers = [state["_snapshot"]["_worker_snapshots"][f"worker_{each}"] for each in range(loader.num_workers)]
    parts = [worker["fetcher_state"] or {} for worker in workers]  # None: of a map dataset
    loader.worker_init_fn = replace(init, ended=tuple(bool(part.get("fetcher_ended")) for part in parts))
    try:
        yield
    finally:
        loader.worker_init_fn = init


@dataclass(frozen=True, slots=True)
class _IgnoreSignals:
    """Runs first in a worker; then calls the loader's own ``worker_init_fn``."""

    then: Callable[[int], None] | None
    ended: tuple[bool, ...] = ()
    """Whether each worker starts at the end of its part of the stream."""

    def __call__(self, worker: int) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        extend_process_title(f"data worker {worker}")
        if self.ended and self.ended[worker]:
            _start_exhausted()
        if self.then is not None:
            self.then(worker)


def _start_exhausted() -> None:
    """In a worker process, make the first fetcher exhausted and later epochs' fetchers normal."""
    fetchers: Any = fetch
    usual: Any = fetchers._IterableDatasetFetcher

    class Ended(usual):  # type: ignore[misc]
        ended = property(lambda self: True, lambda self, value: None)

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            fetchers._IterableDatasetFetcher = usual

    fetchers._IterableDatasetFetcher = Ended


@functools.cache
def _terminate_at_exit() -> None:
    """Python would send workers SIGTERM at exit and wait forever."""
    atexit.register(_terminate_children)  # called before multiprocessing's own handler


def _terminate_children() -> None:
    children = [child for child in multiprocessing.active_children() if child.daemon]
    if not children:
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else torch raises an error for each killed worker
    for child in children:
        child.terminate()
    waiting = [child.sentinel for child in children]
    while waiting and (ended := wait(waiting, timeout=_GRACE)):
        waiting = [sentinel for sentinel in waiting if sentinel not in ended]
    for child in children:
        child.kill()
