"""Exchange: a worker's registrations and submissions, and what their results do to its parameters.

Every method is collective: a worker's ranks act as one.
"""

from __future__ import annotations

import logging

from torch import Tensor

from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError, NotRunning

from .link import ServerLink, Verdict, retry_delay
from .options import WorkerOptions
from .progress import WorkerProgress
from .shards import GlobalSnapshot
from .signature import Specs, fragments_of
from .state import Result, Settings, Submission

logger = logging.getLogger("dalsegno")


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
        self._link: ServerLink | None = None

    @property
    def link(self) -> ServerLink:
        """Raises ConfigurationError before :meth:`open`."""
        if self._link is None:
            raise ConfigurationError("DiLoCoWorker: not joined; call join(), or use it in a with block")
        return self._link

    def open(self) -> None:
        """Make the link, unless there is one."""
        if self._link is None:
            self._link = ServerLink(self.options, self.snapshot)

    def close(self) -> ServerLink | None:
        """Return the link, which is no longer used here."""
        link, self._link = self._link, None
        return link

    def register(self, *, in_flight: int = 0) -> Result | None:
        """Register. Returns the result that the worker continues with; None if it continues with its own parameters.

        Args:
            in_flight: submissions that the server has and whose results the worker awaits.

        Raises:
            NotRunning: if the parameters are not received in all attempts.
        """
        progress = self.progress
        has_parameters = progress.run_id is not None
        answer = self.link.register(
            progress.worker_id,
            self._settings,
            count=progress.count if has_parameters else None,
            run_id=progress.run_id,
            dylu=self.options.dylu,
        )
        progress.run_id, progress.asynchronous, self.known = answer["run_id"], answer["asynchronous"], answer["known"]
        number = answer["adopt"]
        if number is None:
            first = progress.count + in_flight + 1
            if self.known >= first:
                self.warn("repeats submissions %d to %d, which the server has", first, self.known)
            return None
        for _ in range(1 + self.options.max_sync_retries):
            result = self.link.await_result(progress.worker_id, number)
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
        """Send a submission, and continue with its result.

        Returns:
            The result, None if it was not to be had; and whether these steps did not count.
        """
        link, number = self.link, submission.number
        is_dropped = number > self.known  # the server has it from a synchronization that was skipped here
        errors: dict[str, Tensor] | None = None  # found once: a result that is cut has overwritten the snapshot in part
        for attempt in range(1 + self.options.max_sync_retries):
            verdict, is_wanted = link.offer(submission, after=retry_delay(attempt) if attempt else 0.0)
            if verdict is Verdict.DONE and is_wanted:
                is_dropped = False
                verdict = link.submit(submission, self.sent(submission))
            if verdict is Verdict.DONE:
                if errors is None:
                    errors = self.errors_after(submission, is_dropped=is_dropped)
                verdict, result = link.result(self.progress.worker_id, number)
                if result is not None:
                    verdict = self._adopt(number, result)
                if verdict is Verdict.DONE:
                    self.snapshot.errors.update(errors)
                    return result, is_dropped
            if verdict is Verdict.LATE and (newest := self.register_late()) is not None:
                return newest, True
        self.warn("synchronization %d is skipped", number)
        return None, False

    def sent(self, submission: Submission) -> Specs:
        """Names and dtypes of a submission's tensors."""
        return submission.sent(self.fragments[submission.fragment])

    def errors_after(self, submission: Submission, *, is_dropped: bool) -> dict[str, Tensor]:
        """What quantization has lost of a submission that the server has. Of one that it has with other local steps, it
        is not known any more."""
        sent = self.sent(submission)
        if is_dropped and submission.int8:
            return self.snapshot.no_errors(sent)
        return self.snapshot.remaining_errors(sent)

    def warn(self, text: str, *values: object) -> None:
        """Log a warning about this worker, on rank 0."""
        if collectives.rank() == 0:
            logger.warning(f"DiLoCo: %s: {text}", self.progress.worker_id, *values)

    def _adopt(self, number: int, result: Result) -> Verdict:
        """Continue with the parameters of a result."""
        specs = self.snapshot.specs if result.fragment is None else self.fragments[result.fragment]
        verdict = self.link.fetch(result, specs)
        if verdict is Verdict.DONE:
            self.snapshot.adopt(specs)
            self.progress.count, self.progress.version = number, result.version
        return verdict
