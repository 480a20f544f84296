"""Panels of curves, computed from logs, independent of the drawing backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dalsegno.analysis.formats.source import is_of_evaluation, is_setting
from dalsegno.analysis.lineage import Restart, Tail
from dalsegno.analysis.series import HUGE, Series, automatic_window, trailing_mean
from dalsegno.errors import ConfigurationError, NotFound, expect_known
from dalsegno.logs import is_wall_clock

from . import View, XAxis

RUNS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
"""Colours of the runs, in this order and then repeated: the palette of Okabe and Ito (2008), but for black and yellow,
which have too little contrast with a background; replaced by a brown and a grey of other lightness."""

LOST = "#E69F00"  # records that were cut off the log


def colour(index: int) -> str:
    """Colour of a run, by its index."""
    return RUNS[index % len(RUNS)]


Floats = NDArray[np.float64]

TOKENS = ("tokens", "tokens_seen", "num_input_tokens_seen", "num_tokens", "total_tokens", "consumed_tokens")
"""Names of the number of tokens so far, in various programs."""
MOST_DOTS = 200  # most evaluations drawn as dots; more are drawn as a line
MOST_TITLE = 60  # longest title of the names of two runs, in characters
UNITS_OF_TIME = ((2 * 3600.0, "hours", 3600.0), (120.0, "minutes", 60.0), (0.0, "seconds", 1.0))
"""(least duration in seconds, unit, seconds per unit)."""
LABELS = {
    "tok_per_sec": "tokens per second",
    "peak_mem": "peak memory (bytes)",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "max_grad_norm": "largest gradient norm",
    "mfu": "model FLOPs utilization",
}


@runtime_checkable
class Log(Protocol):
    """The part of a TrainingLog that drawing needs."""

    @property
    def name(self) -> str: ...

    @property
    def loss(self) -> str | None: ...

    def metrics(self) -> list[str]: ...

    def metric(self, name: str) -> Series: ...

    def series(self, names: Iterable[str]) -> Mapping[str, Series]:
        """Read several metrics in one pass and cache them."""

    def tails(self) -> Sequence[Tail]: ...

    def restarts(self) -> Sequence[Restart]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """A metric of a run. Arrays have shape (n,)."""

    run: str
    metric: str
    colour: str
    x: Floats
    values: Floats
    """As logged."""
    smoothed: Floats | None
    """Trailing mean; None if not smoothed, as settings and dots are not."""
    window: int
    """Records in the trailing mean; 1: not smoothed."""
    dotted: bool
    """Drawn as dots: evaluations, if they are few."""
    is_companion: bool
    """An evaluation metric drawn with the requested training metric."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A restart or rollback."""

    x: float
    """Position at which the run resumed."""
    rollback: bool
    colour: str


@dataclass(slots=True)
class Panel:
    """Curves in one coordinate system."""

    metric: str
    title: str
    x_label: str
    y_label: str
    curves: list[Curve] = field(default_factory=list)
    lost: list[tuple[Floats, Floats]] = field(default_factory=list)
    """Places and values of records that were cut off the log, of shape (n,) each; only in a panel of one run."""
    marks: list[Mark] = field(default_factory=list)

    @property
    def runs(self) -> list[str]:
        return list(dict.fromkeys(curve.run for curve in self.curves))


def panels(logs: Sequence[Log], metrics: Sequence[str] | None, view: View, *, compare: bool) -> list[list[Panel]]:
    """Rows of panels, one per metric: with ``compare`` one panel for all runs, otherwise one panel per run.

    A training metric is drawn with its evaluation metrics: ``loss`` with ``eval_loss``.

    Args:
        metrics: None: the loss, under each run's own name for it, or else the first metric.
    """
    chosen = [[metric] * len(logs) for metric in metrics] if metrics else [_losses(logs)]
    known = {name for log in logs for name in log.metrics()}
    expect_known("metric", metrics or (), known)
    for number, log in enumerate(logs):
        _read_at_once(log, [names[number] for names in chosen])
    seconds = longest(logs) if view.x == "time" else 0.0
    axes = [Axis(log, view.x, seconds) for log in logs]
    rows = []
    for names in chosen:
        label = value_label(names[0], view) if len(set(names)) == 1 else "loss"
        if compare or len(logs) == 1:
            runs = list(zip(axes, names, map(colour, range(len(logs))), strict=True))
            rows.append([_panel(label, _title(logs), runs, view)])
        else:
            runs = [(axis, name, colour(0)) for axis, name in zip(axes, names, strict=True)]
            rows.append([_panel(label, run[0].log.name, [run], view) for run in runs])
    return rows


