"""Exchange: a worker's registrations and submissions, and what their results do to its parameters.

A worker's ranks act as one: rank 0 talks to the server, and every rank learns how it went. Every method is collective,
and no failure on rank 0 lets it skip a collective that the others enter.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor

from dalsegno.diloco.wire.messages import FrameReader, Result, Settings, Submission, in_file_order
from dalsegno.diloco.wire.signature import Specs, fragments_of
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError, NotFound, NotRunning, StateMismatch

from .client import DiLoCoClient, connect
from .options import WorkerOptions
from .progress import WorkerProgress
from .snapshot import GlobalSnapshot

logger = logging.getLogger("dalsegno")

T = TypeVar("T")


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

    def _adopt(self, number: int, result: Result) -> Verdict:
        specs = self.snapshot.specs if result.fragment is None else self.fragments[result.fragment]
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
