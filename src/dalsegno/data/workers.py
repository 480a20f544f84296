"""Workers: a data loader's processes live on when the run is asked to stop.

torchrun and Slurm send a rank's signal to all of its processes, a terminal does so with Ctrl-C. A worker that ended at
once would break the step that is just being done, and so the save that was to follow it.

They end as their loader tells them, over its queues; when this process is gone; or, at the latest, when it exits.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data import DataLoader

_GRACE = 1.0  # seconds at exit


def let_workers_live_on(loader: DataLoader[Any]) -> None:
    """From its next iterator on, no signal but SIGKILL ends the loader's workers."""
    if loader.num_workers and not isinstance(loader.worker_init_fn, _LiveOn):
        loader.worker_init_fn = _LiveOn(loader.worker_init_fn)
        _end_them_at_exit()


@dataclass(frozen=True, slots=True)
class _LiveOn:
    """What a worker does first; then what the loader's own ``worker_init_fn`` asks for."""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if self.then is not None:
            self.then(worker)


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
