"""TraceMalloc: prints the lines of Python whose memory grows."""

from __future__ import annotations

import tracemalloc

from dalsegno.events.callback import Callback
from dalsegno.events.contexts import StepDoneContext, TrainBeginContext, TrainEndContext

from .argument_checks import whole


class TraceMalloc(Callback):
    """Prints, every ``every`` steps, the lines of code whose memory has grown the most since training began.

    For a process that grows step by step: a list that is never emptied, losses kept with their graphs. Python's tracer
    (``tracemalloc``) traces what Python allocates: objects, including tensor objects, but not the storage of tensors.
    It slows Python down by a factor of two to four, so use it for a short run. A tracer that is already running is left
    running.

    Args:
        every: steps between tables.
        lines: number of lines of code in a table.
        frames: number of frames stored per allocation; the table shows the innermost. More frames cost memory.

    Raises:
        ConfigurationError: if one of them is not an integer of at least 1.
    """

    sets_control_flags = False
    ranks = "zero"

    def __init__(self, every: int = 100, lines: int = 10, frames: int = 1) -> None:
        self._every = whole("TraceMalloc", "every", every)
        self._lines = whole("TraceMalloc", "lines", lines)
        self._frames = whole("TraceMalloc", "frames", frames)
        self._first: tracemalloc.Snapshot | None = None
        self._is_mine = False

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        self._is_mine = not tracemalloc.is_tracing()
        if self._is_mine:
            tracemalloc.start(self._frames)
        self._first = None

    def on_step_done(self, ctx: StepDoneContext) -> None:
        if self._first is None:  # after the leg's first step, whose allocations happen once
            self._first = _snapshot()
        elif ctx.step % self._every == 0:
            self._print(ctx.step, self._first)

    def on_train_end(self, ctx: TrainEndContext) -> None:
        self._first = None
        if self._is_mine:
            tracemalloc.stop()

    def _print(self, step: int, first: tracemalloc.Snapshot) -> None:
        grown = [each for each in _snapshot().compare_to(first, "lineno") if each.size_diff > 0]
        grown.sort(key=lambda each: -each.size_diff)
        print(f"memory of Python at step {step}: {tracemalloc.get_traced_memory()[0] / 2**20:.1f} MiB", flush=True)
        for each in grown[: self._lines]:
            grown_by = f"{each.size_diff / 2**10:+10.1f} KiB  {each.count_diff:+8d} objects"
            print(f"  {grown_by}  {each.traceback[0].filename}:{each.traceback[0].lineno}", flush=True)


def _snapshot() -> tracemalloc.Snapshot:
    own = [tracemalloc.Filter(False, tracemalloc.__file__), tracemalloc.Filter(False, __file__)]
    return tracemalloc.take_snapshot().filter_traces(own)
