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
import os
import threading
import time
from typing import Any, Self, TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer

from dalsegno.checkpoint import unwrapped
from dalsegno.diloco.wire.messages import LARGEST_LOSS, Result, Submission, length_limits
from dalsegno.diloco.worker.exchange import Flight, FlightState, Synchronization, WorkerProgress, WorkerState
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError, DalsegnoError, StateMismatch
from dalsegno.stateful.schema import check

from .client import connect
from .exchange import Exchange
from .options import WorkerOptions
from .snapshot import GlobalSnapshot

logger = logging.getLogger("dalsegno")


class DiLoCoWorker:
    """One worker of a DiLoCo run: one process, or the ranks of a training in any parallel mode together.

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
        self, model: nn.Module, options: WorkerOptions, *, optimizer: Optimizer | None = None, samples_per_step: int = 1
    ) -> None:
        if options.server_addr is None:
            raise ConfigurationError("DiLoCoWorker: server_addr is missing; give HOST:PORT of the server")
        self.options = options
        self.snapshot = GlobalSnapshot(unwrapped(model), keeps_errors=options.int8_comm)
        name = options.worker_id or f"{os.uname().nodename}-{os.getpid()}"
        self._progress = WorkerProgress(name, sync_every=options.sync_every)
        self._exchange = Exchange(options, self.snapshot, self._progress)
        self._optimizer = optimizer
        self._samples_per_step = samples_per_step
        self._heartbeat: threading.Event | None = None  # on rank 0; set: it ends
        self._hook: Any = None
        self._flight: Flight | None = None
        self._restored_flight: FlightState | None = None
        self._saved = 0
        self._restart_clock()

    @property
    def worker_id(self) -> str:
        return self._progress.worker_id

    @worker_id.setter
    def worker_id(self, name: str) -> None:
        self._progress.worker_id = name

    # -- begin and end ----------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Register, and take the global parameters, unless a checkpoint has restored them. Collective.

        Raises:
            NotRunning: if the server is not reached.
            StateMismatch: if it has another run, or another model.
        """
        self.snapshot.check_ranks()
        self._exchange.open()
        count, had_parameters = self._progress.count, self._progress.run_id is not None
        flight, self._restored_flight = self._restored_flight, None
        newest = self._exchange.register(in_flight=0 if flight is None else 1)
        if newest is not None and had_parameters:
            self._exchange.warn(
                "cannot continue exactly: the server no longer has what followed on submission %d; it continues with "
                "the newest global parameters",
                count,
            )
        if newest is None and flight is not None:
            self._flight = Flight.restored(self._exchange, self._next_submission(None, 0.0), flight)
        if collectives.rank() == 0 and self._heartbeat is None:
            self._heartbeat = threading.Event()
            threading.Thread(
                target=_show_life,
                args=(self.worker_id, self.options, self._heartbeat),
                name="dalsegno-diloco-heartbeat",
                daemon=True,
            ).start()
        self._restart_clock()

    def leave(self) -> None:
        """End the worker's part of the run. Not collective, and never raises: the server notices by itself."""
        heartbeat, self._heartbeat = self._heartbeat, None
        client = self._exchange.close()
        self._abandon_flight()
        if heartbeat is not None:
            heartbeat.set()
        if client is not None:
            try:
                client.deregister(self.worker_id)
            except DalsegnoError as error:
                logger.warning("DiLoCo: %s could not leave: %s", self.worker_id, error)
            client.close()

    def __enter__(self) -> Self:
        """Join, and synchronize after the optimizer's steps. Raises ConfigurationError without ``optimizer``."""
        if self._optimizer is None:
            raise ConfigurationError("DiLoCoWorker: a with block needs optimizer=, whose steps it counts")
        self.join()
        self._hook = self._optimizer.register_step_post_hook(self._after_step)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        self.leave()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.count_step(self._samples_per_step):
            self.synchronize()

    # -- steps ------------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Number of the newest submission whose result this worker has."""
        return self._progress.count

    def count_step(self, samples: int) -> bool:
        """Count a local step. Returns whether :meth:`synchronize` is due. ``samples``: of the step, on all ranks of the
        worker: its weight."""
        self._progress.steps += 1
        self._timed_steps += 1
        self._progress.samples += samples
        is_awaited = self._flight is not None and self._progress.steps >= self.options.overlap_steps
        return is_awaited or self._begins_now

    @property
    def _begins_now(self) -> bool:
        return self._progress.steps >= max(1, self._progress.sync_every // self.options.num_fragments)

    def synchronize(self, loss: float | None = None) -> Synchronization | None:
        """Send what the local steps have changed, wait for the outer step, and continue with its result. Collective.

        With ``overlap_steps``, the sending begins here, and the result is taken in the next call, which is due so many
        steps later. A server that cannot be reached is tried again; then the synchronization is skipped, and the next
        one sends the steps of both.

        Args:
            loss: to report: of the newest step, on all ranks of the worker.

        Returns:
            What the synchronization that ended did; None if none has.

        Raises:
            StateMismatch: if the server has another run now.
            ConfigurationError: if it refuses the submission, say because it contains a NaN.
        """
        done = None
        flight, self._flight = self._flight, None
        if flight is not None:
            result, is_dropped = flight.land()
            done = self._note_done(flight.submission, result, flight.local_steps, is_dropped, flight.seconds)
            if not self._begins_now:
                return done
        begin = time.monotonic()
        submission = self._next_submission(loss, begin - self._began)
        local_steps, self._progress.steps = self._progress.steps, 0
        if self.options.overlap_steps:
            self._flight = Flight.begin(self._exchange, submission, local_steps)
        else:
            result, is_dropped = self._exchange.synchronize(submission)
            done = self._note_done(submission, result, local_steps, is_dropped, time.monotonic() - begin)
        self._restart_clock()
        return done

    def note_saved(self, count: int) -> None:
        """Note that a checkpoint with the results of ``count`` submissions is published: the server need not keep older
        ones for this worker."""
        self._saved = count

    def settle(self) -> None:
        """Before the state is saved: wait until the server has the submission that is on its way. Collective.

        If the server does not get it, the synchronization is skipped, and the next one sends these steps too.
        """
        if self._flight is not None and not self._flight.is_acknowledged():
            self._flight = None
            self._progress.skipped += 1

    def _next_submission(self, loss: float | None, seconds: float) -> Submission:
        """Describe the submission that follows on the newest result."""
        progress, options = self._progress, self.options
        turn = progress.count if progress.asynchronous else progress.version
        return Submission(
            worker_id=progress.worker_id,
            number=progress.count + 1,
            base=progress.version,
            fragment=turn % options.num_fragments,
            bf16=options.bf16_comm,
            samples=max(1, progress.samples),
            steps=self._timed_steps,
            seconds=seconds,
            loss=loss if loss is not None and abs(loss) <= LARGEST_LOSS else None,
            saved=self._saved,
            int8=options.int8_comm,
        )

    def _note_done(
        self, submission: Submission, result: Result | None, local_steps: int, is_dropped: bool, seconds: float
    ) -> Synchronization:
        if result is None:
            self._progress.skipped += 1
        else:
            self._progress.synchronized += 1
            self._progress.samples = max(0, self._progress.samples - submission.samples)
            self._progress.sync_every = result.sync_every or self._progress.sync_every
        return Synchronization(
            round=submission.number,
            version=None if result is None else result.version,
            local_steps=local_steps,
            samples=submission.samples,
            staleness=0 if result is None or is_dropped else result.version - 1 - submission.base,
            bytes=length_limits(self._exchange.sent(submission))[0],
            outer_loss=None if result is None else result.loss,
            dropped=is_dropped,
            seconds=seconds,
        )

    def _restart_clock(self) -> None:
        """Of the speed of the local steps."""
        self._began, self._timed_steps = time.monotonic(), 0

    def _abandon_flight(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.abandon()

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def rest(self) -> WorkerState | None:
        """The state beside the tensors of the snapshot; None before the worker has global parameters."""
        return self._progress.state(None if self._flight is None else self._flight.state())

    def restore(self, rest: WorkerState | None) -> None:
        """Continue from a state; the snapshot's tensors are restored by the caller. Before :meth:`join`.

        Raises:
            StateMismatch: if it is not the state of a worker.
        """
        check(rest, WorkerState | None, "DiLoCo")
        self._abandon_flight()
        if rest is None:
            return
        if self.options.worker_id is None:
            self.worker_id = rest["worker_id"]
        elif self.worker_id != rest["worker_id"]:
            self._exchange.warn("its checkpoint is of worker_id=%r; it joins as a new worker", rest["worker_id"])
            return
        self._progress.restore(rest, dylu=self.options.dylu)
        self._restored_flight = rest.get("flight")
        self._saved = min(self._saved, self._progress.count)  # a checkpoint in memory may not outlive the host

    def state_dict(self) -> dict[str, Any]:
        """Return the worker's state, for a loop of your own. Collective."""
        self.settle()
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


def _show_life(worker_id: str, options: WorkerOptions, ended: threading.Event) -> None:
    """Show the server every ``heartbeat_interval`` seconds that the worker is alive. On a thread of its own."""
    with connect(options) as client:
        while not ended.wait(options.heartbeat_interval):
            try:
                client.heartbeat(worker_id)
            except DalsegnoError as error:
                logger.debug("DiLoCo: heartbeat: %s", error)
