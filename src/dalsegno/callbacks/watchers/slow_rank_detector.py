"""SlowRankDetector: names the rank that all others wait for."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from dalsegno.callbacks.argument_checks import number, whole
from dalsegno.distributed import accelerator, collectives
from dalsegno.events import FlaglessCallback, contexts

logger = logging.getLogger("dalsegno")


class SlowRankDetector(FlaglessCallback):
    """Warns about a rank that is repeatedly slower than the others: a throttled GPU, a slow disk, a busy host.

    Measures, for each rank, the time until the backward pass that waits for the other ranks: reading data, the step's
    other micro-batches, and the last forward pass. The forward pass of a sharded model (FSDP, tensor parallelism)
    waits for them, too: then only reading data is measured, and a warning says so. On CUDA, events on the device are
    measured: data read while the device is still busy do not count. Adds ``rank_runtime`` to each training record: a
    list with each rank's seconds per step.

    Args:
        factor: a rank is slow if it takes more than this multiple of the median.
        patience: number of consecutive slow records before the warning.
        share: fraction of the step's time by which it must be slower than the median, at least.
    """

    def __init__(self, factor: float = 1.5, patience: int = 3, share: float = 0.05) -> None:
        self._factor = number("SlowRankDetector", "factor", factor, over=1)
        self._patience = whole("SlowRankDetector", "patience", patience)
        self._share = number("SlowRankDetector", "share", share, least=0, under=1)
        self._begin(())

    def _begin(self, parameters: Sequence[torch.Tensor]) -> None:
        self._clock = clock_of(parameters)
        self._syncs_in_forward = any(isinstance(each, DTensor) for each in parameters)
        self._slow = (-1, 0)  # a rank, and its number of consecutive slow records
        self._since: Any = None  # end of the previous step
        self._reading: tuple[Any, float, Any] | None = None  # begin, seconds, end
        self._computed: Any = None  # up to when this rank has not waited for others
        self._steps: list[tuple[Any, float, Any, Any, Any]] = []  # since the last record: reading, computed, end

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        self._begin(list(ctx.model.parameters()))
        if self._syncs_in_forward and collectives.world_size() > 1 and collectives.rank() == 0:
            logger.warning(
                "SlowRankDetector: the forward pass of a sharded model waits for other ranks, so only the reading of "
                "data is measured; a rank that computes slowly is not found"
            )

    def on_epoch_begin(self, ctx: contexts.Context) -> None:
        self._since, self._reading = self._clock.now(), None

    on_step_done = on_epoch_begin

    def on_step_begin(self, ctx: contexts.Context) -> None:
        """Note the time of reading: after it, the ranks may have exchanged how many samples there are."""
        self._computed = self._clock.now()
        if self._since is not None:
            self._reading = self._since, ctx.state.data_seconds, self._computed

    def on_before_backward(self, ctx: contexts.BackwardContext) -> None:
        if not self._syncs_in_forward:
            self._computed = self._clock.now()  # until the last one, which waits for other ranks

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        if self._reading is not None:
            self._steps.append((*self._reading, self._computed, self._clock.now()))
        self._since = self._reading = None

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind == "train" and collectives.world_size() > 1:
            seconds, steps = zip(*collectives.gather_floats(self._read(), "SlowRankDetector"), strict=True)
            ctx.logs["rank_runtime"] = list(seconds)
            self._judge(seconds, max(steps))

    def _read(self) -> tuple[float, float]:
        """Return the mean seconds per step since the last record: until this rank has waited, and to the end."""
        steps, self._steps, seconds = self._steps, [], self._clock.seconds
        if not steps:
            return 0.0, 0.0
        own, total = [], []
        for begin, data, ready, computed, end in steps:
            read = min(data, seconds(begin, ready))  # before it the previous step may have been saved
            own.append(read + seconds(ready, computed))
            total.append(read + seconds(ready, end))
        return statistics.fmean(own), statistics.fmean(total)

    def _judge(self, seconds: Sequence[float], step: float) -> None:
        slowest, median = max(range(len(seconds)), key=seconds.__getitem__), statistics.median_low(seconds)
        if seconds[slowest] <= max(self._factor * median, median + self._share * step):
            self._slow = (-1, 0)
            return
        often = self._slow[1] + 1 if self._slow[0] == slowest else 1
        self._slow = (slowest, often)
        if often == self._patience and collectives.rank() == 0:
            logger.warning(
                "rank %d is slow: %.3g s per step of %.3g s before it waits for others, where the median rank takes "
                "%.3g s",
                slowest,
                seconds[slowest],
                step,
                median,
            )


class Clock(NamedTuple):
    """Points in time, and the seconds between two of them."""

    now: Callable[[], Any]
    seconds: Callable[[Any, Any], float]


HOST_CLOCK = Clock(lambda: time.perf_counter(), lambda begin, end: end - begin)


def clock_of(parameters: Sequence[torch.Tensor]) -> Clock:
    """The clock for a model's work: events on its device's current stream, if the device has any; else host time."""
    device = next((each.device for each in parameters if each.device.type not in ("cpu", "meta")), None)
    if device is None or not accelerator.has_timed_events(device):
        return HOST_CLOCK
    return Clock(partial(accelerator.timed_event, device), _seconds_between)


def _seconds_between(begin: Any, end: Any) -> float:
    """Of two events, which are waited for only here, when they are read."""
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
