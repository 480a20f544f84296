"""Divergence: the detection rule of ``DivergenceDetector``, for live runs and for past logs.

Observations x are smoothed, ``s = a·x + (1 − a)·s`` (starting with s = x), and s is compared with a *baseline*: the
lowest s so far or, with ``baseline_smoothing``, a second, slower moving average that forgets old bests. An observation
is *bad* if s exceeds the baseline by a limit: a distance in the unit of the observations (``threshold``), a factor of
the baseline (``relative_threshold``), or, with neither, an adaptive limit: s has lost a quarter of the gain since the
first observation, and both s and the newest x exceed the baseline by more than 12 standard deviations of the noise of
s. The adaptive limit has no unit: it treats a loss and a million times that loss alike. A single spike, which moves s
for a while, stops being bad with the next x.

After ``warmup`` observations, ``patience`` bad ones in a row are a divergence; NaN or infinity is one at once and never
enters s. ``mode="max"`` (an accuracy) mirrors everything: the baseline is the highest s, and falling is bad.

It can be replayed over past runs: see ``replay.py``. A training needs no NumPy for it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dalsegno.errors import ConfigurationError
from dalsegno.stateful import schema

Mode = Literal["min", "max"]

LOST = 0.25  # adaptive limit: fraction of the gain since the first observation

NOISE = 12.0
"""Adaptive limit: standard deviations of the noise of s. docs/reference/callbacks derives both."""

_NOISE_SMOOTHING = 0.05
_LARGEST_STEP = 4.0  # cap on a step in the noise estimate, as a multiple of the usual step
_FEWEST = 5  # observations after which the usual step is known


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorSettings:
    """Settings of the detection rule, with the names and defaults of ``DivergenceDetector``.

    Raises ConfigurationError for an invalid value.
    """

    smoothing: float = 0.3
    """Weight a of the newest observation, 0 < a ≤ 1; 1: no smoothing."""
    threshold: float | None = None
    """Least bad distance between s and the baseline, in the unit of the observations; None: not used."""
    relative_threshold: float | None = None
    """Least bad s as a factor of the baseline, over 1; None: not used. For a negative baseline the limit is baseline +
    |baseline| · (factor − 1)."""
    patience: int = 3
    """Bad observations in a row that are a divergence, at least 1."""
    warmup: int = 10
    """First observations, which only move s and the baseline."""
    mode: Mode = "min"
    """``"min"`` for numbers that should fall, ``"max"`` for numbers that should rise."""
    baseline_smoothing: float | None = None
    """The baseline is a moving average with this weight of the newest observation, over 0 and below ``smoothing``: it
    tolerates a slow rise, not a fast one. None: the baseline is the best s so far."""

    def __post_init__(self) -> None:
        number, perhaps = int | float, int | float | None
        slower = f"a number over 0 and under smoothing, which is {self.smoothing}, or None"
        for name, kind, allowed, fits in (
            ("smoothing", number, "a number over 0, up to 1", lambda a: 0 < a <= 1),
            ("threshold", perhaps, "a finite number over 0, or None", lambda t: 0 < t < math.inf),
            ("relative_threshold", perhaps, "a finite number over 1, or None", lambda t: 1 < t < math.inf),
            ("patience", int, "an integer, at least 1", lambda n: n >= 1),
            ("warmup", int, "an integer, at least 0", lambda n: n >= 0),
            ("mode", str, "'min' or 'max'", lambda mode: mode in ("min", "max")),
            ("baseline_smoothing", perhaps, slower, lambda b: 0 < b < self.smoothing),
        ):
            value = getattr(self, name)
            is_of_kind = isinstance(value, kind) and not isinstance(value, bool)
            if not is_of_kind or (value is not None and not fits(value)):
                raise ConfigurationError(f"{name} is {value!r}; allowed: {allowed}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one observation."""

    diverged: bool
    smoothed: float
    best: float
    bad_in_a_row: int
    reason: str
    """Why it is a divergence, in words; empty if it is not."""