def value_label(metric: str, view: View) -> str:
    """Axis label of a metric, with its unit if known."""
    if view.perplexity and _is_loss(metric):
        return "perplexity" if metric == "loss" else f"perplexity ({metric})"
    return LABELS.get(metric, metric)


def value_range(curves: Sequence[Curve], view: View) -> tuple[float, float] | None:
    """Range of the values to show, without margins; None without values."""
    drawn = [curve.values[np.isfinite(curve.values) & ((curve.values > 0) | (not view.log))] for curve in curves]
    values = np.concatenate([np.empty(0), *drawn])
    if not len(values):
        return None
    low, high = np.quantile(values, (0.01, 0.99)) if view.ignore_outliers else (values.min(), values.max())
    return float(low), float(high)


def evaluations_of(metric: str, names: Sequence[str]) -> list[str]:
    """Evaluation metrics among ``names`` that measure what ``metric`` does: for ``loss``, ``eval_loss``."""
    if is_of_evaluation(metric):
        return []
    measure = metric.removeprefix("train").lstrip("_/")
    others = [name for name in names if is_of_evaluation(name) and not is_wall_clock(name)]
    return [name for name in others if name.endswith((f"_{measure}", f"/{measure}"))]


def longest(logs: Sequence[Log]) -> float:
    """Seconds from the first record to the last, in the longest of the logs; 0 without times."""
    return max((float(np.ptp(times)) for log in logs if len(times := _times(log))), default=0.0)


def unit_of_time(seconds: float) -> tuple[str, float]:
    """Unit for durations up to ``seconds``, and its length in seconds."""
    return next((name, unit) for least, name, unit in UNITS_OF_TIME if seconds >= least)


def axis_label(x: XAxis, seconds: float) -> str:
    return f"{unit_of_time(seconds)[0]} since the first record" if x == "time" else x


class Axis:
    """Maps the steps of one run to positions on the x axis.

    Args:
        longest: seconds of the longest run that is drawn.

    Raises:
        ConfigurationError: if the log does not have the quantity.
    """

    def __init__(self, log: Log, x: XAxis, longest: float) -> None:
        self.log = log
        self.label = axis_label(x, longest)
        self._x = x
        self._unit = unit_of_time(longest)[1]
        self._tokens = _tokens(log) if x == "tokens" else None
        times = _times(log)
        if x == "time" and not len(times):
            raise _no_axis(log, x)
        self._began = float(times.min(initial=np.inf))

    def of(self, series: Series) -> Floats:
        """Shape (n,)."""
        if self._x == "step":
            return series.steps.astype(np.float64)
        if self._tokens is not None:
            return np.interp(series.steps, self._tokens.steps, self._tokens.values)
        known = series.epochs if self._x == "epoch" else series.times
        if known is None or not len(known):
            raise _no_axis(self.log, self._x)
        return known if self._x == "epoch" else (known - self._began) / self._unit


def _panel(label: str, title: str, runs: Sequence[tuple[Axis, str, str]], view: View) -> Panel:
    """``runs``: axis, metric and colour of each."""
    panel = Panel(runs[0][1], title, runs[0][0].label, label)
    for axis, metric, run_colour in runs:
        here = axis.log.metrics()
        for name in [metric, *evaluations_of(metric, here)]:
            if name in here:
                panel.curves.append(_curve(axis.log.metric(name), axis, view, run_colour, is_companion=name != metric))
        if metric in here:
            panel.marks += _marks(axis, axis.log.metric(metric), run_colour)
        if metric in here and len(runs) == 1:
            tails = [tail.series(metric) for tail in axis.log.tails()]
            panel.lost += [(axis.of(each), _seen(each, view)) for each in tails if len(each)]
    return panel


