"""Flight: a submission whose result the worker takes some local steps later (Streaming DiLoCo, arXiv:2501.18512).

The number of these steps is fixed, so it does not matter for the parameters how long the transfer takes. Rank 0 sends
and fetches on a thread of its own, with a connection of its own. The thread touches neither the model nor a collective:
it has copies of what it sends, and keeps what it has fetched until the worker takes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dalsegno.diloco.wire.messages import FrameReader, Result, Submission, in_file_order
from dalsegno.diloco.wire.signature import Specs
from dalsegno.distributed import collectives
from dalsegno.errors import DalsegnoError, StateMismatch
from dalsegno.system.worker import lower_thread_priority

from .client import DiLoCoClient, connect
from .exchange import Exchange, Verdict, outcome_of, retry_delay
from .progress import FlightState


@dataclass(frozen=True, slots=True)
class _Arrival:
    """How a transfer went."""

    verdict: Verdict
    result: Result | None = None
    is_replaced: bool = False
    """The server has another submission of this number, sent earlier."""


class Flight:
    """A submission that is on its way as soon as this object exists. All methods but :meth:`abandon` are collective.

    Args:
        tensors: on rank 0, what it consists of; None: the server has it.
        errors_before: errors of quantization, by name, as they were without this submission.
        seconds: for which training has waited for it.
    """

    def __init__(
        self,
        exchange: Exchange,
        submission: Submission,
        local_steps: int,
        tensors: Sequence[Tensor] | None,
        errors_before: dict[str, Tensor],
        seconds: float,
    ) -> None:
        self.submission = submission
        self.local_steps = local_steps
        self.seconds = seconds
        self._exchange = exchange
        self._errors_before = errors_before
        self._known = exchange.known
        self._tensors = tensors
        self._fetched: list[Tensor] = []
        self._arrival = _Arrival(Verdict.AGAIN)
        self._failure: DalsegnoError | None = None
        self._is_wanted = self._is_acknowledged = False
        self._acknowledged, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._transfer, name="dalsegno-diloco-transfer", daemon=True)
        if collectives.rank() == 0:
            self._thread.start()

    @classmethod
    def begin(cls, exchange: Exchange, submission: Submission, local_steps: int) -> Flight:
        """Copy the changes that are to be sent, and send them."""
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
        """Wait until it is known whether the server has the submission on disk; if not, the flight has ended."""

        def wait() -> bool:
            self._acknowledged.wait()
            return self._is_acknowledged

        if collectives.from_rank_zero_in_time(wait):
            return True
        self._skip()
        return False

    def land(self) -> tuple[Result | None, bool]:
        """Wait for the end of the transfer, and continue with its result, mixed with the worker's own parameters.
        Returns as :meth:`.Exchange.synchronize`."""
        begin = time.monotonic()

        def wait() -> _Arrival:
            self._thread.join()
            if self._failure is not None:
                raise self._failure
            return self._arrival

        arrival = collectives.from_rank_zero_in_time(wait)
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
        """Let the transfer end when it can; its result is not taken."""
        self._abandoned.set()

    def _take(self, result: Result) -> None:
        exchange, specs = self._exchange, self._specs(result)
        for number, spec in enumerate(specs):
            fetched = self._fetched[number] if self._fetched else torch.empty(spec.shape, dtype=spec.dtype)
            exchange.snapshot.take(spec, fetched)
        is_own_fragment = result.fragment is not None or exchange.options.num_fragments == 1
        exchange.snapshot.adopt(specs, exchange.options.mixing_factor if is_own_fragment else 0.0)
        exchange.progress.count, exchange.progress.version = self.submission.number, result.version

    def _specs(self, result: Result) -> Specs:
        """Specs of the parameters of a result, in the order of a frame."""
        fragment = self._exchange.fragments[self.submission.fragment]
        return in_file_order(self._exchange.snapshot.specs if result.fragment is None else fragment)

    def _skip(self) -> None:
        self._exchange.snapshot.errors.update(self._errors_before)
        self._exchange.warn("synchronization %d is skipped", self.submission.number)

    # -- on rank 0's thread -----------------------------------------------------------------------------------------

    def _transfer(self) -> None:
        lower_thread_priority()  # training comes first
        options = self._exchange.options
        try:
            with connect(options) as client:
                for attempt in range(1 + options.max_sync_retries):
                    if attempt and self._abandoned.wait(retry_delay(attempt)):
                        return
                    verdict, arrival = outcome_of(lambda: self._send_and_fetch(client))
                    self._arrival = arrival or _Arrival(verdict)
                    if verdict is not Verdict.AGAIN:
                        return
        except DalsegnoError as error:
            self._failure = error
        finally:
            self._tensors = None
            self._acknowledged.set()

    def _send_and_fetch(self, client: DiLoCoClient) -> _Arrival:
        submission, exchange = self.submission, self._exchange
        if client.offer(submission):
            self._is_wanted = True
            if self._tensors is None:
                raise StateMismatch(f"the server has lost submission {submission.number}, which it had acknowledged")
            client.submit(submission, exchange.sent(submission), self._tensors)
        self._is_acknowledged = True
        self._acknowledged.set()
        result = client.await_result(submission.worker_id, submission.number, exchange.options.timeout)
        fetched: list[Tensor] = []

        def take(reader: FrameReader) -> None:
            for spec in reader.order:
                fetched.append(torch.empty(spec.shape, dtype=spec.dtype))
                reader.tensor(fetched[-1])

        client.fetch(result, self._specs(result), take)
        self._fetched = fetched
        is_replaced = not self._is_wanted and submission.number > self._known
        return _Arrival(Verdict.DONE, result, is_replaced)
