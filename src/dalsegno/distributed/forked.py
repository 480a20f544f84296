"""Forked ranks: what a process that is forked from one with torch loaded must change before it trains."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping

import numpy as np
import torch
from tqdm import tqdm

PRELOADED = ["dalsegno.training.preloaded"]
"""Modules that the server imports before it forks the first rank."""


def settle_after_fork(environment: Mapping[str, str], threads: int | None) -> None:
    """Make a forked process independent of the one it was forked from, whose environment may be older. ``threads``: of
    each operation; None: as torch has determined it."""
    gc.freeze()  # what the server has imported is never garbage: collections skip it, and its pages stay shared
    tqdm.set_lock(threading.RLock())  # its default is a system semaphore, which a killed process would leak
    multiprocessing.set_start_method("fork", force=True)  # data loader workers are then children that notice its death
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it does not outlive the process that forked it
    np.random.seed()  # a forked process would otherwise continue the server's random numbers
    os.environ.clear()
    os.environ.update(environment)
    if threads is not None:
        torch.set_num_threads(threads)
