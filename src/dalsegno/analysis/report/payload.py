"""Data for the script of a report, as JSON: downsampled without losing a spike."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dalsegno.analysis.formats.source import is_of_evaluation, is_setting
from dalsegno.analysis.log import TrainingLog
from dalsegno.analysis.plotting import X_AXES
from dalsegno.analysis.plotting.curves import (
    LABELS,
    MOST_DOTS,
    Axis,
    axis_label,
    clock_of,
    colour,
    evaluations_of,
    longest,
)
from dalsegno.analysis.plotting.pixels import downsample
from dalsegno.analysis.series import ParameterSeries, Series
from dalsegno.analysis.webpage import SHOWN_FIRST
from dalsegno.errors import ConfigurationError

Floats = NDArray[np.float64]

LEAST_RECORDS = 2  # least records of a curve
PLACES = 400  # most points from which another x axis is interpolated
LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Colour levels of a heatmap, from its lowest value to its highest; a dot is a missing value."""
MOST_ROWS, MOST_COLUMNS = 400, 200


def payload(logs: Sequence[TrainingLog], heatmaps: Sequence[ParameterSeries], points: int) -> dict[str, Any]:
    """``points``: approximate limit on the points of all curves together."""
    charts = [_chart(metric, logs) for metric in _charted(logs)]
    curves = sum(len(series) for _, series in charts)
    buckets = max(8, min(1500, points // (6 * max(1, curves))))
    seconds = longest(logs)
    runs = [
        {"name": log.name, "colour": colour(index), "marks": _marks(log), "axes": _axes(log, seconds)}
        for index, log in enumerate(logs)
    ]
    known = {"step", *(name for run in runs for name in run["axes"])}
    return {
        "axes": {x: axis_label(x, seconds) for x in X_AXES if x in known},
        "runs": runs,
        "charts": [{**chart, "curves": [_curve(*each, buckets) for each in series]} for chart, series in charts],
        "heatmaps": [_heatmap(each) for each in heatmaps],
    }


def _charted(logs: Sequence[TrainingLog]) -> list[str]:
    """Metrics with a chart: all but evaluation metrics drawn in another chart; losses first."""
    names = list(dict.fromkeys(name for log in logs for name in log.metrics()))
    companions = {other for name in names for other in evaluations_of(name, names)}
    chosen = [name for name in names if name not in companions and any(_is_curve(log, name) for log in logs)]
    losses = [log.loss for log in logs if log.loss in chosen]
    first = dict.fromkeys([*losses, *(name for name in SHOWN_FIRST if name in chosen)])
    return [name for name in (*first, *(name for name in chosen if name not in first)) if name is not None]


def _is_curve(log: TrainingLog, name: str) -> bool:
    """Whether a metric has several records, unlike those logged once at the end of a run."""
    return name in log.metrics() and len(log.metric(name)) >= LEAST_RECORDS


def _chart(metric: str, logs: Sequence[TrainingLog]) -> tuple[dict[str, Any], list[tuple[int, Series]]]:
    series = []
    for run, log in enumerate(logs):
        names = [metric, *evaluations_of(metric, log.metrics())]
        series += [(run, log.metric(name)) for name in names if _is_curve(log, name)]
    shown = metric in SHOWN_FIRST or any(metric == log.loss for log in logs)
    return {"metric": metric, "label": LABELS.get(metric, metric), "shown": shown}, series


def _curve(run: int, series: Series, buckets: int) -> dict[str, Any]:
    kept = downsample(series.values, buckets)
    curve = {
        "run": run,
        "metric": series.name,
        "dots": is_of_evaluation(series.name) and len(series) <= MOST_DOTS,
        "setting": is_setting(series.name),
        "steps": _packed(series.steps[kept]),
        "values": _rounded(series.values[kept]),
    }
    if len(kept) < len(series):
        size = -(-len(series) // buckets)
        begins = np.arange(0, len(series), size)
        ends = np.append(begins[1:], len(series)) - 1
        curve |= {"meanSteps": _packed(series.steps[ends]), "means": _rounded(_means(series.values, begins))}
    return curve


def _means(values: Floats, begins: NDArray[np.int64]) -> Floats:
    """Mean of the finite values of each stretch; NaN if there are none."""
    finite = np.isfinite(values)
    counts = np.add.reduceat(finite.astype(np.int64), begins)
    sums = np.add.reduceat(np.where(finite, values, 0.0), begins)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _axes(log: TrainingLog, seconds: float) -> dict[str, Any]:
    """Positions of steps on the other axes that the log has. ``seconds``: of the longest log."""
    axes = {}
    for clock in map(log.metric, clock_of(log)):
        for x in X_AXES[1:]:
            with suppress(ConfigurationError):  # the log does not have it
                axes[x] = _places(clock.steps, Axis(log, x, seconds).of(clock))
    return {name: places for name, places in axes.items() if places["steps"]}


def _places(steps: NDArray[np.int64], places: Floats) -> dict[str, Any]:
    known = np.flatnonzero(np.isfinite(places))
    if not len(known):
        return {"steps": [], "places": []}
    chosen = known[np.unique(np.linspace(0, len(known) - 1, PLACES).astype(np.int64))]
    return {"steps": _packed(steps[chosen]), "places": _rounded(places[chosen], digits=9)}


def _marks(log: TrainingLog) -> list[dict[str, Any]]:
    commands = [
        {"step": each.step, "kind": "command", "label": f"{each.what} ({each.by}), at step {each.step:,}"}
        for each in log.interventions()
    ]
    restarts = []
    for each in log.restarts():
        kind, number = ("rollback", "") if each.leg is None else ("leg", f" {each.leg}")
        repeated = f", {each.redone:,} steps repeated" if each.redone else ""
        why = f" ({each.reason})" if each.reason else ""
        label = f"{kind}{number}: resumed from step {each.step:,}{repeated}{why}"
        restarts.append({"step": each.step, "kind": kind, "label": label})
    return [*restarts, *commands]


def _heatmap(series: ParameterSeries) -> dict[str, Any]:
    """The heatmap at visible resolution: the largest of neighbouring values."""
    values = np.where(np.isfinite(series.values) & (series.values > 0), series.values, 0.0).T
    across, down = -(-values.shape[1] // MOST_COLUMNS), -(-values.shape[0] // MOST_ROWS)
    values = np.maximum.reduceat(values, np.arange(0, values.shape[1], across), axis=1)
    values = np.maximum.reduceat(values, np.arange(0, values.shape[0], down), axis=0)
    known = values[values > 0]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.1, 1.0)
    span = np.log(high) - np.log(low) or 1.0
    heights = (np.log(np.where(values > 0, values, low)) - np.log(low)) / span
    levels = np.round(heights * (len(LEVELS) - 1)).astype(int)
    rows = [
        "".join(LEVELS[level] if value > 0 else "." for level, value in zip(*row, strict=True))
        for row in zip(levels.tolist(), values.tolist(), strict=True)
    ]
    names = [f"{name} and {down - 1} more" if down > 1 else name for name in series.parameters[::down]]
    return {
        "label": f"{series.run}: {series.name}",
        "steps": series.steps[::across].tolist(),
        "parameters": names,
        "rows": rows,
        "low": low,
        "high": high,
    }


def _packed(steps: NDArray[np.int64]) -> list[int]:
    """Steps as differences, which take fewer characters."""
    packed: list[int] = np.diff(steps, prepend=0).tolist()
    return packed


def _rounded(values: Floats, digits: int = 6) -> list[float | None]:
    """Values with six significant digits, more than a screen resolves; None for non-finite ones."""
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]
