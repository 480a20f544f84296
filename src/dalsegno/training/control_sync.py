"""ControlSync: makes all ranks act on the same requests at the same step.

A request may arise on one rank only (a callback that reads a file, a signal, a clock, the end of a background save). No
rank may act on it alone: the others would wait for that rank in the next collective, forever. A collective at every
step would cost more than a small step itself. So the ranks synchronize every k steps, where k steps take 0.2 seconds;
and at every step only if a callback handles an event of every step, since its requests must not depend on the clock.

At a record, the requests travel with what the record needs of every rank. The ranks synchronize once more after it if a
callback that handles records may set a flag.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from functools import reduce
from typing import NoReturn

from dalsegno.distributed import collectives
from dalsegno.distributed.collectives import Gathered, gather_together
from dalsegno.errors import LeaseLost
from dalsegno.state import NO_REQUESTS, ControlRequests, TrainerControl

_SECONDS_APART = 0.2

RequestSource = Callable[[], ControlRequests]
"""Returns the requests of a source other than the callbacks, on this rank alone. Called at every step, so it must be
fast and must not call a collective. It repeats a request until that has been carried out. A source that requests a stop
sets the reason in the control."""


class ControlSync:
    """Collects the requests of all ranks, of callbacks and of other sources. Lives for one leg."""

    def __init__(
        self,
        control: TrainerControl,
        sources: Sequence[RequestSource] = (),
        *,
        each_step: bool,
        each_record: bool,
        lease_loss: Callable[[], str | None] = lambda: None,
    ) -> None:
        """
        Args:
            each_step: synchronize at every step, since callbacks may set flags of the control there.
            each_record: synchronize after every record, likewise.
            lease_loss: why this process must not write any more; None if it may.
        """
        self._control = control
        self._lease_loss = lease_loss
        self._sources = tuple(sources)
        self._alone = collectives.world_size() == 1
        self._each_step = each_step
        self._each_record = each_record
        self._steps, self._batches = _Pace(), _Pace()
        self._own = Gathered(self._numbers, "the actions at a step's end")

    def poll(self, along: Sequence[Gathered] = ()) -> ControlRequests:
        """Requests that all ranks act on at this step's end; none if the ranks do not synchronize at this step. With
        anything to fetch ``along``, they do."""
        if self._alone:
            return self.sync()
        is_due = self._steps.is_due() or self._each_step or along  # asked first: it counts the steps
        return self.sync(along) if is_due else NO_REQUESTS

    def after_record(self) -> ControlRequests:
        """Requests of the handlers of a record; none if they make none. Collective if they may."""
        return self.sync() if self._alone or self._each_record else NO_REQUESTS

    def sync(self, along: Sequence[Gathered] = ()) -> ControlRequests:
        """Synchronize now, and fetch ``along`` by the same exchange. Collective. Raises LeaseLost on all ranks, if
        another process has taken the run over."""
        if self._alone:
            requests = self._poll_sources(self._control.requests())
        else:
            gather_together(self._own, *along)
            present, fitting = zip(*self._own.by_rank(), strict=True)
            self._steps.every = int(max(fitting))
            bits = reduce(operator.or_, map(int, present))
            requests = ControlRequests(*(bool(bits >> place & 1) for place in range(len(NO_REQUESTS))))
        if requests is not NO_REQUESTS:
            if requests.lease_lost:
                _raise_lease_lost(self._lease_loss())
            self._control.acknowledge(requests)
        return requests

    def stop_requested_at_batch(self) -> bool:
        """As :meth:`stop_requested`, every k batches. To be called between two batches of an evaluation."""
        return (self._alone or self._batches.is_due()) and self.stop_requested()

    def stop_requested(self) -> bool:
        """Whether a source on any rank requests a stop. Requests of callbacks wait for the step's end: a callback that
        repeats its request after a resume would keep the run from ever finishing the evaluation. Collective."""
        stop: int = self._poll_sources(NO_REQUESTS).stop
        if not self._alone:
            stop, self._batches.every = collectives.all_reduce_max([stop, self._batches.fitting()], "whether to stop")
        if stop:
            self._control.acknowledge(ControlRequests(stop=True))
        return bool(stop)

    def broadcast_reason(self) -> None:
        """Give every rank the reason for the stop, and who requested it: those of the lowest rank that has them.
        Collective."""
        if not self._alone:
            requests = collectives.gather(self._control.stop_request, "why training stops")
            self._control.stop_request = next((each for each in requests if each), None)

    def _numbers(self) -> list[float]:
        """Requests of this rank, as bits, and the number of steps between two synchronizations."""
        requests = self._poll_sources(self._control.requests())
        bits = sum(is_set << place for place, is_set in enumerate(requests))
        return [float(bits), float(self._steps.fitting())]

    def _poll_sources(self, requests: ControlRequests) -> ControlRequests:
        for poll in self._sources:
            if (found := poll()) is not NO_REQUESTS:
                requests = requests.merge(found)
        return requests


def requests_against_save(control: TrainerControl) -> ControlRequests:
    """Requests of callbacks on any rank against a save: to end without a checkpoint, or to roll back. To be called
    before one is captured. Collective."""
    flags: list[int] = [control.should_abort_without_save, control.rollback_request is not None]
    if collectives.world_size() > 1:
        flags = collectives.all_reduce_max(flags, "whether to save at all")
    requests = ControlRequests(abort=bool(flags[0]), roll_back=bool(flags[1]))
    control.acknowledge(requests)
    return requests


def expect_lease(loss: str | None) -> None:
    """Raises LeaseLost on all ranks, if one has a ``loss``: why this process must not write any more. Collective."""
    if collectives.all_reduce_max([loss is not None], "whether the run was taken over")[0]:
        _raise_lease_lost(loss)


def _raise_lease_lost(loss: str | None) -> NoReturn:
    losses = collectives.gather(loss, "who has taken the run over")
    raise LeaseLost(next(each for each in losses if each is not None))


class _Pace:
    """Number of calls between two synchronizations, by rank 0's clock."""

    def __init__(self) -> None:
        self.every = 1
        self._calls = 0  # since the last one
        self._last = time.monotonic()

    def is_due(self) -> bool:
        self._calls += 1
        return self._calls >= self.every

    def fitting(self) -> int:
        """Calls that take 0.2 seconds, 0 on ranks other than 0: for a maximum over all ranks."""
        if not self._calls:
            return self.every
        seconds, self._last = (time.monotonic() - self._last) / self._calls, time.monotonic()
        self._calls = 0
        return max(1, int(_SECONDS_APART / seconds)) if collectives.rank() == 0 else 0
