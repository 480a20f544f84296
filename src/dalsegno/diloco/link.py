"""ServerLink: a worker's ranks and the server. Rank 0 talks; every rank learns how it went.

Each method is collective, and no failure on rank 0 lets it skip a collective that the others enter.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, TypeVar

import torch

from dalsegno.distributed import collectives
from dalsegno.errors import NotFound, NotRunning, StateMismatch

from .client import DiLoCoClient
from .frames import FrameReader, in_file_order
from .options import WorkerOptions
from .shards import GlobalSnapshot
from .signature import Specs
from .state import Result, Settings, Submission

logger = logging.getLogger("dalsegno")

_POLL = 30.0  # seconds that one request waits for a result

T = TypeVar("T")


class Verdict(Enum):
    """How a request went."""

    DONE = "done"
    AGAIN = "again"
    """The server was not reached, or could not work: trying again may help."""
    LATE = "late"
    """The server continued without this worker, which registers again."""


class ServerLink:
    """A connection of all ranks of a worker to the server of ``options``.

    Global parameters are read from ``snapshot``, and received into it.
    """

    def __init__(self, options: WorkerOptions, snapshot: GlobalSnapshot) -> None:
        self._options = options
        self._snapshot = snapshot
        self._client: DiLoCoClient | None = None  # on rank 0
        if collectives.rank() == 0:
            self._client = connect(options)

    @property
    def client(self) -> DiLoCoClient:
        """On rank 0 only."""
        assert self._client is not None, "rank 0 has it"
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def register(
        self, worker_id: str, settings: Settings, *, count: int | None, run_id: str | None, dylu: bool
    ) -> dict[str, Any]:
        """Join; send the model's parameters if the run has none. Returns the server's answer.

        Raises:
            NotRunning: if the server is not reached in all attempts.
            StateMismatch: if the worker does not fit the run.
        """

        def ask() -> dict[str, Any]:
            return self.client.register(worker_id, settings, count=count, run_id=run_id, dylu=dylu)

        specs = self._snapshot.specs

        def initialize(tensors: Iterator[torch.Tensor]) -> None:
            with contextlib.suppress(StateMismatch):  # another worker was faster
                self.client.initialize(worker_id, specs, tensors)

        while (answer := self._insist(ask))["needs_parameters"]:
            self._upload(initialize, self._snapshot.parameters())
        return answer

    def await_result(self, worker_id: str, number: int) -> Result:
        """What joining has led to; a round in progress is waited for.

        Raises:
            NotRunning: if it is not known in all attempts.
        """
        return self._insist(lambda: await_result(self.client, worker_id, number, self._options.timeout))

    def offer(self, submission: Submission, *, after: float = 0.0) -> tuple[Verdict, bool]:
        """Describe a submission. Returns also whether it is to be sent.

        Args:
            after: seconds to wait before.
        """

        def ask() -> bool:
            time.sleep(after)
            return self.client.offer(submission)

        verdict, is_wanted = self._try(ask)
        return verdict, bool(is_wanted)

    def submit(self, submission: Submission, sent: Specs) -> Verdict:
        """Send a submission that is wanted."""
        return self._upload(
            lambda tensors: self.client.submit(submission, sent, tensors), self._snapshot.differences(sent)
        )

    def result(self, worker_id: str, number: int) -> tuple[Verdict, Result | None]:
        """What became of a submission."""
        return self._try(lambda: await_result(self.client, worker_id, number, self._options.timeout))

    def fetch(self, result: Result, specs: Specs) -> Verdict:
        """Take the parameters of a result into the snapshot, whose values are valid only if the verdict is DONE."""
        order, taken = in_file_order(specs), 0

        def take(reader: FrameReader) -> None:
            nonlocal taken
            for spec in order:
                whole = torch.empty(spec.shape, dtype=spec.dtype)
                reader.tensor(whole)
                self._snapshot.take(spec, whole)
                taken += 1

        verdict = Verdict.DONE
        if self._client is not None:
            verdict, _ = outcome_of(lambda: self.client.fetch(result, specs, take))
        for spec in order[taken:]:  # on the other ranks all; on rank 0 those that have not arrived
            self._snapshot.take(spec, torch.empty(spec.shape, dtype=spec.dtype))
        return collectives.broadcast(verdict, "whether DiLoCo's parameters have arrived")

    def _upload(self, send: Callable[[Iterator[torch.Tensor]], object], tensors: Iterator[torch.Tensor]) -> Verdict:
        """Let rank 0 send tensors that all ranks together produce, if they are sharded."""
        if not self._snapshot.is_sharded:
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
            for attempt in range(1, 1 + self._options.max_sync_retries):
                try:
                    return work()
                except NotRunning as error:
                    logger.warning("DiLoCo: %s; next attempt in %d s", error, retry_delay(attempt))
                    time.sleep(retry_delay(attempt))
            return work()

        return collectives.from_rank_zero_in_time(insist)


def connect(options: WorkerOptions) -> DiLoCoClient:
    """A connection to the server of ``options``."""
    return DiLoCoClient(
        str(options.server_addr), token=options.token, certificate=options.certificate, timeout=options.timeout
    )


def await_result(client: DiLoCoClient, worker_id: str, number: int, timeout: float) -> Result:
    """Wait for what becomes of a submission.

    Raises:
        NotRunning: if it is not known within ``timeout`` seconds.
    """
    end = time.monotonic() + timeout
    while (left := end - time.monotonic()) > 0:
        result = client.result(worker_id, number, wait=min(_POLL, left))
        if result is not None:
            return result
    raise NotRunning(f"no result of submission {number} within {timeout:g} s")


def retry_delay(attempt: int) -> float:
    """Seconds before the ``attempt``-th further attempt: 2, 4, 8 …"""
    return 2.0**attempt


def outcome_of(work: Callable[[], T]) -> tuple[Verdict, T | None]:
    """Call ``work``, and return how it went. Not collective."""
    try:
        return Verdict.DONE, work()
    except NotRunning as error:
        logger.warning("DiLoCo: %s", error)
        return Verdict.AGAIN, None
    except (StateMismatch, NotFound) as error:
        logger.warning("DiLoCo: %s", error)
        return Verdict.LATE, None
