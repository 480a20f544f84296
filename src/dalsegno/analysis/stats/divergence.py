"""When a training run has diverged: the mathematics, for a live run and for reading a log alike.

Observations x are smoothed, ``s = a·x + (1 − a)·s`` (the first one is s itself), and s is compared with a *baseline*:
the lowest s so far or, with ``baseline_smoothing``, a second and slower moving average, which forgets old bests. An
observation is *bad* if s has left the baseline far enough. What is far enough is said in the unit of the observations
(``threshold``), as a factor of the baseline (``relative_threshold``), or, where neither is given, measured: s has lost
a quarter of all that was gained since the first observation, and both s and the newest x have left the baseline by
more than 12 standard deviations of the noise of s. That rule has no unit: it judges a loss and a million times that
loss alike, and a single spike, which moves s for a while, is over for it with the next x.

After ``warmup`` observations, ``patience`` bad ones in a row are a divergence; NaN or infinity is one at once, and
never enters s. With ``mode="max"`` (an accuracy) all is mirrored: the baseline is the highest, and falling is bad.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, TypedDict

from dalsegno.errors import ConfigurationError
from dalsegno.stateful import schema

Mode = Literal["min", "max"]

LOST = 0.25
"""The part of what was gained that a run loses when it diverges, where no threshold says otherwise."""

NOISE = 12.0
"""And more than so many standard deviations of the noise of s. docs/callbacks/divergence-detector.md says how both were
found."""

_NOISE_SMOOTHING = 0.05
_LARGEST_STEP = 4.0  # times the usual one: a larger one counts for no more in the noise
_FEWEST = 5  # observations from which on there is a usual step


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one observation has led to."""

    diverged: bool
    smoothed: float
    best: float
    bad_in_a_row: int
    reason: str
    """Why it counts as a divergence, for people to read; empty where it does not."""


class DivergenceState(TypedDict):
    smoothed: float | None
    best: float
    first: float
    newest: float
    step: float
    observations: schema.Count
    bad_in_a_row: schema.Count


