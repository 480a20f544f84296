"""GarbageCollection: Python's collector runs when all ranks can afford it, and at no other time."""

from __future__ import annotations

import gc

from dalsegno.events.callback import Callback
from dalsegno.events.contexts import StepDoneContext, TrainBeginContext, TrainEndContext

from .argument_checks import whole


class GarbageCollection(Callback):
    """Turns Python's automatic garbage collection off while training, and collects after every so many steps.

    The collector runs whenever enough objects were made, on each rank at another moment, and all others wait for that
    rank in the next collective. After the same steps on all ranks it costs its own time, once. Collected is what was
    made since the last time (generation 1); everything at the leg's beginning and end. How it was set before is
    restored, whatever ends the training.

    With several ranks it is there by itself; ``trainer.remove_callback("GarbageCollection")`` leaves the collector on.

    Args:
        every: steps from one collection to the next.

    Raises:
        ConfigurationError: if that is not a whole number.
    """

    makes_wishes = False

    def __init__(self, every: int = 1000) -> None:
        self._every = whole("GarbageCollection", "every", every)
        self._was_enabled = False

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()

    def on_step_done(self, ctx: StepDoneContext) -> None:
        if ctx.step % self._every == 0:
            gc.collect(1)

    def on_train_end(self, ctx: TrainEndContext) -> None:
        if self._was_enabled:
            gc.enable()
        gc.collect()
