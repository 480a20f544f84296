"""Breaks: save a checkpoint at a given step and end the leg there, so that the next leg resumes from that step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dalsegno.checkpoint import CheckpointManager
from dalsegno.distributed import collectives
from dalsegno.errors import RankFailed
from dalsegno.events.callback import Callback
from dalsegno.events.registration import register_global_callback

from .event_trace import EventTrace

How = Literal["kill", "stop"]
"""``kill``: SIGKILL, once the checkpoint is published and three more steps are done, or at the next save; ``stop``:
SIGTERM, which saves."""

Moment = Literal["inside", "last step", "end"]
"""After a step in the middle of an epoch; after its last step, before ``on_epoch_end``; after ``on_epoch_end``."""

Pattern = Sequence[Sequence[tuple[Moment, How]]]
"""The breaks of each epoch, starting with the first."""

THOROUGH: tuple[Pattern, ...] = (
    (
        (("inside", "kill"), ("last step", "stop")),
        (("inside", "stop"), ("end", "kill")),
        (("inside", "kill"), ("end", "stop")),
        (("inside", "stop"), ("last step", "kill")),
    ),
    (
        (("inside", "stop"), ("end", "kill")),
        (("inside", "kill"), ("last step", "stop")),
        (("inside", "stop"), ("last step", "kill")),
        (("inside", "kill"), ("end", "stop")),
    ),
)
"""Together they kill and stop in the middle and at the end of each epoch, before and after ``on_epoch_end``."""

BRIEF: tuple[Pattern, ...] = (
    ((("inside", "kill"),), (("end", "stop"),), (("end", "kill"),), (("inside", "stop"),)),
    ((("end", "kill"),), (("inside", "stop"),), (("last step", "stop"),), (("inside", "kill"),)),
)
"""One break in each epoch, to check many runs quickly."""

_SAVE_TIMEOUT = 60.0  # seconds
_LOST = 3
"""Steps that a kill loses, and the next leg repeats, unless a save comes before."""


@dataclass(frozen=True, slots=True)
class Break:
    """One interruption of a run."""

    epoch: int
    """Counted from 1."""
    moment: Moment
    step: int
    """Finished steps of the checkpoint from which the next leg resumes."""
    how: How

    @property
    def place(self) -> str:
        if self.moment == "inside":
            return f"in epoch {self.epoch}, after step {self.step}"
        return f"{'at' if self.moment == 'end' else 'before'} the end of epoch {self.epoch}, after step {self.step}"

    def __str__(self) -> str:
        return f"{'killed' if self.how == 'kill' else 'stopped'} {self.place}"


def breaks_of(trace: EventTrace, pattern: Pattern) -> Iterator[Break]:
    """The breaks of a pattern in the run of a trace.

    Leaves out the run's last step, since a finished run has nothing to resume, and the middle of an epoch of one step.
    """
    begin = 0
    for epoch, (end, breaks) in enumerate(zip([*trace.epoch_ends, trace.steps], pattern, strict=False), start=1):
        for moment, how in breaks:
            step = (begin + end + 1) // 2 if moment == "inside" else end
            if begin < step < trace.steps and (moment != "inside" or step < end):
                yield Break(epoch, moment, step, how)
        begin = end


class Milestones(Callback):
    """Requests a checkpoint at each break of a run, and ends the leg at one of them.

    Every leg of the run has this callback, so that all legs save at the same steps.
    """

    def __init__(self, breaks: Collection[Break], breaks_off: Break | None) -> None:
        self._steps = {each.step for each in breaks if each.moment != "end"}
        self._epochs = {each.epoch for each in breaks if each.moment == "end"}
        self._break = breaks_off

    def start(self) -> None:
        """Register in this process."""
        register_global_callback(self)

    def on_step_end(self, ctx: Any) -> None:
        step = ctx.state.global_step
        ctx.control.should_save |= step in self._steps
        if self._break is not None and self._break.moment != "end" and step == self._break.step:
            self._stop()

    def on_epoch_end(self, ctx: Any) -> None:
        epoch = ctx.epoch + 1
        ctx.control.should_save |= epoch in self._epochs
        if self._break is not None and self._break.moment == "end" and epoch == self._break.epoch:
            self._stop()

    def on_step_done(self, ctx: Any) -> None:
        self._kill_after(_LOST, ctx)

    def on_before_save(self, ctx: Any) -> None:
        self._kill_after(1, ctx)

    def _kill_after(self, steps: int, ctx: Any) -> None:
        """Kill that many steps after the break; their records are written and not saved."""
        wanted = self._break
        if wanted is None or wanted.how != "kill" or ctx.state.global_step < wanted.step + steps or collectives.rank():
            return
        published = CheckpointManager(ctx.args.directory).path_of(wanted.step)
        deadline = time.monotonic() + _SAVE_TIMEOUT
        while not published.exists():  # a background save
            if time.monotonic() > deadline:
                raise RankFailed(f"{published}: requested, and not saved after {_SAVE_TIMEOUT:g} s")
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        if self._break is not None and self._break.how == "stop" and collectives.rank() == collectives.world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
