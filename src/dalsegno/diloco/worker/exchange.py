"""Exchange: a worker's progress, its registrations and submissions, and what their results do to its parameters.

A worker's ranks act as one: rank 0 talks to the server, and every rank learns how it went. Every method is collective,
and no failure on rank 0 lets it skip a collective that the others enter.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, NotRequired, TypedDict, TypeVar, cast

import torch
from torch import Tensor

from dalsegno.diloco.wire.messages import FrameReader, Positive, Result, Settings, Submission, WorkerId, in_file_order
from dalsegno.diloco.wire.signature import Specs, fragments_of
from dalsegno.diloco.worker.client import DiLoCoClient, connect
from dalsegno.diloco.worker.options import WorkerOptions
from dalsegno.diloco.worker.snapshot import GlobalSnapshot
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError, DalsegnoError, NotFound, NotRunning, StateMismatch
from dalsegno.stateful.schema import Count
from dalsegno.system.machine import lower_thread_priority

logger = logging.getLogger("dalsegno")

T = TypeVar("T")


class FlightState(TypedDict):
    """State of a submission that the server has, and whose result the worker has yet to take."""

    fragment: Count
    samples: Positive
    local_steps: Count


class WorkerState(TypedDict):
    """State of a worker, beside the global parameters."""

    worker_id: WorkerId
    run_id: str
    asynchronous: bool
    count: Count
    version: Count
    steps: Count
    samples: Count
    sync_every: Count
    synchronized: Count
    skipped: Count
    flight: NotRequired[FlightState]


@dataclass(slots=True)
class WorkerProgress:
    """What a worker has done, and what it is to do next."""

    worker_id: str
    run_id: str | None = None
    """None: the worker has no global parameters."""
    asynchronous: bool = False
    count: int = 0
    """Newest submission whose result the worker has."""
    version: int = 0
    """Version of the global parameters that this submission led to."""
    steps: int = 0
    """Local steps since the newest submission."""
    samples: int = 0
    """Trained on for the changes that have not been applied."""
    sync_every: int = field(kw_only=True)
    """Local steps between two synchronizations of a parameter."""
    synchronized: int = 0
    skipped: int = 0

    def state(self, flight: FlightState | None) -> WorkerState | None:
        """The state to save; None before the worker has global parameters."""
        if self.run_id is None:
            return None
        state = cast(WorkerState, asdict(self))
        return state if flight is None else {**state, "flight": flight}

    def restore(self, state: WorkerState, *, dylu: bool) -> None:
        """Continue from a saved state. ``dylu``: whether the server chooses ``sync_every``; otherwise the present one
        holds."""
        own = {"worker_id", "flight"} if dylu else {"worker_id", "flight", "sync_every"}
        for name, value in state.items():
            if name not in own:
                setattr(self, name, value)


@dataclass(frozen=True, slots=True)
class Synchronization:
    """What a synchronization did."""

    round: int
    """Number of the worker's submission."""
    version: int | None
    """Of the global parameters that it led to; None if it was skipped."""
    local_steps: int
    samples: int
    staleness: int
    """Outer steps of other workers between the parameters that the worker began with and its own submission."""
    bytes: int
    """Of the submission."""
    outer_loss: float | None
    """Mean of the losses that the workers of this outer step have reported."""
    dropped: bool
    """The worker's steps did not count; it continues with the global parameters."""
    seconds: float
    """For which training waited."""

    def to_record(self) -> dict[str, Any]:
        """As a record of a log."""
        loss = {} if self.outer_loss is None else {"outer_loss": self.outer_loss}
        version = {"skipped": True} if self.version is None else {"version": self.version}
        dropped = {"dropped": True} if self.dropped else {}
        return {
            "round": self.round,
            **version,
            **dropped,
            "local_steps": self.local_steps,
            "samples": self.samples,
            "staleness": self.staleness,
            "bytes": self.bytes,
            **loss,
            "sync_runtime": self.seconds,
        }


class Verdict(Enum):
    """How a request went."""

    DONE = "done"
    AGAIN = "again"
    """The server was not reached, or could not work: trying again may help."""
    LATE = "late"
    """The server continued without this worker, which registers again."""


