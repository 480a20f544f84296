"""DiLoCoWorker: trains for some steps, sends what it has learnt, and continues with the global parameters.

Around a loop of your own::

    with DiLoCoWorker(model, WorkerOptions("host:8512", sync_every=500), optimizer=optimizer):
        for batch in batches:
            compute(model, batch).backward()
            optimizer.step()              # every 500th one synchronizes
            optimizer.zero_grad()

With the Trainer, or ``ds.Run``, use ``DiLoCoCallback``.

A submission is sent until the server has it, and never counted twice: its number identifies it. So a worker that was
killed repeats its steps from its checkpoint, and takes the results of submissions that it had sent before.
"""

from __future__ import annotations

import logging
import math
import os
import time
from types import TracebackType
from typing import Any, Self, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dalsegno.checkpoint import unwrapped
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError, DalsegnoError, NotRunning, StateMismatch
from dalsegno.stateful.schema import Count, check

from .frames import length_limits
from .heartbeat import Heartbeat
from .link import ServerLink, Verdict, retry_delay
from .options import WorkerOptions
from .shards import GlobalSnapshot
from .signature import Specs, fragments_of
from .state import Result, Settings, Submission, WorkerId
from .synchronization import Synchronization

logger = logging.getLogger("dalsegno")


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


class DiLoCoWorker:
    """One worker of a DiLoCo run: one process, or the ranks of a DDP or FSDP2 training together.

    Every rank calls every method, in the same order. Between :meth:`join` and :meth:`leave`, call :meth:`count_step`
    after each optimizer step, and :meth:`synchronize` when it returns True; inside ``with``, the optimizer's hook does
    all of it.

    Args:
        model: whose trained parameters are synchronized. Buffers and frozen parameters stay the worker's own.
        options: with an address.
        optimizer: the inner optimizer, for ``with``.
        samples_per_step: weight of a step in the mean over the workers, for ``with``.

    Raises:
        ConfigurationError: for a model or options that cannot work.
    """

    def __init__(
        self,
        model: nn.Module,
        options: WorkerOptions,
        *,
        optimizer: Optimizer | None = None,
        samples_per_step: int = 1,
    ) -> None:
        if options.server_addr is None:
            raise ConfigurationError("DiLoCoWorker: server_addr is missing; give HOST:PORT of the server")
        self.options = options
        self.worker_id = options.worker_id or f"{os.uname().nodename}-{os.getpid()}"
        self.snapshot = GlobalSnapshot(unwrapped(model), keeps_errors=options.int8_comm)
        self.fragments = fragments_of(self.snapshot.specs, options.num_fragments)
        self._settings = Settings([spec.to_json() for spec in self.snapshot.specs], options.num_fragments)
        self._optimizer = optimizer
        self._samples_per_step = samples_per_step
        self._link: ServerLink | None = None
        self._heartbeat: Heartbeat | None = None
        self._hook: Any = None
        self._run_id: str | None = None  # None: it has no global parameters
        self._asynchronous = False
        self._count = 0  # newest submission whose result is here
        self._version = 0  # of the global parameters that this led to
        self._known = 0  # newest submission that the server had when this leg joined
        self._steps = 0  # since the last synchronization
        self._samples = 0  # that the next submission stands for
        self._sync_every = options.sync_every
        self._synchronized = 0
        self._skipped = 0
        self._saved = 0
        self._restart_clock()

    # -- begin and end ----------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Register, and take the global parameters, unless a checkpoint has restored them. Collective.

        Raises:
            NotRunning: if the server is not reached.
            StateMismatch: if it has another run, or another model.
        """
        self.snapshot.check_ranks()
        if self._link is None:
            self._link = ServerLink(self.options, self.snapshot)
        count, had_parameters = self._count, self._run_id is not None
        if self._register() is not None and had_parameters:
            self._warn(
                "%s cannot continue exactly: the server no longer has what followed on submission %d; it continues "
                "with the newest global parameters",
                self.worker_id,
                count,
            )
        if collectives.rank() == 0 and self._heartbeat is None:
            self._heartbeat = Heartbeat(self.worker_id, self.options)
            self._heartbeat.start()
        self._restart_clock()

    def leave(self) -> None:
        """End the worker's part of the run. Not collective, and never raises: the server notices by itself."""
        heartbeat, link = self._heartbeat, self._link
        self._heartbeat = self._link = None
        if heartbeat is not None:
            heartbeat.stop()
        if link is not None and collectives.rank() == 0:
            try:
                link.client.deregister(self.worker_id)
            except DalsegnoError as error:
                logger.warning("DiLoCo: %s could not leave: %s", self.worker_id, error)
            link.close()

    def __enter__(self) -> Self:
        """Join, and synchronize after the optimizer's steps.

        Raises:
            ConfigurationError: without ``optimizer``.
        """
        if self._optimizer is None:
            raise ConfigurationError("DiLoCoWorker: a with block needs optimizer=, whose steps it counts")
        self.join()
        self._hook = self._optimizer.register_step_post_hook(self._after_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        self.leave()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.count_step(self._samples_per_step):
            self.synchronize()

    # -- steps ------------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Number of the newest submission whose result this worker has."""
        return self._count

    def count_step(self, samples: int) -> bool:
        """Count a local step. Returns whether :meth:`synchronize` is due.

        Args:
            samples: of the step, on all ranks of the worker: its weight.
        """
        self._steps += 1
        self._timed_steps += 1
        self._samples += samples
        return self._steps >= max(1, self._sync_every // self.options.num_fragments)

    def synchronize(self, loss: float | None = None) -> Synchronization:
        """Send what the local steps have changed, wait for the outer step, and continue with its result. Collective.

        A server that cannot be reached is tried again; then the synchronization is skipped, and the next one sends the
        steps of both.

        Args:
            loss: to report: of the newest step, on all ranks of the worker.

        Raises:
            StateMismatch: if the server has another run now.
            ConfigurationError: if it refuses the submission, say because it contains a NaN.
        """
        begin = time.monotonic()
        submission = self._next_submission(loss, begin - self._began)
        result, dropped = self._exchange(submission)
        done = Synchronization(
            round=submission.number,
            version=None if result is None else result.version,
            local_steps=self._steps,
            samples=submission.samples,
            staleness=0 if result is None or dropped else result.version - 1 - submission.base,
            bytes=length_limits(self._sent(submission))[0],
            outer_loss=None if result is None else result.loss,
            dropped=dropped,
            seconds=time.monotonic() - begin,
        )
        if result is None:
            self._skipped += 1
        else:
            self._synchronized += 1
            self._samples = 0
            self._sync_every = result.sync_every or self._sync_every
        self._steps = 0
        self._restart_clock()
        return done

    def note_saved(self, count: int) -> None:
        """Note that a checkpoint with the results of ``count`` submissions is published: the server need not keep older
        ones for this worker."""
        self._saved = count

    def _next_submission(self, loss: float | None, seconds: float) -> Submission:
        turn = self._count if self._asynchronous else self._version
        return Submission(
            worker_id=self.worker_id,
            number=self._count + 1,
            base=self._version,
            fragment=turn % self.options.num_fragments,
            bf16=self.options.bf16_comm,
            samples=max(1, self._samples),
            steps=self._timed_steps,
            seconds=seconds,
            loss=loss if loss is not None and math.isfinite(loss) else None,
            saved=self._saved,
            int8=self.options.int8_comm,
        )

    def _exchange(self, submission: Submission) -> tuple[Result | None, bool]:
        """Send a submission, and continue with its result.

        Returns:
            The result, None if it was not to be had; and whether these steps did not count.
        """
        link, number = self._joined_link(), submission.number
        is_dropped = number > self._known  # the server has it from a synchronization that was skipped here
        for attempt in range(1 + self.options.max_sync_retries):
            verdict, is_wanted = link.offer(submission, after=retry_delay(attempt) if attempt else 0.0)
            if verdict is Verdict.DONE and is_wanted:
                is_dropped = False
                verdict = link.submit(submission, self._sent(submission))
            if verdict is Verdict.DONE:
                errors = self._errors_after(submission, is_dropped=is_dropped)
                verdict, result = link.result(self.worker_id, number)
                if result is not None:
                    verdict = self._adopt(number, result)
                if verdict is Verdict.DONE:
                    self.snapshot.errors.update(errors)
                    return result, is_dropped
            if verdict is Verdict.LATE and (newest := self._register()) is not None:
                self._warn("%s: these local steps came too late, and do not count", self.worker_id)
                return newest, True
        self._warn("%s: synchronization %d is skipped", self.worker_id, number)
        return None, False

    def _sent(self, submission: Submission) -> Specs:
        return submission.sent(self.fragments[submission.fragment])

    def _errors_after(self, submission: Submission, *, is_dropped: bool) -> dict[str, Tensor]:
        """What quantization has lost of a submission that the server has. Of one that it has with other local steps, it
        is not known any more."""
        sent = self._sent(submission)
        if is_dropped and submission.int8:
            return {spec.name: torch.zeros_like(self.snapshot.errors[spec.name]) for spec in sent}
        return self.snapshot.remaining_errors(sent)

    def _register(self) -> Result | None:
        """Register. Returns the result that the worker continues with; None if it continues with its own parameters.

        Raises:
            NotRunning: if the parameters are not received in all attempts.
        """
        has_parameters = self._run_id is not None
        answer = self._joined_link().register(
            self.worker_id,
            self._settings,
            count=self._count if has_parameters else None,
            run_id=self._run_id,
            dylu=self.options.dylu,
        )
        self._run_id, self._asynchronous, self._known = answer["run_id"], answer["asynchronous"], answer["known"]
        number = answer["adopt"]
        if number is None:
            if self._known > self._count:
                self._warn(
                    "%s repeats submissions %d to %d, which the server has",
                    self.worker_id,
                    self._count + 1,
                    self._known,
                )
            return None
        for _ in range(1 + self.options.max_sync_retries):
            result = self._joined_link().await_result(self.worker_id, number)
            if self._adopt(number, result) is Verdict.DONE:
                return result
        raise NotRunning(f"DiLoCo: the global parameters were not received from {self.options.server_addr}")

    def _adopt(self, number: int, result: Result) -> Verdict:
        """Continue with the parameters of a result."""
        specs = self.snapshot.specs if result.fragment is None else self.fragments[result.fragment]
        verdict = self._joined_link().fetch(result, specs)
        if verdict is Verdict.DONE:
            self.snapshot.adopt(specs)
            self._count, self._version = number, result.version
        return verdict

    def _joined_link(self) -> ServerLink:
        if self._link is None:
            raise ConfigurationError("DiLoCoWorker: not joined; call join(), or use it in a with block")
        return self._link

    def _restart_clock(self) -> None:
        """Measure the speed of the local steps from now on."""
        self._began, self._timed_steps = time.monotonic(), 0

    def _warn(self, text: str, *values: object) -> None:
        if collectives.rank() == 0:
            logger.warning(f"DiLoCo: {text}", *values)

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def rest(self) -> WorkerState | None:
        """The state beside the tensors of the snapshot; None before the worker has global parameters."""
        if self._run_id is None:
            return None
        return {
            "worker_id": self.worker_id,
            "run_id": self._run_id,
            "asynchronous": self._asynchronous,
            "count": self._count,
            "version": self._version,
            "steps": self._steps,
            "samples": self._samples,
            "sync_every": self._sync_every,
            "synchronized": self._synchronized,
            "skipped": self._skipped,
        }

    def restore(self, rest: WorkerState | None) -> None:
        """Continue from a state; the snapshot's tensors are restored by the caller. Before :meth:`join`.

        Raises:
            StateMismatch: if it is not the state of a worker.
        """
        check(rest, WorkerState | None, "DiLoCo")
        if rest is None:
            return
        if self.options.worker_id is None:
            self.worker_id = rest["worker_id"]
        elif self.worker_id != rest["worker_id"]:
            self._warn("worker_id=%r was %r; it joins as a new worker", self.worker_id, rest["worker_id"])
            return
        self._run_id, self._asynchronous = rest["run_id"], rest["asynchronous"]
        self._count, self._version = rest["count"], rest["version"]
        self._steps, self._samples = rest["steps"], rest["samples"]
        self._synchronized, self._skipped = rest["synchronized"], rest["skipped"]
        self._saved = self._count
        if self.options.dylu:
            self._sync_every = rest["sync_every"]

    def state_dict(self) -> dict[str, Any]:
        """Return the worker's state, for a loop of your own."""
        return {"snapshot": self.tensors if self.rest else {}, "rest": self.rest}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the state, by name: the global parameters, and what quantization has lost."""
        return self.snapshot.tensors | {f"{name}.error": each for name, each in self.snapshot.errors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Before :meth:`join`.

        Raises:
            StateMismatch: if it is not the state of a worker with this model.
        """
        check(state, _StateDict, "DiLoCo")
        tensors = state["snapshot"]
        if state["rest"] is not None:
            saved = {name: tuple(each.shape) for name, each in tensors.items()}
            if any(saved.get(spec.name) != spec.shape for spec in self.snapshot.specs):
                raise StateMismatch("DiLoCo: the saved global parameters are of another model")
            for name, tensor in self.tensors.items():
                if name in tensors:  # errors only if it was saved with int8_comm=True
                    tensor.copy_(tensors[name])
        self.restore(state["rest"])


class _StateDict(TypedDict):
    snapshot: dict[str, Tensor]
    rest: WorkerState | None
