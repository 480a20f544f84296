"""Replay: what ``DivergenceDetector`` would have done in past runs, and a search for its settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from dalsegno.errors import ConfigurationError
from dalsegno.stateful.annotations import check_types

from .divergence import DetectorSettings, Divergence, Mode
from .series import HUGE, Series

Floats = NDArray[np.float64]


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