@dataclass(slots=True)
class DivergenceState:
    """What a detector has seen; mirrored for the mode ``max``, so that low is good."""

    smoothed: float | None
    best: float
    first: float
    newest: float
    step: float
    """Mean distance between successive observations."""
    observations: schema.Count
    bad_in_a_row: schema.Count


class Divergence:
    """Observes a sequence of numbers and reports when it diverges.

    A divergence resets the count of bad observations: the next one takes ``patience`` new ones. So a run that resumes
    from the checkpoint of a stop is not stopped again for the same observations.
    """

    def __init__(self, settings: DetectorSettings) -> None:
        self._settings = settings
        self._sign = 1.0 if settings.mode == "min" else -1.0
        self._seen = DivergenceState(None, math.inf, math.inf, math.inf, 0.0, 0, 0)

    def observe(self, value: float) -> Verdict:
        """Process the next observation."""
        seen, settings = self._seen, self._settings
        value = float(value)
        if not math.isfinite(value):
            seen.bad_in_a_row = 0
            return self._verdict(f"the value is {value}")
        x, a = self._sign * value, settings.smoothing
        seen.smoothed = x if seen.smoothed is None else a * x + (1 - a) * seen.smoothed
        self._move_baseline(x, seen.smoothed)
        seen.observations += 1
        if seen.observations <= settings.warmup or not (limit := self._limit_passed(seen.smoothed)):
            seen.bad_in_a_row = 0
            return self._verdict("")
        seen.bad_in_a_row += 1
        if seen.bad_in_a_row < settings.patience:
            return self._verdict("")
        verdict = self._verdict(
            f"its moving average {self._sign * seen.smoothed:.6g} has left its "
            f"{'best' if settings.baseline_smoothing is None else 'slow average'} {self._sign * seen.best:.6g} "
            f"by {limit}, {settings.patience} observations in a row"
        )
        seen.bad_in_a_row = 0
        return verdict

    def _move_baseline(self, x: float, smoothed: float) -> None:
        seen, b = self._seen, self._settings.baseline_smoothing
        if seen.observations == 0:
            seen.first = seen.best = x
        else:
            step, weight = abs(x - seen.newest), max(_NOISE_SMOOTHING, 1 / seen.observations)
            if seen.step > 0 and seen.observations >= _FEWEST:
                step = min(step, _LARGEST_STEP * seen.step)
            seen.step += weight * (step - seen.step)
            seen.best = min(seen.best, smoothed) if b is None else b * x + (1 - b) * seen.best
        seen.newest = x

    def _limit_passed(self, smoothed: float) -> str:
        """The limit that s exceeds, in words; empty if it exceeds none."""
        seen, threshold, factor = self._seen, self._settings.threshold, self._settings.relative_threshold
        distance = smoothed - seen.best
        if threshold is None and factor is None:
            distance = min(distance, seen.newest - seen.best)  # a spike moves s for a while, but not the next x
            is_far = distance > max(LOST * (seen.first - seen.best), NOISE * self._noise())
            return f"a quarter of what it had gained since {self._sign * seen.first:.6g}" if is_far else ""
        if threshold is not None and distance >= threshold:
            return f"at least {threshold:g}"
        if factor is not None and distance > 0 and distance >= abs(seen.best) * (factor - 1):
            return f"at least the factor {factor:g}"
        return ""

    def _noise(self) -> float:
        """Standard deviation of s under noise alone: for normal observations it is √π/2 times their mean distance
        from each other, and an exponential average reduces it by the factor √(a / (2 − a))."""
        a = self._settings.smoothing
        return math.sqrt(math.pi) / 2 * self._seen.step * math.sqrt(a / (2 - a))

    def _verdict(self, reason: str) -> Verdict:
        seen = self._seen
        smoothed, best = (math.nan, math.nan) if seen.smoothed is None else (seen.smoothed, seen.best)
        return Verdict(bool(reason), self._sign * smoothed, self._sign * best, seen.bad_in_a_row, reason)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._seen)

    def load_state_dict(self, state: Any) -> None:
        """Restore the state of :meth:`state_dict`."""
        self._seen = schema.check(state, DivergenceState, "the state of a divergence")
