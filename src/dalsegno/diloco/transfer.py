"""Transfer: a submission on its way to the server, and its result on the way back, while the worker trains.

Rank 0 sends and fetches on a thread of its own, with a connection of its own. It touches neither the model nor a
collective: it has copies of what it sends, and keeps what it has fetched until the worker takes it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dalsegno.distributed import collectives
from dalsegno.errors import DalsegnoError, StateMismatch
from dalsegno.system.worker import lower_thread_priority

from .client import DiLoCoClient
from .frames import FrameReader, in_file_order
from .link import Verdict, await_result, connect, outcome_of, retry_delay
from .options import WorkerOptions
from .signature import Specs
from .state import Result, Submission

logger = logging.getLogger("dalsegno")


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a transfer went."""

    verdict: Verdict
    result: Result | None
    is_replaced: bool
    """The server has another submission of this number, sent earlier."""


class Transfer:
    """Sends a submission and fetches its result, from :meth:`start` on. Every rank has one.

    Args:
        known: number of the newest submission that the server had when the worker joined.
        taken: specs of the parameters that it leads to, if the server does not return all of them.
        tensors: on rank 0, in the order of a frame; None: the server must have it.
    """

    def __init__(
        self,
        options: WorkerOptions,
        submission: Submission,
        *,
        known: int,
        sent: Specs,
        taken: Specs,
        whole: Specs,
        tensors: Sequence[Tensor] | None,
    ) -> None:
        self.submission = submission
        self._options = options
        self._known = known
        self._sent, self._taken, self._whole = sent, taken, whole
        self._tensors = tensors
        self._fetched: list[Tensor] = []
        self._arrival = Arrival(Verdict.AGAIN, None, False)
        self._failure: DalsegnoError | None = None
        self._is_wanted = self._is_acknowledged = False
        self._acknowledged, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="dalsegno-diloco-transfer", daemon=True)

    def start(self) -> None:
        """Begin, on rank 0."""
        if collectives.rank() == 0:
            self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it has yet to end; False on other ranks than 0."""
        return self._thread.is_alive()

    def await_acknowledgement(self) -> bool:
        """Wait until the server has the submission on disk. Returns whether it has. Collective."""

        def wait() -> bool:
            self._acknowledged.wait()
            return self._is_acknowledged

        return collectives.from_rank_zero_in_time(wait)

    def arrive(self) -> Arrival:
        """Wait for the end of the transfer. Collective.

        Raises:
            DalsegnoError: if the server refuses the submission, say because it contains a NaN.
        """

        def wait() -> Arrival:
            self._thread.join()
            if self._failure is not None:
                raise self._failure
            return self._arrival

        return collectives.from_rank_zero_in_time(wait)

    def specs(self, result: Result) -> Specs:
        """Specs of the parameters of a result, in the order of :meth:`tensor`."""
        return in_file_order(self._whole if result.fragment is None else self._taken)

    def tensor(self, number: int, specs: Specs) -> Tensor:
        """A parameter that was fetched; on other ranks than 0 one of the same shape."""
        if self._fetched:
            return self._fetched[number]
        return torch.empty(specs[number].shape, dtype=specs[number].dtype)

    def abandon(self) -> None:
        """Tell the thread to end when it can, without waiting for it."""
        self._abandoned.set()

    def _run(self) -> None:
        lower_thread_priority()  # training comes first
        try:
            with connect(self._options) as client:
                for number in range(1 + self._options.max_sync_retries):
                    if number and self._abandoned.wait(retry_delay(number)):
                        return
                    verdict, arrival = outcome_of(lambda: self._exchange(client))
                    self._arrival = arrival or Arrival(verdict, None, False)
                    if verdict is not Verdict.AGAIN:
                        return
        except DalsegnoError as error:
            self._failure = error
        finally:
            self._tensors = None
            self._acknowledged.set()

    def _exchange(self, client: DiLoCoClient) -> Arrival:
        submission = self.submission
        if client.offer(submission):
            self._is_wanted = True
            if self._tensors is None:
                raise StateMismatch(f"the server has lost submission {submission.number}, which it had acknowledged")
            client.submit(submission, self._sent, self._tensors)
        self._is_acknowledged = True
        self._acknowledged.set()
        result = await_result(client, submission.worker_id, submission.number, self._options.timeout)
        fetched: list[Tensor] = []

        def take(reader: FrameReader) -> None:
            for spec in reader.order:
                fetched.append(torch.empty(spec.shape, dtype=spec.dtype))
                reader.tensor(fetched[-1])

        client.fetch(result, self.specs(result), take)
        self._fetched = fetched
        return Arrival(Verdict.DONE, result, is_replaced=not self._is_wanted and submission.number > self._known)
