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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from dalsegno.errors import ConfigurationError
from dalsegno.stateful import schema

if TYPE_CHECKING:  # the detector itself needs no NumPy
    import numpy as np
    from numpy.typing import NDArray

    from .series import Series

    Floats = NDArray[np.float64]

Mode = Literal["min", "max"]

LOST = 0.25
"""Adaptive limit: fraction of the gain since the first observation."""

NOISE = 12.0
"""Adaptive limit: standard deviations of the noise of s. docs/reference/callbacks derives both."""

_NOISE_SMOOTHING = 0.05
_LARGEST_STEP = 4.0  # cap on a step in the noise estimate, as a multiple of the usual step
_FEWEST = 5  # observations after which the usual step is known


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one observation."""

    diverged: bool
    smoothed: float
    best: float
    bad_in_a_row: int
    reason: str
    """Why it is a divergence, in words; empty if it is not."""


class DivergenceState(TypedDict):
    smoothed: float | None
    best: float
    first: float
    newest: float
    step: float
    observations: schema.Count
    bad_in_a_row: schema.Count


class Divergence:
    """Observes a sequence of numbers and reports when it diverges.

    Args:
        smoothing: weight a of the newest observation, 0 < a ≤ 1; 1: no smoothing.
        threshold: least bad distance between s and the baseline, in the unit of the observations; None: not used.
        relative_threshold: least bad s as a factor of the baseline, over 1; None: not used. For a negative baseline the
            limit is baseline + |baseline| · (factor − 1).
        patience: bad observations in a row that are a divergence, at least 1.
        warmup: first observations, which only move s and the baseline.
        mode: ``"min"`` for numbers that should fall, ``"max"`` for numbers that should rise.
        baseline_smoothing: the baseline is a moving average with this weight of the newest observation, over 0 and
            below ``smoothing``: it tolerates a slow rise, not a fast one. None: the baseline is the best s so far.

    A divergence resets the count of bad observations: the next one takes ``patience`` new ones. So a run that resumes
    from the checkpoint of a stop is not stopped again for the same observations.

    Raises:
        ConfigurationError: for an invalid value.
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
        _check("patience", patience, int, "an integer, at least 1", lambda n: n >= 1)
        _check("warmup", warmup, int, "an integer, at least 0", lambda n: n >= 0)
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
        self._smoothed: float | None = None  # from here on mirrored for "max", so that low is good
        self._best = math.inf
        self._first = math.inf
        self._newest = math.inf
        self._step = 0.0  # mean distance between successive observations
        self._observations = 0
        self._bad_in_a_row = 0

    def observe(self, value: float) -> Verdict:
        """Process the next observation."""
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
        """The limit that s exceeds, in words; empty if it exceeds none."""
        assert self._smoothed is not None
        distance = self._smoothed - self._best
        if self._threshold is None and self._relative_threshold is None:
            distance = min(distance, self._newest - self._best)  # a spike moves s for a while, but not the next x
            is_far = distance > max(LOST * (self._first - self._best), NOISE * self._noise())
            return f"a quarter of what it had gained since {self._sign * self._first:.6g}" if is_far else ""
        if self._threshold is not None and distance >= self._threshold:
            return f"at least {self._threshold:g}"
        factor = self._relative_threshold
        if factor is not None and distance > 0 and distance >= abs(self._best) * (factor - 1):
            return f"at least the factor {factor:g}"
        return ""

    def _noise(self) -> float:
        """Standard deviation of s under noise alone: for normal observations it is √π/2 times their mean distance
        from each other, and an exponential average reduces it by the factor √(a / (2 − a))."""
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
        """Restore the state of :meth:`state_dict`."""
        schema.check(state, DivergenceState, "the state of a divergence")
        self._smoothed, self._best = state["smoothed"], state["best"]
        self._first, self._newest, self._step = state["first"], state["newest"], state["step"]
        self._observations, self._bad_in_a_row = state["observations"], state["bad_in_a_row"]


def _check(argument: str, value: Any, kind: type | UnionType, allowed: str, right: Callable[[Any], bool]) -> None:
    fits = isinstance(value, kind) and not isinstance(value, bool)
    if not fits or (value is not None and not right(value)):
        raise ConfigurationError(f"{argument} is {value!r}; allowed: {allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorSettings:
    """Arguments of :class:`~dalsegno.analysis.divergence.Divergence`, with the same names and defaults.

    Raises:
        ConfigurationError: for an invalid value.
    """

    smoothing: float = 0.3
    threshold: float | None = None
    relative_threshold: float | None = None
    patience: int = 3
    warmup: int = 10
    mode: Mode = "min"
    baseline_smoothing: float | None = None

    def __post_init__(self) -> None:
        self.build()

    def build(self) -> Divergence:
        """A new detector."""
        return Divergence(**asdict(self))


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


def detect_divergence(series: Series, settings: DetectorSettings | None = None) -> Detection:
    """Feed a series to a detector as ``DivergenceDetector`` would have."""
    settings = settings or DetectorSettings()
    divergence = settings.build()
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
TRIED = 12
"""Number of candidates that are replayed with the detector itself and returned."""


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


def sweep_settings(good: Sequence[Series], bad: Sequence[Series], *, mode: Mode = "min") -> list[Candidate]:
    """The best settings: fewest errors first, then the widest margin, then the earliest firing.

    Each series is the watched metric of one run. For each smoothing, patience and warm-up, a run *shows* the largest
    distance from its best that lasted ``patience`` observations: the detector fires if and only if its threshold is at
    most that. So there is no grid of thresholds: the best one is midway between the distances shown by the worst good
    run and the least bad run. Distances come from the detector's own rule, and the best candidates are then replayed
    with the detector itself.

    Raises:
        ConfigurationError: without a run of either kind.
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
                middle = _rounded(_middle(*gap))
                threshold, factor = (middle, None) if limit == "threshold" else (None, 1 + middle)
                settings = DetectorSettings(
                    smoothing=smoothing,
                    threshold=threshold,
                    relative_threshold=factor,
                    patience=patience,
                    warmup=warmup,
                    mode=mode,
                )
                drafts.append(
                    (_count_errors(gap, shown_good, shown_bad), _factor(min(shown_bad), max(shown_good)), settings)
                )
    drafts.sort(key=lambda draft: (draft[0], -draft[1]))
    candidates = [_tried(settings, good, bad, margin) for _, margin, settings in drafts[:TRIED]]
    return sorted(candidates, key=lambda each: (each.errors, -each.margin, each.fires_at or 1.0))


class _Track:
    """Distance of a run from its best at each observation, by the detector's rule."""

    def __init__(self, values: Floats, smoothing: float, mode: Mode) -> None:
        import numpy as np

        divergence = Divergence(smoothing=smoothing, mode=mode)
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
        from numpy.lib.stride_tricks import sliding_window_view

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
    from .series import HUGE

    return min(2 * low, HUGE) if high == math.inf else math.sqrt(low) * math.sqrt(high)


def _factor(high: float, low: float) -> float:
    if high == low:
        return 1.0
    return math.inf if low == 0 else high / low


def _rounded(distance: float) -> float:
    """Three significant digits: more would suggest a precision that a threshold does not have."""
    return float(f"{distance:.3g}")


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
