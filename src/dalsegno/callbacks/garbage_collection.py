"""GarbageCollection: runs Python's garbage collector at the same steps on all ranks."""

from __future__ import annotations

import gc

from dalsegno.events.callback import Callback
from dalsegno.events.contexts import StepDoneContext, TrainBeginContext, TrainEndContext

from .argument_checks import whole


class GarbageCollection(Callback):
    """Turns off Python's automatic garbage collection during training, and collects every ``every`` steps.

    Automatic collection happens after a number of allocations, at another moment on each rank, and all other ranks wait
    for that rank in the next collective. After the same steps on all ranks, they wait once for all. These collections
    cover generation 1; those at the leg's beginning and end cover all generations. The previous setting is restored at
    the end of training, also after an exception.

    Added by default on several ranks; ``trainer.remove_callback("GarbageCollection")`` keeps automatic collection.

    Args:
        every: steps between collections.

    Raises:
        ConfigurationError: if ``every`` is not an integer.
    """

    sets_control_flags = False
    background_safe = False

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
