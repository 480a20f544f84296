"""Workers of a loader outlive signals to the whole run, and keep no process from ending."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from multiprocessing.connection import wait

import pytest
from torch.utils.data import DataLoader

from dalsegno.data.workers import ignore_stop_signals
from dalsegno.testing import tiny_regression_data


def be_told(worker: int) -> None:
    """The loader's own first deed: it is done, too."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_signals_do_not_end_a_worker(method: str) -> None:
    data = tiny_regression_data(40)
    loader = DataLoader(data, num_workers=1, multiprocessing_context=method, worker_init_fn=be_told)
    ignore_stop_signals(loader)
    others = {*multiprocessing.active_children()}
    ignore_stop_signals(loader)
    items = iter(loader)
    next(items)
    [worker] = {*multiprocessing.active_children()} - others
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        subprocess.run(["kill", f"-{number.name[3:]}", str(worker.pid)], check=True)
    assert len(list(items)) == 39
    assert wait([worker.sentinel], timeout=60) == [worker.sentinel], "the loader has told it"
    assert worker.exitcode == 0


STUCK = """
import sys, time
from torch.utils.data import DataLoader
from dalsegno.data.workers import ignore_stop_signals

class Stuck:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        while index == 1:
            time.sleep(1)
        return index

loader = DataLoader(Stuck(), num_workers=1)
ignore_stop_signals(loader)
items = iter(loader)
next(items)
sys.exit(3)
"""


def test_a_worker_that_is_stuck_keeps_no_program_from_ending() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "")
