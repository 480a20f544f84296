"""Workers: a data loader's processes live on when the run is asked to stop.

torchrun and Slurm send a rank's signal to all of its processes, a terminal does so with Ctrl-C. A worker that ended at
once would break the step that is just being done, and so the save that was to follow it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader


def let_workers_live_on(loader: DataLoader[Any]) -> None:
    """From its next iterator on, only this process, or SIGKILL, ends the loader's workers."""
    if loader.num_workers and not isinstance(loader.worker_init_fn, _LiveOn):
        loader.worker_init_fn = _LiveOn(loader.worker_init_fn)


@dataclass(frozen=True, slots=True)
class _LiveOn:
    """What a worker does first; then what the loader's own ``worker_init_fn`` asks for."""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        # Blocked here, and so in every thread that this one starts: SIGTERM waits for the thread that asks who sent it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_obey, args=(os.getppid(),), name="dalsegno-worker-signals", daemon=True).start()
        if self.then is not None:
            self.then(worker)


def _obey(owner: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != owner:
        pass
    os._exit(0)  # as torch's own handler does: no clean-up in the middle of whatever it was doing