class Divergence:
    """Observes one number again and again, and says when it has diverged.

    Args:
        smoothing: weight a of the newest observation, 0 < a ≤ 1; 1 means no smoothing.
        threshold: bad from this distance between s and the baseline on, in the unit of the observations; None: not
            used.
        relative_threshold: bad from ``baseline · relative_threshold`` on, a factor over 1; None: not used. Where the
            baseline is negative, the distance is the same part of its magnitude: baseline + |baseline| · (factor − 1).
        patience: how many bad observations in a row it takes, at least 1.
        warmup: how many observations, from the first on, only move s and the baseline.
        mode: ``"min"`` for numbers that should fall, ``"max"`` for those that should rise.
        baseline_smoothing: weight of the newest observation in a baseline that is a moving average too, over 0 and
            under ``smoothing``: a slow rise is forgiven, a fast one is not. None: the baseline is the best s so far.

    After a divergence the counter of bad observations starts over: it takes ``patience`` new ones to have the next.
    So a run that goes on from the checkpoint of a stop is not stopped again for what had stopped it.

    Raises:
        ConfigurationError: for a value that cannot work.
    """

    def __init__(
        self,
        *,
        smoothing: float = 0.3,
        threshold: float | None = None,
        relative_threshold: float | None = None,
        patience: int = 3,
        warmup: int = 10,
        mode: Mode = "min",
        baseline_smoothing: float | None = None,
    ) -> None:
        number, perhaps = int | float, int | float | None
        _check("smoothing", smoothing, number, "a number over 0, up to 1", lambda a: 0 < a <= 1)
        _check("threshold", threshold, perhaps, "a finite number over 0, or None", lambda t: 0 < t < math.inf)
        _check(
            "relative_threshold",
            relative_threshold,
            perhaps,
            "a finite number over 1, or None",
            lambda t: 1 < t < math.inf,
        )
        _check("patience", patience, int, "a whole number, at least 1", lambda n: n >= 1)
        _check("warmup", warmup, int, "a whole number, at least 0", lambda n: n >= 0)
        _check("mode", mode, str, "'min' or 'max'", lambda m: m in ("min", "max"))
        _check(
            "baseline_smoothing",
            baseline_smoothing,
            perhaps,
            f"a number over 0 and under smoothing, which is {smoothing:g}, or None",
            lambda b: 0 < b < smoothing,
        )
        self._smoothing = smoothing
        self._threshold = threshold
        self._relative_threshold = relative_threshold
        self._patience = patience
        self._warmup = warmup
        self._sign = 1.0 if mode == "min" else -1.0
        self._baseline_smoothing = baseline_smoothing
        self._smoothed: float | None = None  # this and what follows mirrored for "max": small is good
        self._best = math.inf
        self._first = math.inf
        self._newest = math.inf
        self._step = 0.0  # the usual distance of an observation from the one before it
        self._observations = 0
        self._bad_in_a_row = 0

    def observe(self, value: float) -> Verdict:
        """Take the next observation."""
        value = float(value)
        if not math.isfinite(value):
            self._bad_in_a_row = 0
            return self._verdict(f"the value is {value}")
        previous, a = self._smoothed, self._smoothing
        x = self._sign * value
        self._smoothed = x if previous is None else a * x + (1 - a) * previous
        self._move_baseline(x)
        self._observations += 1
        if self._observations <= self._warmup or not (limit := self._limit_passed()):
            self._bad_in_a_row = 0
            return self._verdict("")
        self._bad_in_a_row += 1
        if self._bad_in_a_row < self._patience:
            return self._verdict("")
        verdict = self._verdict(
            f"its moving average {self._sign * self._smoothed:.6g} has left its "
            f"{'best' if self._baseline_smoothing is None else 'slow average'} {self._sign * self._best:.6g} "
            f"by {limit}, {self._patience} observations in a row"
        )
        self._bad_in_a_row = 0
        return verdict

    def _move_baseline(self, x: float) -> None:
        assert self._smoothed is not None
        if self._observations == 0:
            self._first = self._best = x
        else:
            step, weight = abs(x - self._newest), max(_NOISE_SMOOTHING, 1 / self._observations)
            if self._step > 0 and self._observations >= _FEWEST:
                step = min(step, _LARGEST_STEP * self._step)
            self._step += weight * (step - self._step)
            b = self._baseline_smoothing
            self._best = min(self._best, self._smoothed) if b is None else b * x + (1 - b) * self._best
        self._newest = x

    def _limit_passed(self) -> str:
        """The limit that s has passed, in words; empty where it has not."""
        assert self._smoothed is not None
        distance = self._smoothed - self._best
        if self._threshold is None and self._relative_threshold is None:
            distance = min(distance, self._newest - self._best)  # one spike moves s for a while; the next x is back
            is_far = distance > max(LOST * (self._first - self._best), NOISE * self._noise())
            return f"a quarter of what it had gained since {self._sign * self._first:.6g}" if is_far else ""
        if self._threshold is not None and distance >= self._threshold:
            return f"at least {self._threshold:g}"
        factor = self._relative_threshold
        if factor is not None and distance > 0 and distance >= abs(self._best) * (factor - 1):
            return f"at least the factor {factor:g}"
        return ""

    def _noise(self) -> float:
        """The standard deviation of s where only noise moves it: that of normally distributed observations is √π/2 of
        their mean distance from each other, and an exponential average of them has √(a / (2 − a)) of it."""
        return math.sqrt(math.pi) / 2 * self._step * math.sqrt(self._smoothing / (2 - self._smoothing))

    def _verdict(self, reason: str) -> Verdict:
        smoothed = math.nan if self._smoothed is None else self._sign * self._smoothed
        best = math.nan if self._smoothed is None else self._sign * self._best
        return Verdict(bool(reason), smoothed, best, self._bad_in_a_row, reason)

    def state_dict(self) -> DivergenceState:
        return {
            "smoothed": self._smoothed,
            "best": self._best,
            "first": self._first,
            "newest": self._newest,
            "step": self._step,
            "observations": self._observations,
            "bad_in_a_row": self._bad_in_a_row,
        }

    def load_state_dict(self, state: Any) -> None:
        """Go on where :meth:`state_dict` was taken.

        Raises:
            StateMismatch: if ``state`` is none of its kind.
        """
        schema.check(state, DivergenceState, "the state of a divergence")
        self._smoothed, self._best = state["smoothed"], state["best"]
        self._first, self._newest, self._step = state["first"], state["newest"], state["step"]
        self._observations, self._bad_in_a_row = state["observations"], state["bad_in_a_row"]


def migrated(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a detector that knew no noise. Where no threshold is given it fires, as that one did by default,
    when the average has risen by 1, until the run has gained more."""
    best, smoothed = state["best"], state["smoothed"]
    return {**state, "first": best + 1 / LOST, "newest": math.inf if smoothed is None else smoothed, "step": 0.0}


def _check(argument: str, value: Any, kind: type | UnionType, allowed: str, right: Callable[[Any], bool]) -> None:
    fits = isinstance(value, kind) and not isinstance(value, bool)
    if not fits or (value is not None and not right(value)):
        raise ConfigurationError(f"{argument} is {value!r}; allowed: {allowed}")
