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

The rule can be replayed over past runs (detect_divergence), and its settings can be searched for (sweep_settings).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from dalsegno.errors import ConfigurationError
from dalsegno.stateful import schema
from dalsegno.stateful.annotations import check_types

from .series import HUGE, Series

Floats = NDArray[np.float64]
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


@dataclass(frozen=True, slots=True)
class Firing:
    """One detected divergence."""

    step: int
    observation: int
    """Counted from 1."""
    value: float
    reason: str


@dataclass(frozen=True, slots=True)
class Detection:
    """Result of a replay."""

    observations: int
    judged: int
    """Observations after the warm-up; during it only non-finite ones are judged."""
    firings: tuple[Firing, ...]
    """All of them: a run that continues may diverge again."""

    @property
    def fired(self) -> Firing | None:
        """The first firing, at which the run would have ended."""
        return self.firings[0] if self.firings else None

    @property
    def reason(self) -> str | None:
        """Why the detector fired, or why it could not."""
        if self.fired is not None:
            return self.fired.reason
        return None if self.judged else f"nothing to judge: {self.observations} records, all within the warm-up"


@check_types
def detect_divergence(series: Series, settings: DetectorSettings | None = None) -> Detection:
    """Feed a series to a detector as ``DivergenceDetector`` would have."""
    settings = settings or DetectorSettings()
    divergence = Divergence(settings)
    firings = []
    for index, value in enumerate(series.values.tolist()):
        verdict = divergence.observe(value)
        if verdict.diverged:
            firings.append(Firing(int(series.steps[index]), index + 1, value, verdict.reason))
    return Detection(len(series), max(0, len(series) - settings.warmup), tuple(firings))


Limit = Literal["threshold", "relative_threshold"]

LIMITS: tuple[Limit, ...] = ("threshold", "relative_threshold")

SMOOTHING = (0.05, 0.1, 0.3, 1.0)
PATIENCE = (1, 3, 5, 10)
WARMUP = (10, 50, 2)
TRIED = 12  # number of candidates that are replayed with the detector itself and returned


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings, and how well they separate the runs."""

    settings: DetectorSettings
    missed: int
    """Bad runs in which the detector does not fire."""
    false_alarms: int
    """Good runs in which the detector fires."""
    margin: float
    """Factor by which the threshold may be off: distance shown by the least bad run over that of the worst good run.
    At most 1 if no threshold separates them; infinite if the bad runs end in NaN."""
    fires_at: float | None
    """Fraction of a run's observations before the detector fires, averaged over the bad runs."""

    @property
    def errors(self) -> int:
        return self.missed + self.false_alarms


@check_types
def sweep_settings(good: Sequence[Series], bad: Sequence[Series], *, mode: Mode = "min") -> list[Candidate]:
    """The best settings: fewest errors first, then the widest margin, then the earliest firing.

    Each series is the watched metric of one run. For each smoothing, patience and warm-up, a run *shows* the largest
    distance from its best that lasted ``patience`` observations: the detector fires if and only if its threshold is at
    most that. So there is no grid of thresholds: the best one is midway between the distances shown by the worst good
    run and the least bad run. Distances come from the detector's own rule, and the best candidates are then replayed
    with the detector itself. Raises ConfigurationError without a run of either kind.
    """
    if not good or not bad:
        raise ConfigurationError("a sweep needs both good and bad runs")
    drafts = []
    for smoothing in SMOOTHING:
        tracks_good, tracks_bad = ([_Track(series.values, smoothing, mode) for series in runs] for runs in (good, bad))
        for limit, patience in product(LIMITS, PATIENCE):
            found = set()
            for warmup in WARMUP:
                shown_good = [track.shown(limit, patience, warmup) for track in tracks_good]
                shown_bad = [track.shown(limit, patience, warmup) for track in tracks_bad]
                gap = _widest_gap(shown_good, shown_bad)
                if gap in found:
                    continue  # this warm-up changes nothing
                found.add(gap)
                middle = float(f"{_middle(*gap):.3g}")  # more digits would suggest a precision that it does not have
                threshold, factor = (middle, None) if limit == "threshold" else (None, 1 + middle)
                settings = DetectorSettings(
                    smoothing=smoothing,
                    threshold=threshold,
                    relative_threshold=factor,
                    patience=patience,
                    warmup=warmup,
                    mode=mode,
                )
                errors, margin = _count_errors(gap, shown_good, shown_bad), _factor(min(shown_bad), max(shown_good))
                drafts.append((errors, margin, settings))
    drafts.sort(key=lambda draft: (draft[0], -draft[1]))
    candidates = [_tried(settings, good, bad, margin) for _, margin, settings in drafts[:TRIED]]
    return sorted(candidates, key=lambda each: (each.errors, -each.margin, each.fires_at or 1.0))


class _Track:
    """Distance of a run from its best at each observation, by the detector's rule."""

    def __init__(self, values: Floats, smoothing: float, mode: Mode) -> None:
        divergence = Divergence(DetectorSettings(smoothing=smoothing, mode=mode))
        verdicts = [divergence.observe(value) for value in values.tolist()]
        best = np.array([verdict.best for verdict in verdicts])
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            away = np.abs(np.array([verdict.smoothed for verdict in verdicts]) - best)
            part = np.where(away > 0, away / np.abs(best), 0.0)
        self._away: dict[Limit, Floats] = {"threshold": away, "relative_threshold": part}
        self._all_finite = bool(np.isfinite(values).all())

    def shown(self, limit: Limit, patience: int, warmup: int) -> float:
        """Largest threshold at which the detector fires; infinite if it fires at any, 0 if at none."""
        if not self._all_finite:
            return math.inf
        away = self._away[limit][warmup:]
        if len(away) < patience:
            return 0.0
        return float(sliding_window_view(away, patience).min(axis=1).max())


def _widest_gap(good: Sequence[float], bad: Sequence[float]) -> tuple[float, float]:
    """The two distances between which a threshold makes the fewest errors; of several, those with the largest ratio."""
    levels = sorted({0.0, *good, *bad, math.inf})
    return max(pairwise(levels), key=lambda gap: (-_count_errors(gap, good, bad), _factor(gap[1], gap[0])))


def _count_errors(gap: tuple[float, float], good: Sequence[float], bad: Sequence[float]) -> int:
    low, high = gap
    return sum(shown <= low for shown in bad) + sum(shown >= high for shown in good)


def _middle(low: float, high: float) -> float:
    if low == 0:  # the good runs never leave their best: a threshold of 1 suffices if the bad ones show more
        return min(1.0, high / 2)
    return min(2 * low, HUGE) if high == math.inf else math.sqrt(low) * math.sqrt(high)


def _factor(high: float, low: float) -> float:
    if high == low:
        return 1.0
    return math.inf if low == 0 else high / low


def _tried(settings: DetectorSettings, good: Sequence[Series], bad: Sequence[Series], margin: float) -> Candidate:
    fired = [(found.fired, found.observations) for found in (detect_divergence(series, settings) for series in bad)]
    seen = [firing.observation / observations for firing, observations in fired if firing is not None]
    return Candidate(
        settings=settings,
        missed=len(bad) - len(seen),
        false_alarms=sum(detect_divergence(series, settings).fired is not None for series in good),
        margin=margin,
        fires_at=sum(seen) / len(seen) if seen else None,
    )
