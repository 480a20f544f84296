"""Agreement: how the ranks come to act on the same wishes at the same step.

A wish may come up on one rank only (a signal, a clock, a reading of a file), and no rank may act on it alone: the
others would wait for it in the next collective, for ever. A collective at every step would cost more than small steps
themselves. So there is one every k steps, k being the steps that fit into a quarter of a second; and at every step only
if a callback handles what happens at every step, since its wishes must not depend on the clock.
"""

from __future__ import annotations

import time

from . import ranks
from .state import TrainerControl, Wishes

NO_WISHES = Wishes()
_SECONDS_APART = 0.25


class Agreement:
    """Finds out what is wished on any rank. Alone, that is what is wished here."""

    def __init__(self, control: TrainerControl, *, each_step: bool) -> None:
        """``each_step``: callbacks may wish at any step, and shall not have to wait for the clock."""
        self._control = control
        self._alone = ranks.world_size() == 1
        self._each_step = each_step
        self._steps = 0  # since the last one
        self._every = 1
        self._last = time.monotonic()

    def at_step(self) -> Wishes:
        """To be called at each step's end. What all ranks are going to do; nothing, where they do not agree yet."""
        if self._alone:
            return self.now()
        self._steps += 1
        return self.now() if self._each_step or self._steps >= self._every else NO_WISHES

    def now(self) -> Wishes:
        """Agree at once."""
        wishes = self._control.wishes()
        if not self._alone:
            *flags, self._every = ranks.agree_max([*wishes, self._fitting_steps()])
            wishes = Wishes(*map(bool, flags))
        self._control.grant(wishes)
        return wishes

    def share_reason(self) -> None:
        """Once all stop: tell all ranks why, and who asked."""
        if not self._alone:
            asked = ranks.gather((self._control.stop_reason, self._control.stopped_by))
            self._control.stop_reason, self._control.stopped_by = next((a for a in asked if a[1]), (None, None))

    def _fitting_steps(self) -> int:
        """How many steps fit between two agreements, by rank 0's clock; any number, if none has gone by."""
        if not self._steps:
            return self._every
        seconds, self._last = (time.monotonic() - self._last) / self._steps, time.monotonic()
        self._steps = 0
        return max(1, int(_SECONDS_APART / seconds)) if ranks.rank() == 0 else 0
