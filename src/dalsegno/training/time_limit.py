"""TimeLimit: ends a leg with a checkpoint before ``max_seconds``, or the end of its Slurm job, is reached."""

from __future__ import annotations

import logging
import math
import os
import time

from dalsegno.distributed import collectives
from dalsegno.state import NO_REQUESTS, ControlRequests, TrainerControl
from dalsegno.system.slurm import SlurmError, SlurmJob

logger = logging.getLogger("dalsegno")

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
        """Start the clock of a leg."""
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
