"""TimeLimit: a leg that ends by itself before its time is up, with a checkpoint."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping

from dalsegno.state import NO_REQUESTS, ControlRequests, TrainerControl

logger = logging.getLogger("dalsegno")

SLURM_END = "SLURM_JOB_END_TIME"
"""Where Slurm says when it will end the job: Unix seconds."""

_SPARE = 60.0  # seconds to leave the program in
_SPARE_SHARE = 0.1  # of a job that is short


class TimeLimit:
    """Wishes to stop ``max_seconds`` after :meth:`start`, and in time before the end that Slurm announces.

    Before that end there must be time for one more step and a save. How long they take is measured: the time since the
    last look, and twice the longest save so far, with a minute to spare (a tenth of what a short job has left).
    """

    def __init__(
        self, control: TrainerControl, max_seconds: float | None, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._control = control
        self._max_seconds = math.inf if max_seconds is None else max_seconds
        self._environment = environment
        self._started = self._looked = self._slurm_end = math.inf  # by the monotonic clock
        self._spare = _SPARE
        self._longest_save = 0.0
        self._why: str | None = None

    def start(self) -> None:
        """A leg begins now."""
        self._why = None
        self._started = self._looked = time.monotonic()
        left = _seconds_until(self._environment.get(SLURM_END))
        self._slurm_end, self._spare = self._started + left, min(_SPARE, _SPARE_SHARE * left)

    def allow_for(self, save: float) -> None:
        """A save took this many seconds, from its capture to its publication."""
        self._longest_save = max(self._longest_save, save)

    def poll(self) -> ControlRequests:
        """A wish to stop, once it is time."""
        now = time.monotonic()
        step, self._looked = now - self._looked, now
        left = self._slurm_end - now
        if now - self._started >= self._max_seconds:
            self._why = f"max_seconds={self._max_seconds:g}"
        elif left <= step + 2 * self._longest_save + self._spare:
            self._why = self._why or f"Slurm ends this job in {left:.0f} s"
        if self._why is None:
            return NO_REQUESTS
        self._control.stop(self._why, by="clock")
        return ControlRequests(stop=True)


def _seconds_until(announced: str | None) -> float:
    """From now; infinite where nothing (true) is announced."""
    if announced is None:
        return math.inf
    if not announced.isdecimal():
        logger.warning("%s=%r is no time in Unix seconds; the end of the job is not looked after", SLURM_END, announced)
        return math.inf
    left = int(announced) - time.time()
    if left <= 0:  # a job whose end was put off knows the old one
        logger.warning("%s=%s has gone by; the end of the job is not looked after", SLURM_END, announced)
        return math.inf
    return left
