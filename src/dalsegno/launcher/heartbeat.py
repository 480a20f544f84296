"""Heartbeats: where each rank is, in shared memory that the launcher reads.

A beat writes 16 bytes to memory: no system call, no lock, no collective. CLOCK_MONOTONIC is the same in all processes
of a host.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dalsegno.events.callback import Binder, Callback
from dalsegno.events.contexts import Context, TrainEndContext
from dalsegno.events.table import Event
from dalsegno.state import Handler

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


class HeartbeatCallback(Callback):
    """Writes this rank's beats while it trains: at each step, record, evaluation batch and checkpoint."""

    name = "dalsegno.heartbeat"
    sets_control_flags = False

    def __init__(self, beats: Heartbeats, local_rank: int) -> None:
        self._beats = beats
        self._local_rank = local_rank

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        """Also handle an event that only some loops fire."""
        return [*super().bound_handlers(binder), (Event.PREDICTION_STEP, self._beat)]

    def _beat(self, ctx: Context) -> None:
        self._beats.write(self._local_rank, Beat(time.monotonic(), ctx.state.global_step))

    on_train_begin = on_evaluate = on_log = on_save = on_step_done = _beat

    def on_train_end(self, ctx: TrainEndContext) -> None:
        self._beats.write(self._local_rank, Beat(0.0, ctx.state.global_step))
