"""Heartbeats: how the launcher sees that a rank makes no progress, and where the rank's threads are then.

A heartbeat writes 16 bytes to shared memory that the launcher reads: no system call, no lock, no collective.
CLOCK_MONOTONIC is the same in all processes of a host. A hung rank writes the stacks of its threads to a file of its
own and ends; the launcher prints them.
"""

from __future__ import annotations

import faulthandler
import mmap
import signal
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dalsegno.events.callback import FlaglessCallback
from dalsegno.events.contexts import Context, TrainEndContext
from dalsegno.events.table import Event

_BEAT = struct.Struct("=dq")
_NEVER = -1


class Beat(NamedTuple):
    """The last sign of progress of a rank."""

    time: float
    """By the monotonic clock; 0 while the rank does not train."""
    step: int
    """Finished optimizer steps; -1 before training."""


class Heartbeats:
    """The beats of all ranks on this host, in one file that they map into memory."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    @classmethod
    def create(cls, path: Path, ranks: int) -> Heartbeats:
        """Create the file, or clear the one of the previous leg."""
        path.touch(mode=0o600)
        path.write_bytes(_BEAT.pack(0.0, _NEVER) * ranks)
        return cls(path)

    def write(self, rank: int, beat: Beat) -> None:
        _BEAT.pack_into(self._memory, rank * _BEAT.size, *beat)

    def read(self) -> Sequence[Beat]:
        return [Beat(*each) for each in _BEAT.iter_unpack(self._memory[:])]

    def stalled(self, timeout: float) -> Beat | None:
        """The oldest beat of a rank that trains, if it is older than ``timeout`` seconds."""
        oldest = min((beat for beat in self.read() if beat.time), default=None)
        return oldest if oldest is not None and time.monotonic() - oldest.time >= timeout else None


class HeartbeatCallback(FlaglessCallback):
    """Writes this rank's beats while it trains: at each step, record, evaluation batch and checkpoint."""

    name = "dalsegno.heartbeat"
    optional_events = (Event.PREDICTION_STEP,)

    def __init__(self, beats: Heartbeats, local_rank: int) -> None:
        self._beats = beats
        self._local_rank = local_rank

    def _beat(self, ctx: Context) -> None:
        self._beats.write(self._local_rank, Beat(time.monotonic(), ctx.state.global_step))

    on_train_begin = on_prediction_step = on_evaluate = on_log = on_save = on_step_done = _beat

    def on_train_end(self, ctx: TrainEndContext) -> None:
        self._beats.write(self._local_rank, Beat(0.0, ctx.state.global_step))


DUMP = signal.SIGUSR2
"""Signal at which a rank writes its stacks and ends."""


def write_stacks_at_signal(folder: Path, local_rank: int) -> None:
    """Make this process write the stacks of its threads to a file in ``folder`` at ``DUMP``, and end.

    A file for each rank: hung ranks write at the same moment, and their lines would mix in one standard error.
    """
    path = _path(folder, local_rank)
    path.touch(mode=0o600)
    file = path.open("wb")
    # The default action of the signal follows the dump, so the process ends only after the dump is complete.
    faulthandler.register(DUMP, file=file, chain=True)


def print_stacks(folder: Path, ranks: Mapping[int, int]) -> None:
    """Print what the ranks wrote to standard error, each line with its rank. ``ranks``: by local rank, the global."""
    for local_rank, rank in ranks.items():
        path = _path(folder, local_rank)
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            print(f"[rank {rank}] {line}", file=sys.stderr, flush=True)


def _path(folder: Path, local_rank: int) -> Path:
    return folder / f"stacks-{local_rank}.txt"