class Exchange:
    """Talks to the server of ``options`` for one worker. Results change its ``snapshot`` and ``progress``."""

    def __init__(self, options: WorkerOptions, snapshot: GlobalSnapshot, progress: WorkerProgress) -> None:
        self.snapshot = snapshot
        self.options = options
        self.progress = progress
        self.fragments = fragments_of(snapshot.specs, options.num_fragments)
        self.known = 0
        """Newest submission that the server had when this leg joined."""
        self._settings = Settings([spec.to_json() for spec in snapshot.specs], options.num_fragments)
        self._is_open = False
        self._client: DiLoCoClient | None = None  # on rank 0

    @property
    def client(self) -> DiLoCoClient:
        """On rank 0 only."""
        assert self._client is not None, "rank 0 has it"
        return self._client

    def open(self) -> None:
        """Make rank 0's client, unless there is one."""
        self._is_open = True
        if self._client is None and collectives.rank() == 0:
            self._client = connect(self.options)

    def close(self) -> DiLoCoClient | None:
        """Return rank 0's client, which is no longer used here."""
        self._is_open = False
        client, self._client = self._client, None
        return client

    def register(self, *, in_flight: int = 0) -> Result | None:
        """Join. Returns the result that the worker continues with; None if it continues with its own parameters. Sends
        the model's parameters if the run has none. ``in_flight``: submissions that the server has and whose results the
        worker awaits."""
        progress, specs = self.progress, self.snapshot.specs
        count = progress.count if progress.run_id is not None else None

        def ask() -> dict[str, Any]:
            return self.client.register(
                progress.worker_id, self._settings, count=count, run_id=progress.run_id, dylu=self.options.dylu
            )

        def initialize(tensors: Iterator[Tensor]) -> None:
            with contextlib.suppress(StateMismatch):  # another worker was faster
                self.client.initialize(progress.worker_id, specs, tensors)

        while (answer := self._insist(ask))["needs_parameters"]:
            self._upload(initialize, self.snapshot.parameters())
        progress.run_id, progress.asynchronous, self.known = answer["run_id"], answer["asynchronous"], answer["known"]
        number = answer["adopt"]
        if number is None:
            first = progress.count + in_flight + 1
            if self.known >= first:
                self.warn("repeats submissions %d to %d, which the server has", first, self.known)
            return None
        for _ in range(1 + self.options.max_sync_retries):
            result = self._insist(lambda: self._await_result(number))
            if self._adopt(number, result) is Verdict.DONE:
                return result
        raise NotRunning(f"DiLoCo: the global parameters were not received from {self.options.server_addr}")

    def register_late(self) -> Result | None:
        """As :meth:`register`, after the server has refused a submission."""
        newest = self.register()
        if newest is not None:
            self.warn("these local steps came too late, and do not count")
        return newest

    def synchronize(self, submission: Submission) -> tuple[Result | None, bool]:
        """Send a submission, and continue with its result. Returns the result, None if it was not to be had; and
        whether these steps did not count."""
        if not self._is_open:
            raise ConfigurationError("DiLoCoWorker: not joined; call join(), or use it in a with block")
        number = submission.number
        is_dropped = number > self.known  # the server has it from a synchronization that was skipped here
        errors: dict[str, Tensor] | None = None  # found once: a result that is cut has overwritten the snapshot in part
        for attempt in range(1 + self.options.max_sync_retries):
            verdict, is_wanted = self._offer(submission, after=retry_delay(attempt) if attempt else 0.0)
            if verdict is Verdict.DONE and is_wanted:
                is_dropped = False
                verdict = self.submit(submission)
            if verdict is Verdict.DONE:
                if errors is None:
                    errors = self.errors_after(submission, is_dropped=is_dropped)
                verdict, result = self._try(lambda: self._await_result(number))
                if result is not None:
                    verdict = self._adopt(number, result)
                if verdict is Verdict.DONE:
                    self.snapshot.errors.update(errors)
                    return result, is_dropped
            if verdict is Verdict.LATE and (newest := self.register_late()) is not None:
                return newest, True
        self.warn("synchronization %d is skipped", number)
        return None, False

    def submit(self, submission: Submission) -> Verdict:
        """Send a submission that was offered, and is wanted."""
        sent = self.sent(submission)
        return self._upload(
            lambda tensors: self.client.submit(submission, sent, tensors), self.snapshot.differences(sent)
        )

    def fetch(self, result: Result, specs: Specs) -> Verdict:
        """Take the parameters of a result into the snapshot, whose values are valid only if the verdict is DONE."""
        order, taken = in_file_order(specs), 0

        def take(reader: FrameReader) -> None:
            nonlocal taken
            for spec in order:
                whole = torch.empty(spec.shape, dtype=spec.dtype)
                reader.tensor(whole)
                self.snapshot.take(spec, whole)
                taken += 1

        verdict = Verdict.DONE
        if self._client is not None:
            verdict, _ = outcome_of(lambda: self.client.fetch(result, specs, take))
        for spec in order[taken:]:  # on the other ranks all; on rank 0 those that have not arrived
            self.snapshot.take(spec, torch.empty(spec.shape, dtype=spec.dtype))
        return collectives.broadcast(verdict, "whether DiLoCo's parameters have arrived")

    def sent(self, submission: Submission) -> Specs:
        return submission.sent(self.fragments[submission.fragment])

    def errors_after(self, submission: Submission, *, is_dropped: bool) -> dict[str, Tensor]:
        """What quantization has lost of a submission that the server has. Of one that it has with other local steps, it
        is not known any more."""
        sent = self.sent(submission)
        if is_dropped and submission.int8:
            return self.snapshot.no_errors(sent)
        return self.snapshot.remaining_errors(sent)

    def warn(self, text: str, *values: object) -> None:
        if collectives.rank() == 0:
            logger.warning(f"DiLoCo: %s: {text}", self.progress.worker_id, *values)

    def taken(self, result: Result) -> Specs:
        """Specs of the parameters of a result."""
        return self.snapshot.specs if result.fragment is None else self.fragments[result.fragment]

    def _adopt(self, number: int, result: Result) -> Verdict:
        specs = self.taken(result)
        verdict = self.fetch(result, specs)
        if verdict is Verdict.DONE:
            self.snapshot.adopt(specs)
            self.progress.count, self.progress.version = number, result.version
        return verdict

    def _offer(self, submission: Submission, *, after: float) -> tuple[Verdict, bool]:
        """Describe a submission, after so many seconds. Returns also whether it is to be sent."""

        def ask() -> bool:
            time.sleep(after)
            return self.client.offer(submission)

        verdict, is_wanted = self._try(ask)
        return verdict, bool(is_wanted)

    def _await_result(self, number: int) -> Result:
        return self.client.await_result(self.progress.worker_id, number, self.options.timeout)

    def _upload(self, send: Callable[[Iterator[Tensor]], object], tensors: Iterator[Tensor]) -> Verdict:
        """Let rank 0 send tensors that all ranks together produce, if they are sharded."""
        if not self.snapshot.is_sharded:
            return self._try(lambda: send(tensors))[0]
        verdict = Verdict.DONE
        if self._client is not None:
            verdict, _ = outcome_of(lambda: send(tensors))
        for _ in tensors:  # the other ranks produce them for rank 0, which produces all even if it could not send them
            pass
        return collectives.broadcast(verdict, "whether DiLoCo's tensors were sent")

    def _try(self, work: Callable[[], T]) -> tuple[Verdict, T | None]:
        return collectives.from_rank_zero_in_time(lambda: outcome_of(work))

    def _insist(self, work: Callable[[], T]) -> T:
        """Call ``work`` on rank 0 until it succeeds. Raises NotRunning if every attempt fails."""

        def insist() -> T:
            for attempt in range(1, 1 + self.options.max_sync_retries):
                try:
                    return work()
                except NotRunning as error:
                    logger.warning("DiLoCo: %s; next attempt in %d s", error, retry_delay(attempt))
                    time.sleep(retry_delay(attempt))
            return work()

        return collectives.from_rank_zero_in_time(insist)


