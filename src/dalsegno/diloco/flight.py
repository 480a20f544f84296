"""Flight: a submission whose result the worker takes some local steps later (Streaming DiLoCo, arXiv:2501.18512).

The number of these steps is fixed, so it does not matter for the parameters how long the transfer takes.
"""

from __future__ import annotations

import time
from dataclasses import replace

from torch import Tensor

from dalsegno.distributed import collectives

from .exchange import Exchange
from .link import Verdict
from .progress import FlightState
from .state import Result, Submission
from .transfer import Transfer


class Flight:
    """A submission that is on its way as soon as this object exists. All methods but :meth:`abandon` are collective.

    Args:
        local_steps: that led to it.
        tensors: on rank 0, what it consists of; None: the server has it.
        errors_before: errors of quantization, by name, as they were without this submission.
        seconds: for which training has waited for it.
    """

    def __init__(
        self,
        exchange: Exchange,
        submission: Submission,
        local_steps: int,
        tensors: list[Tensor] | None,
        errors_before: dict[str, Tensor],
        seconds: float,
    ) -> None:
        self.submission = submission
        self.local_steps = local_steps
        self.seconds = seconds
        self._exchange = exchange
        self._errors_before = errors_before
        self._transfer = Transfer(
            exchange.options,
            submission,
            known=exchange.known,
            sent=exchange.sent(submission),
            taken=exchange.fragments[submission.fragment],
            whole=exchange.snapshot.specs,
            tensors=tensors,
        )
        self._transfer.start()

    @classmethod
    def begin(cls, exchange: Exchange, submission: Submission, local_steps: int) -> Flight:
        """Copy the changes that are to be sent, and send them on a thread."""
        began = time.monotonic()
        sent, snapshot = exchange.sent(submission), exchange.snapshot
        tensors = []
        for each in snapshot.differences(sent):
            if collectives.rank() == 0:
                tensors.append(each)
        errors_before = {spec.name: snapshot.errors[spec.name] for spec in sent if submission.int8}
        snapshot.errors.update(snapshot.remaining_errors(sent))
        return cls(exchange, submission, local_steps, tensors, errors_before, time.monotonic() - began)

    @classmethod
    def restored(cls, exchange: Exchange, submission: Submission, state: FlightState) -> Flight:
        """A flight that a checkpoint has. ``submission``: as the worker's next one would be."""
        own = replace(submission, fragment=state["fragment"], samples=state["samples"])
        return cls(exchange, own, state["local_steps"], None, {}, 0.0)

    def state(self) -> FlightState:
        """The state to save, of a flight whose submission is acknowledged."""
        submission = self.submission
        return {"fragment": submission.fragment, "samples": submission.samples, "local_steps": self.local_steps}

    def is_acknowledged(self) -> bool:
        """Wait until it is known whether the server has the submission; if not, the flight has ended."""
        if self._transfer.await_acknowledgement():
            return True
        self._skip()
        return False

    def land(self) -> tuple[Result | None, bool]:
        """Wait for the end of the transfer, and continue with its result, mixed with the worker's own parameters.

        Returns:
            The result, None if it was not to be had; and whether the local steps did not count.
        """
        begin = time.monotonic()
        arrival = self._transfer.arrive()
        result, is_dropped = arrival.result, arrival.is_replaced
        if result is not None:
            self._take(result)
            if is_dropped:
                errors = self._exchange.errors_after(self.submission, is_dropped=True)
                self._exchange.snapshot.errors.update(errors)
        elif arrival.verdict is Verdict.LATE and (newest := self._exchange.register_late()) is not None:
            result, is_dropped = newest, True
        else:
            self._skip()
        self.seconds += time.monotonic() - begin
        return result, is_dropped

    def abandon(self) -> None:
        """Tell the transfer to end when it can; its result is not taken."""
        self._transfer.abandon()

    def _take(self, result: Result) -> None:
        exchange, specs = self._exchange, self._transfer.specs(result)
        for number, spec in enumerate(specs):
            exchange.snapshot.take(spec, self._transfer.tensor(number, specs))
        is_own_fragment = result.fragment is not None or exchange.options.num_fragments == 1
        exchange.snapshot.adopt(specs, exchange.options.mixing_factor if is_own_fragment else 0.0)
        exchange.progress.count, exchange.progress.version = self.submission.number, result.version

    def _skip(self) -> None:
        self._exchange.snapshot.errors.update(self._errors_before)
        self._exchange.warn("synchronization %d is skipped", self.submission.number)
