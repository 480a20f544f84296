"""Draw a curve of ten million points, every spike of it. The peer is matplotlib with all points."""

from __future__ import annotations

import io
import statistics
import time

import numpy as np

from dalsegno.analysis import Series
from dalsegno.analysis.plotting.curves import Curve, Panel
from dalsegno.analysis.plotting.downsample import downsample
from dalsegno.analysis.plotting.figure import draw
from dalsegno.analysis.plotting.view import View
from dalsegno.analysis.stats.smooth import automatic_window, smooth

from .row import Row, duration

POINTS = 10_000_000
REPEATS = 5
LIMIT = 5.0


def run() -> list[Row]:
    """Medians of five; the peer once, it takes long enough."""
    series = _series()
    ours = statistics.median(_seconds(series, POINTS) for _ in range(REPEATS))
    peer = _all_points(series)
    return [
        Row(
            f"a plot of {POINTS // 10**6} M points, smoothed, as PNG",
            duration(ours),
            f"matplotlib, every point: {duration(peer)}",
            f"{ours / peer:.2f} ×",
            f"≤ {duration(LIMIT)}, no spike lost",
            ours <= LIMIT and _keeps_spikes(series),
        )
    ]


def _series() -> Series:
    steps = np.arange(1, POINTS + 1)
    values = 2 + 6 * np.exp(-steps / 1e6) + np.random.default_rng(0).normal(scale=0.1, size=POINTS)
    values[:: POINTS // 7] += 5
    return Series("loss", "a run", steps, values)


def _seconds(series: Series, points: int) -> float:
    began = time.perf_counter()
    smoothed = smooth(series.values, automatic_window(points))
    curve = Curve("a run", "loss", "#0072B2", series.steps.astype(np.float64), series.values, smoothed, dotted=False)
    draw([[Panel("loss", "a run", "step", "loss", [curve])]], View())._repr_png_()
    return time.perf_counter() - began


def _all_points(series: Series) -> float:
    from matplotlib.figure import Figure

    began = time.perf_counter()
    figure = Figure(figsize=(9, 4.8), dpi=144)
    figure.subplots().plot(series.steps, series.values, linewidth=0.7)
    figure.savefig(io.BytesIO(), format="png")
    return time.perf_counter() - began


def _keeps_spikes(series: Series) -> bool:
    kept = set(downsample(series.values, 1200).tolist())
    return set(range(0, POINTS, POINTS // 7)) <= kept