def retry_delay(attempt: int) -> float:
    """Seconds before the ``attempt``-th further attempt: 2, 4, 8 …"""
    return 2.0**attempt


def outcome_of(work: Callable[[], T]) -> tuple[Verdict, T | None]:
    """Not collective."""
    try:
        return Verdict.DONE, work()
    except NotRunning as error:
        logger.warning("DiLoCo: %s", error)
        return Verdict.AGAIN, None
    except (StateMismatch, NotFound) as error:
        logger.warning("DiLoCo: %s", error)
        return Verdict.LATE, None


# --- overlap: the result is taken some local steps later (Streaming DiLoCo, arXiv:2501.18512) -----------------------


@dataclass(frozen=True, slots=True)
class _Arrival:
    """How a transfer went."""

    verdict: Verdict
    result: Result | None = None
    is_replaced: bool = False
    """The server has another submission of this number, sent earlier."""


class Flight:
    """A submission that is on its way as soon as this object exists. All methods but :meth:`abandon` are collective.

    The number of local steps meanwhile is fixed, so it does not matter for the parameters how long the transfer takes.
    Rank 0 sends and fetches on a thread of its own, with a connection of its own. The thread touches neither the model
    nor a collective: it has copies of what it sends, and keeps what it has fetched until the worker takes it.

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
        exchange, specs = self._exchange, in_file_order(self._exchange.taken(result))
        for number, spec in enumerate(specs):
            fetched = self._fetched[number] if self._fetched else torch.empty(spec.shape, dtype=spec.dtype)
            exchange.snapshot.take(spec, fetched)
        is_own_fragment = result.fragment is not None or exchange.options.num_fragments == 1
        exchange.snapshot.adopt(specs, exchange.options.mixing_factor if is_own_fragment else 0.0)
        exchange.progress.count, exchange.progress.version = self.submission.number, result.version

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

        client.fetch(result, exchange.taken(result), take)
        self._fetched = fetched
        is_replaced = not self._is_wanted and submission.number > self._known
        return _Arrival(Verdict.DONE, result, is_replaced)