def _curve(series: Series, axis: Axis, view: View, run_colour: str, *, is_companion: bool) -> Curve:
    values = _seen(series, view)
    window = automatic_window(len(values)) if view.smooth is None else view.smooth
    dotted = is_of_evaluation(series.name) and len(values) <= MOST_DOTS
    as_logged = window == 1 or dotted or is_setting(series.name)
    smoothed = None if as_logged else trailing_mean(values, window)
    x = _drawn(axis.of(series))
    placed = np.isfinite(x)
    return Curve(
        run=axis.log.name,
        metric=series.name,
        colour=run_colour,
        x=x[placed],
        values=values[placed],
        smoothed=None if smoothed is None else smoothed[placed],
        window=1 if smoothed is None else window,
        dotted=dotted,
        is_companion=is_companion,
    )


def _marks(axis: Axis, series: Series, run_colour: str) -> list[Mark]:
    restarts = axis.log.restarts()
    if not restarts or not len(series):
        return []
    x = axis.of(series)
    known = np.isfinite(x)
    places = np.interp([restart.step for restart in restarts], series.steps[known], x[known]).tolist()
    return [Mark(place, restart.leg is None, run_colour) for restart, place in zip(restarts, places, strict=True)]


def _seen(series: Series, view: View) -> Floats:
    """The values to draw."""
    values = series.values
    if view.perplexity and _is_loss(series.name):
        with np.errstate(over="ignore"):
            values = np.exp(values)
    return _drawn(values)


def _drawn(values: Floats) -> Floats:
    """Of a size that an axis can show: an axis needs room around its ends, and a scale between them."""
    far, near = np.abs(values) > HUGE, np.abs(values) < 1 / HUGE
    return np.where(far, np.copysign(np.inf, values), np.where(near, 0.0, values))


def _title(logs: Sequence[Log]) -> str:
    names = [log.name for log in logs]
    joined = " and ".join(names)
    return joined if len(names) == 1 or (len(names) == 2 and len(joined) <= MOST_TITLE) else f"{len(names)} runs"


def _losses(logs: Sequence[Log]) -> list[str]:
    """Name of each log's loss; if no log has one, the first metric of any."""
    losses = [log.loss for log in logs]
    usual = next((loss for loss in losses if loss), None)
    usual = usual or next((name for log in logs for name in log.metrics()), None)
    if usual is None:
        raise NotFound(f"nothing to draw: no metric in {', '.join(log.name for log in logs) or 'no log'}")
    return [loss or usual for loss in losses]


def _is_loss(name: str) -> bool:
    return name.endswith("loss")


def _tokens(log: Log) -> Series:
    names = log.metrics()
    for name in TOKENS:
        if name in names:
            series = log.metric(name)
            if len(series) and np.all(np.diff(series.values) >= 0):
                return series
    raise _no_axis(log, "tokens", f" (looked for {', '.join(TOKENS)})")


def _read_at_once(log: Log, metrics: Sequence[str]) -> None:
    """Read a log once for all metrics."""
    here = log.metrics()
    wanted = [name for metric in metrics for name in (metric, *evaluations_of(metric, here)) if name in here]
    log.series(dict.fromkeys([*wanted, *clock_of(log), *(name for name in TOKENS if name in here)]))


def clock_of(log: Log) -> list[str]:
    """Name of the metric whose records give the start and end of the run; empty without metrics."""
    return [log.loss] if log.loss else log.metrics()[:1]


def _times(log: Log) -> Floats:
    """UTC seconds of the log's records; empty if it has none."""
    times = [series.times for series in map(log.metric, clock_of(log)) if series.times is not None]
    return times[0][np.isfinite(times[0])] if times else np.empty(0)


def _no_axis(log: Log, x: str, hint: str = "") -> ConfigurationError:
    return ConfigurationError(f"x is {x!r}, and {log.name} does not log it{hint}; choose another x")
