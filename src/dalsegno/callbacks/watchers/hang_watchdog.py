"""HangWatchdog: ends a process that hangs, after dumping the stacks of its threads."""

from __future__ import annotations

import faulthandler
import sys
import time
from pathlib import Path
from typing import TextIO

from dalsegno.callbacks.argument_checks import number
from dalsegno.distributed import collectives
from dalsegno.events import FlaglessCallback, contexts

REARM = 1.0
"""Minimum seconds between re-arming the timer: arming starts a thread."""


class HangWatchdog(FlaglessCallback):
    """Ends a process that has made no progress for ``seconds``, after writing the stacks of all its threads.

    Progress is a micro-batch, an evaluation batch, a record or a checkpoint. Each rank watches itself: if one rank is
    stuck and the others wait for it, all write their stacks and exit with status 1. The stacks are appended to
    ``logs/hang-rank-00000.txt`` and so on in the run's directory. The timer is a C thread of the interpreter, so it
    also fires while a call holds the GIL. The default is a minute less than NCCL's timeout, which names no stack.

    Args:
        seconds: maximum time without progress; more than the longest step, save or first batch takes, and less than
            the process group's timeout.
    """

    background_safe = False

    def __init__(self, seconds: float = 540.0) -> None:
        self._seconds = number("HangWatchdog", "seconds", seconds, over=0)
        self._file: TextIO | None = None
        self._path: Path | None = None
        self._armed = 0.0

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        self._path = ctx.args.directory / "logs" / f"hang-rank-{collectives.rank():05d}.txt"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a")
        self._arm()

    def on_microbatch_end(self, ctx: contexts.Context) -> None:
        if time.monotonic() - self._armed > min(REARM, self._seconds / 4):
            self._arm()

    on_prediction_step = on_evaluate = on_log = on_save = on_step_done = on_microbatch_end

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None and self._path is not None:
            self._file.close()
            if self._path.exists() and not self._path.stat().st_size:  # else it contains the stacks of an earlier leg
                self._path.unlink()
        self._file = None

    def _arm(self) -> None:
        self._armed = time.monotonic()
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file or sys.stderr)
