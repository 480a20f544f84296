"""Workers: a data loader's processes live on when the run is asked to stop.

torchrun and Slurm send a rank's signal to all of its processes, a terminal does so with Ctrl-C. A worker that ended at
once would break the step that is just being done, and so the save that was to follow it.

They end as their loader tells them, over its queues; when this process is gone; or, at the latest, when it exits.
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
from torchdata.stateful_dataloader import StatefulDataLoader

_GRACE = 1.0  # seconds at exit


def ignore_stop_signals(loader: DataLoader[Any]) -> None:
    """From its next iterator on, no signal but SIGKILL ends the loader's workers."""
    if loader.num_workers and not isinstance(loader.worker_init_fn, _LiveOn):
        loader.worker_init_fn = _LiveOn(loader.worker_init_fn)
        _end_them_at_exit()


@contextlib.contextmanager
def ended_workers_stay_ended(loader: Any, state: Any) -> Iterator[None]:
    """In here, make the iterator that goes on from ``state``, a ``StatefulDataLoader``'s own.

    The state says which workers had come to the end of their part of the stream. torchdata asks them for one batch
    more all the same, and a dataset that goes back to its beginning when it is through would give all of it again.
    """
    is_meant = isinstance(loader, StatefulDataLoader) and loader.num_workers > 0
    init = loader.worker_init_fn if is_meant else None
    if not isinstance(init, _LiveOn):
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
class _LiveOn:
    """What a worker does first; then what the loader's own ``worker_init_fn`` asks for."""

    then: Callable[[int], None] | None
    ended: tuple[bool, ...] = ()
    """Whether each worker begins at the end of its part of the stream."""

    def __call__(self, worker: int) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if self.ended and self.ended[worker]:
            _begin_at_the_end()
        if self.then is not None:
            self.then(worker)


def _begin_at_the_end() -> None:
    """In a worker process: what it reads with first has nothing left; what it reads the next epoch with is as usual."""
    fetchers: Any = fetch
    usual: Any = fetchers._IterableDatasetFetcher

    class Ended(usual):  # type: ignore[misc]
        ended = property(lambda self: True, lambda self, value: None)

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            fetchers._IterableDatasetFetcher = usual

    fetchers._IterableDatasetFetcher = Ended


@functools.cache
def _end_them_at_exit() -> None:
    """Python would send them SIGTERM then, and wait for ever."""
    atexit.register(_end_children)  # called before what multiprocessing has registered


def _end_children() -> None:
    children = [child for child in multiprocessing.active_children() if child.daemon]
    if not children:
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else torch raises an error over each that is killed
    for child in children:
        child.terminate()
    waiting = [child.sentinel for child in children]
    while waiting and (ended := wait(waiting, timeout=_GRACE)):
        waiting = [sentinel for sentinel in waiting if sentinel not in ended]
    for child in children:
        child.kill()
