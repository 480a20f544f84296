"""SlowRankDetector: the rank that all others wait for."""

from __future__ import annotations

import logging
import statistics
import time
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.distributed.tensor import DTensor

from dalsegno.distributed import collectives
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import (
    BackwardContext,
    Context,
    EpochContext,
    LogContext,
    StepDoneContext,
    TrainBeginContext,
)

from .argument_checks import number, whole

M = TypeVar("M")

logger = logging.getLogger("dalsegno")


class SlowRankDetector(Callback):
    """Says which rank is slower than the others, again and again: a hot GPU, a tired disk, a neighbour on the host.

    Of each rank it measures what it does before it first meets the others in a step: reading data, from whatever it
    comes, and running the model forward; of a model in shards, whose forward pass meets the other ranks already,
    reading data alone. Evaluations, records and saves between two steps are left out. On CUDA with events on the
    device: data that are read while it is still at work keep nobody waiting, and are not counted. At each record of
    training the times are compared, in one small collective, and
    ``rank_runtime`` is added to it: a list, each rank's seconds a step. A rank that is slow in several records in a row
    is named in a warning.

    Args:
        factor: slow is a rank that takes more than this times the median.
        patience: in how many records in a row before it is said.

    Raises:
        ConfigurationError: for a value that cannot work.
    """

    makes_wishes = False

    def __init__(self, factor: float = 1.5, patience: int = 3) -> None:
        self._factor = number("SlowRankDetector", "factor", factor, over=1)
        self._patience = whole("SlowRankDetector", "patience", patience)
        self._watch: Watch[Any] = Watch(HostClock())
        self._meets_in_forward = False
        self._slow = (-1, 0)  # a rank, and how often in a row

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        parameters = list(ctx.model.parameters())
        self._watch = Watch(DeviceClock() if any(each.is_cuda for each in parameters) else HostClock())
        self._meets_in_forward = any(isinstance(each, DTensor) for each in parameters)
        self._slow = (-1, 0)

    def on_epoch_begin(self, ctx: EpochContext) -> None:
        self._watch.start()

    def on_step_begin(self, ctx: Context) -> None:
        """The ranks may have met since the data were read, to tell each other how many there are."""
        self._watch.have_read(ctx.state.data_seconds)
        if self._meets_in_forward:
            self._watch.stop()

    def on_before_backward(self, ctx: BackwardContext) -> None:
        self._watch.stop()

    def on_step_done(self, ctx: StepDoneContext) -> None:
        self._watch.start()

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind == "train" and collectives.world_size() > 1:
            seconds = [each for (each,) in collectives.gather_floats([self._watch.read()], "SlowRankDetector")]
            ctx.logs["rank_runtime"] = seconds
            self._judge(seconds)

    def _judge(self, seconds: list[float]) -> None:
        slowest, median = max(range(len(seconds)), key=seconds.__getitem__), statistics.median_low(seconds)
        if seconds[slowest] <= self._factor * median:
            self._slow = (-1, 0)
            return
        often = self._slow[1] + 1 if self._slow[0] == slowest else 1
        self._slow = (slowest, often)
        if often == self._patience and collectives.rank() == 0:
            logger.warning(
                "rank %d is slow: %.3g s a step before it meets the others, where the median rank takes %.3g s",
                slowest,
                seconds[slowest],
                median,
            )


class Clock(Protocol[M]):
    """Moments, and the time between them."""

    def now(self) -> M: ...

    def seconds(self, begin: M, end: M) -> float: ...


class HostClock:
    """The program's own time."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class DeviceClock:
    """Time on a CUDA device's current stream: events that nobody waits for until they are read."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Watch(Generic[M]):
    """Over many steps, the time that a rank takes by itself to come to where it meets the others."""

    def __init__(self, clock: Clock[M]) -> None:
        self._clock = clock
        self._since: M | None = None  # the end of the step before
        self._step: tuple[M, float, M] | None = None
        self._steps: list[tuple[M, float, M, M]] = []  # begin of reading, seconds of it, its end, the meeting

    def start(self) -> None:
        self._since, self._step = self._clock.now(), None

    def have_read(self, seconds: float) -> None:
        """The data are there; reading them has taken this rank so long, and then it may have waited."""
        if self._since is not None:
            self._step = self._since, seconds, self._clock.now()

    def stop(self) -> None:
        """Stopping twice is nothing."""
        if self._step is not None:
            self._steps.append((*self._step, self._clock.now()))
        self._since = self._step = None

    def read(self) -> float:
        """Mean seconds a step, since the last reading."""
        steps, self._steps, seconds = self._steps, [], self._clock.seconds
        times = [min(data, seconds(begin, ready)) + seconds(ready, met) for begin, data, ready, met in steps]
        return statistics.fmean(times) if times else 0.0
