"""SlowRankDetector: the rank that all others wait for."""

from __future__ import annotations

import logging
import statistics
import time

import torch
from torch.distributed.tensor import DTensor

from dalsegno import ranks
from dalsegno.callback import Callback
from dalsegno.contexts import BackwardContext, LogContext, MicrobatchBeginContext, StepEndContext, TrainBeginContext

from .arguments import number, whole

logger = logging.getLogger("dalsegno")


class SlowRankDetector(Callback):
    """Says which rank is slower than the others, again and again: a hot GPU, a tired disk, a neighbour on the host.

    Of each rank it measures what it does before it first meets the others in a step: reading data and running the model
    forward; of a model in shards, whose forward pass meets the other ranks already, reading data alone. On CUDA with
    events on the device. At each record of training the times are compared, in one small collective, and
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
        self._watch: HostWatch | DeviceWatch = HostWatch()
        self._meets_in_forward = False
        self._slow = (-1, 0)  # a rank, and how often in a row

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        parameters = list(ctx.model.parameters())
        self._watch = DeviceWatch() if any(each.is_cuda for each in parameters) else HostWatch()
        self._meets_in_forward = any(isinstance(each, DTensor) for each in parameters)
        self._slow = (-1, 0)
        self._watch.start()

    def on_microbatch_begin(self, ctx: MicrobatchBeginContext) -> None:
        if self._meets_in_forward:
            self._watch.stop()

    def on_before_backward(self, ctx: BackwardContext) -> None:
        self._watch.stop()

    def on_step_end(self, ctx: StepEndContext) -> None:
        self._watch.start()

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind == "train" and ranks.world_size() > 1:
            seconds = [each for (each,) in ranks.gather_floats([self._watch.read()], "SlowRankDetector")]
            ctx.logs["rank_runtime"] = seconds
            self._judge(seconds)

    def _judge(self, seconds: list[float]) -> None:
        slowest, median = max(range(len(seconds)), key=seconds.__getitem__), statistics.median_low(seconds)
        if seconds[slowest] <= self._factor * median:
            self._slow = (-1, 0)
            return
        often = self._slow[1] + 1 if self._slow[0] == slowest else 1
        self._slow = (slowest, often)
        if often == self._patience and ranks.rank() == 0:
            logger.warning(
                "rank %d is slow: %.3g s a step before it meets the others, where the median rank takes %.3g s",
                slowest,
                seconds[slowest],
                median,
            )


class HostWatch:
    """The program's own time."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._sum, self._count = 0.0, 0

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Stopping twice is nothing."""
        if self._since is not None:
            self._sum, self._count, self._since = self._sum + time.perf_counter() - self._since, self._count + 1, None

    def read(self) -> float:
        """Mean seconds from start to stop, since the last reading."""
        mean = self._sum / self._count if self._count else 0.0
        self._sum, self._count = 0.0, 0
        return mean


class DeviceWatch:
    """Time on a CUDA device's current stream: events that nobody waits for until they are read."""

    def __init__(self) -> None:
        self._since: torch.cuda.Event | None = None
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        self._since = self._event()

    def stop(self) -> None:
        if self._since is not None:
            self._pairs.append((self._since, self._event()))
            self._since = None

    def read(self) -> float:
        pairs, self._pairs = self._pairs, []
        if not pairs:
            return 0.0
        pairs[-1][1].synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in pairs)) / 1e3 / len(pairs)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
