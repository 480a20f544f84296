"""Agreement: how the ranks come to act on the same wishes at the same step.

A wish may come up on one rank only (a callback that reads a file, a signal, a clock, the end of a save in the
background), and no rank may act on it alone: the others would wait for it in the next collective, for ever. A
collective at every step would cost more than small steps themselves. So there is one every k steps, k being the steps
that fit into a quarter of a second; and at every step only if a callback handles what happens at every step, since its
wishes must not depend on the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dalsegno.distributed import collectives
from dalsegno.state import NO_REQUESTS, ControlRequests, TrainerControl

_SECONDS_APART = 0.25

RequestSource = Callable[[], ControlRequests]
"""Looks for wishes from outside, on this rank alone: asked at every step, so it must be quick and may not call a
collective. It wishes on until what it wishes has come about. One that wishes to stop tells the control why."""


class ControlSync:
    """Finds out what is wished on any rank. Alone, that is what is wished here."""

    def __init__(self, control: TrainerControl, outside: Sequence[RequestSource] = (), *, each_step: bool) -> None:
        """``each_step``: callbacks may wish at any step, and shall not have to wait for the clock."""
        self._control = control
        self._outside = outside
        self._alone = collectives.world_size() == 1
        self._each_step = each_step
        self._steps, self._batches = _Pace(), _Pace()

    def poll(self) -> ControlRequests:
        """To be called at each step's end. What all ranks are going to do; nothing, where they do not agree yet."""
        if self._alone:
            return self.sync()
        return self.sync() if self._steps.is_due() or self._each_step else NO_REQUESTS

    def sync(self) -> ControlRequests:
        """Agree at once."""
        wishes = self._from_outside()  # first: those that wish to stop tell the control why
        wishes = self._control.requests() if wishes is NO_REQUESTS else wishes.merge(self._control.requests())
        if not self._alone:
            *flags, every = collectives.all_reduce_max([*wishes, self._steps.fitting()], "what a step's end shall do")
            self._steps.every = every
            wishes = ControlRequests(*map(bool, flags))
        self._control.acknowledge(wishes)
        return wishes

    def stop_requested_at_batch(self) -> bool:
        """To be called between two batches of an evaluation: as :meth:`stops`, in time."""
        return (self._alone or self._batches.is_due()) and self.stop_requested()

    def stop_requested(self) -> bool:
        """Agree at once whether somebody outside wishes to stop. What callbacks wish has time until the step's end:
        where they act again after a resume, the run would never get past it."""
        stop: int = self._from_outside().stop
        if not self._alone:
            stop, self._batches.every = collectives.all_reduce_max([stop, self._batches.fitting()], "whether to stop")
        if stop:
            self._control.acknowledge(ControlRequests(stop=True))
        return bool(stop)

    def abort_requested(self) -> bool:
        """Agree at once whether a callback wishes to end without a checkpoint: asked before one is captured."""
        wish: int = self._control.should_abort_without_save
        if not self._alone:
            (wish,) = collectives.all_reduce_max([wish], "whether to save at all")
        if wish:
            self._control.acknowledge(ControlRequests(abort=True))
        return bool(wish)

    def broadcast_reason(self) -> None:
        """Once all stop: tell all ranks why, and who asked."""
        if not self._alone:
            control = self._control
            asked = collectives.gather(
                (control.stop_reason, control.stopped_by, control.stop_is_final), "why training stops"
            )
            first = next((each for each in asked if each[1]), (None, None, False))
            control.stop_reason, control.stopped_by, control.stop_is_final = first

    def _from_outside(self) -> ControlRequests:
        wishes = NO_REQUESTS
        for look in self._outside:
            if (seen := look()) is not NO_REQUESTS:
                wishes = wishes.merge(seen)
        return wishes


class _Pace:
    """How many calls fit between two agreements, by rank 0's clock."""

    def __init__(self) -> None:
        self.every = 1
        self._calls = 0  # since the last one
        self._last = time.monotonic()

    def is_due(self) -> bool:
        self._calls += 1
        return self._calls >= self.every

    def fitting(self) -> int:
        """For the maximum over all ranks; any number, if there was no call."""
        if not self._calls:
            return self.every
        seconds, self._last = (time.monotonic() - self._last) / self._calls, time.monotonic()
        self._calls = 0
        return max(1, int(_SECONDS_APART / seconds)) if collectives.rank() == 0 else 0
