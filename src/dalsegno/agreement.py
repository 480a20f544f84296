"""Agreement: how the ranks come to act on the same wishes at the same step.

A wish may come up on one rank only (a signal, a clock, a reading of a file), and no rank may act on it alone: the
others would wait for it in the next collective, for ever. A collective at every step would cost more than small steps
themselves. So there is one every k steps, k being the steps that fit into a quarter of a second.
"""

from __future__ import annotations

import time

from . import ranks
from .state import TrainerControl

_SECONDS_APART = 0.25


class Agreement:
    """Makes a TrainerControl's flags the same on all ranks: any rank's wish counts. Alone, they always are."""

    def __init__(self, control: TrainerControl) -> None:
        self._control = control
        self._alone = ranks.world_size() == 1
        self._steps = 0  # since the last one
        self._every = 1
        self._last = time.monotonic()

    def at_step(self) -> bool:
        """To be called at each step's end. Whether the flags are now agreed on; if not, nothing may hang on them."""
        if self._alone:
            return True
        self._steps += 1
        return self._steps >= self._every and self.now()

    def now(self) -> bool:
        """Agree at once; always True."""
        if not self._alone:
            *wishes, self._every = ranks.agree_max([*self._control.wishes(), self._fitting_steps()])
            self._control.grant(wishes)
        return True

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
