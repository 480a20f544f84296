"""HangWatchdog: a run that hangs says where, and ends."""

from __future__ import annotations

import faulthandler
import sys
import time
from pathlib import Path
from typing import TextIO

from dalsegno.distributed import collectives
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import (
    Context,
    EvaluateContext,
    LogContext,
    PredictionStepContext,
    SaveContext,
    StepDoneContext,
    TrainBeginContext,
    TrainEndContext,
)

from .argument_checks import number

REARM = 1.0
"""Seconds in which progress is noted once: arming costs a thread."""


class HangWatchdog(Callback):
    """Ends a process that has made no progress for so long, after writing down where every thread of it stands.

    Progress is a micro-batch, an evaluation batch, a record or a checkpoint. Each rank watches itself, so where one is
    stuck and the others wait for it, all say where they are and end, with exit status 1; whoever started them, torchrun
    or Slurm, can start them again from the last checkpoint. The stacks go to ``logs/hang-rank-00000.txt`` and so on in
    the run's folder, behind those of former legs. The watch is kept by the interpreter's own C thread: it works while
    some call holds Python's lock.

    NCCL gives a collective ten minutes (``init_process_group(timeout=…)``) before it ends the process, and says which
    one that was, not where the program stands. So the default is a minute less: this one is the first to tell.

    Args:
        seconds: without progress. More than the longest step, save or import of a first batch takes, and less than the
            process group's timeout.

    Raises:
        ConfigurationError: if that is not a number over 0.
    """

    makes_wishes = False

    def __init__(self, seconds: float = 540.0) -> None:
        self._seconds = number("HangWatchdog", "seconds", seconds, over=0)
        self._file: TextIO | None = None
        self._path: Path | None = None
        self._armed = 0.0

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        self._path = ctx.args.directory / "logs" / f"hang-rank-{collectives.rank():05d}.txt"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a")
        self._arm()

    def on_microbatch_end(self, ctx: Context) -> None:
        self._note()

    def on_prediction_step(self, ctx: PredictionStepContext) -> None:
        self._note()

    def on_evaluate(self, ctx: EvaluateContext) -> None:
        self._note()

    def on_log(self, ctx: LogContext) -> None:
        self._note()

    def on_save(self, ctx: SaveContext) -> None:
        self._note()

    def on_step_done(self, ctx: StepDoneContext) -> None:
        self._note()

    def on_train_end(self, ctx: TrainEndContext) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None and self._path is not None:
            self._file.close()
            if self._path.exists() and not self._path.stat().st_size:  # else a former leg has said where it hung
                self._path.unlink()
        self._file = None

    def _note(self) -> None:
        if time.monotonic() - self._armed > min(REARM, self._seconds / 4):
            self._arm()

    def _arm(self) -> None:
        self._armed = time.monotonic()
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file or sys.stderr)
