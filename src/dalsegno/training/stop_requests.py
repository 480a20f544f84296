"""What ends a leg from outside: ``SignalWatcher`` (signals) and ``TimeLimit``; ``Requeue`` then requeues a Slurm job.

A signal handler records the signal, and does nothing else. The ranks find the recorded signal, or the end of the time,
when they synchronize, between two steps or two batches of an evaluation; then all of them stop, save and return. A
second Ctrl-C raises ``KeyboardInterrupt`` at once. ``step_boundary`` decides that a run stops, also for callbacks.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dalsegno.distributed import collectives
from dalsegno.state import NO_REQUESTS, ControlRequests, TrainerControl
from dalsegno.system.exit_status import ExitStatus
from dalsegno.system.slurm import SlurmError, SlurmJob

from .result import TrainResult

logger = logging.getLogger("dalsegno")


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class SignalWatcher:
    """Records :data:`SIGNALS` while :meth:`listening`, and requests a stop once one has arrived."""

    def __init__(self, control: TrainerControl) -> None:
        self._control = control
        self._recorded: list[signal.Signals] = []
        self._previous: dict[signal.Signals, Any] = {}  # handlers that ours replace

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside; restore the previous handlers afterwards.

        A recorded signal is raised again at the end if the program had its own handler for it (``scontrol requeue``,
        say). A signal that the program ignores stays ignored. Python handles signals on the main thread only: on
        another thread, nothing is handled.
        """
        global _listening
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        present = {number: signal.getsignal(number) for number in SIGNALS}
        self._previous = {number: each for number, each in present.items() if each not in (None, signal.SIG_IGN)}
        self._recorded = []
        outer, _listening = _listening, self
        for number in self._previous:
            signal.signal(number, self._record)
        try:
            yield
        finally:
            _listening = outer
            self._restore()
        for number in dict.fromkeys(self._recorded):
            if self._previous[number] not in (signal.SIG_DFL, signal.default_int_handler):
                signal.raise_signal(number)

    def poll(self) -> ControlRequests:
        """Request a stop, once a signal has arrived."""
        if not self._recorded:
            return NO_REQUESTS
        first = self._recorded[0]
        if first is signal.SIGINT and not self._control.should_training_stop:
            logger.warning("SIGINT: training ends here, with a checkpoint; press Ctrl-C again to end without one")
        self._control.stop(first.name, by="signal")
        return ControlRequests(stop=True)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and signal.SIGINT in self._recorded:
            raise KeyboardInterrupt
        self._recorded.append(signal.Signals(number))

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._record:  # else the program has set another handler since
                signal.signal(number, handler)


_listening: SignalWatcher | None = None


def _restore_in_child() -> None:
    """A process that is forked during training is another program: a signal to it must not stop the run."""
    if _listening is not None:
        _listening._restore()


os.register_at_fork(after_in_child=_restore_in_child)


SLURM_END = "SLURM_JOB_END_TIME"
"""Environment variable in which Slurm announces the end of the job, in Unix seconds; older versions do not."""

_SPARE = 60.0  # seconds for the program to exit
_SPARE_SHARE = 0.1  # of the time that a short job has left


class TimeLimit:
    """Requests a stop ``max_seconds`` after :meth:`start`, and in time before the end that Slurm announces.

    One more step and a save must fit in before that end. Their durations are measured: the time since the last
    :meth:`poll`, and twice the longest save so far, plus a minute (a tenth of what a short job has left).
    """

    def __init__(self, control: TrainerControl, max_seconds: float | None) -> None:
        self._control = control
        self._max_seconds = math.inf if max_seconds is None else max_seconds
        self._started = self._polled = self._slurm_end = math.inf  # by the monotonic clock
        self._spare = _SPARE
        self._longest_save = 0.0
        self._why: str | None = None

    def start(self) -> None:
        self._why = None
        self._started = self._polled = time.monotonic()
        left = _seconds_left()
        self._slurm_end, self._spare = self._started + left, min(_SPARE, _SPARE_SHARE * left)

    def allow_for(self, save: float) -> None:
        """Allow for a save that took this many seconds, from its capture to its publication."""
        self._longest_save = max(self._longest_save, save)

    def poll(self) -> ControlRequests:
        """Request a stop, once it is time."""
        now = time.monotonic()
        step, self._polled = now - self._polled, now
        left = self._slurm_end - now
        if now - self._started >= self._max_seconds:
            self._why = f"max_seconds={self._max_seconds:g}"
        elif left <= step + 2 * self._longest_save + self._spare:
            self._why = self._why or f"Slurm ends this job in {left:.0f} s"
        if self._why is None:
            return NO_REQUESTS
        self._control.stop(self._why, by="clock")
        return ControlRequests(stop=True)


def _seconds_left() -> float:
    """Seconds until Slurm ends the job; infinite if it does not, or the end is not known."""
    announced = os.environ.get(SLURM_END)
    if announced is None:
        return _seconds_left_by_scontrol()
    if not announced.isdecimal():
        logger.warning("%s=%r is not a time in Unix seconds; the end of the job is ignored", SLURM_END, announced)
        return math.inf
    left = int(announced) - time.time()
    if left <= 0:  # a job that was extended still has its old end
        logger.warning("%s=%s is in the past; the end of the job is ignored", SLURM_END, announced)
        return math.inf
    return left


def _seconds_left_by_scontrol() -> float:
    """The same, where Slurm is too old to announce the end. Only rank 0 asks, so as to spare Slurm's controller."""
    job = SlurmJob.current()
    if job is None or collectives.rank() != 0:
        return math.inf
    try:
        end = job.status().end
    except SlurmError as error:
        logger.warning("the end of Slurm job %s is not known: %s; set max_seconds below its --time", job.id, error)
        return math.inf
    return math.inf if end is None else end - time.time()


class Requeue:
    """Acts on rank 0, if ``enabled``. A failure is only logged: the leg's result stays as it is."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._announced = False

    def begin_leg(self) -> None:
        """Warn, once, if the job cannot be requeued: now, rather than when its time is over."""
        if not self._acts or self._announced:
            return
        self._announced = True
        job = SlurmJob.current()
        if job is None:
            logger.warning("requeue=True has no effect: this process is not part of a Slurm job")
            return
        try:
            status = job.status()
            obstacle = "" if status.allows_requeue else "submit it with sbatch --requeue"
            obstacle = obstacle if status.is_batch else "only jobs of sbatch can be"
        except SlurmError as error:
            obstacle = str(error)
        if obstacle:
            logger.warning("requeue=True: Slurm job %s cannot be requeued: %s", job.id, obstacle)

    def end_leg(self, result: TrainResult) -> None:
        """Requeue the job if a signal or a clock has stopped the leg. To be called once all its files are closed."""
        if not self._acts or result.exit_status is not ExitStatus.RUN_AGAIN:
            return
        job = SlurmJob.current()
        if job is None:
            return
        try:
            state = job.status()
            if not state.is_running:  # scontrol would requeue a cancelled job, too
                logger.warning(
                    "Slurm job %s is not requeued from here: its state is %s, so it was cancelled, or Slurm itself has "
                    "ended or requeued it",
                    job.id,
                    state.state,
                )
                return
            logger.warning("Slurm job %s is requeued: the run resumes at step %d", job.id, result.global_step)
            job.requeue()
        except SlurmError as error:
            logger.error("Slurm job %s is not requeued: %s; submit it again, and the run resumes", job.id, error)

    @property
    def _acts(self) -> bool:
        return self._enabled and collectives.rank() == 0
