"""Draw a curve of ten million points, every spike of it. The peer is matplotlib with all points."""

from __future__ import annotations

import io
import time

import numpy as np

from dalsegno.analysis import Series
from dalsegno.analysis.plotting import View
from dalsegno.analysis.plotting.curves import Curve, Panel
from dalsegno.analysis.plotting.figure import draw
from dalsegno.analysis.plotting.pixels import downsample
from dalsegno.analysis.series import automatic_window, smooth

from .row import Row, count, duration
from .timing import figure

POINTS = 10_000_000
REPEATS = 5
LIMIT = 5.0

SMALL = {"points": 70_000, "repeats": 1}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


def run(points: int = POINTS, repeats: int = REPEATS) -> list[Row]:
    """Medians of the repeats; the peer once, it takes long enough."""
    series = _series(points)
    ours = figure([_seconds(series) for _ in range(repeats)])
    peer = _all_points(series)
    return [
        Row(
            f"a plot of {count(points)} points, smoothed, as PNG",
            duration(ours),
            f"matplotlib, every point: {duration(peer)}",
            f"{ours / peer:.2f} ×",
            f"≤ {duration(LIMIT)}, no spike lost",
            ours <= LIMIT and _keeps_spikes(series),
            ours.spread,
        )
    ]


def _series(points: int) -> Series:
    steps = np.arange(1, points + 1)
    values = 2 + 6 * np.exp(-steps / 1e6) + np.random.default_rng(0).normal(scale=0.1, size=points)
    values[:: points // 7] += 5
    return Series("loss", "a run", steps, values)


def _seconds(series: Series) -> float:
    began = time.perf_counter()
    window = automatic_window(len(series.values))
    curve = Curve(
        run="a run",
        metric="loss",
        colour="#0072B2",
        x=series.steps.astype(np.float64),
        values=series.values,
        smoothed=smooth(series.values, window),
        window=window,
        dotted=False,
        is_companion=False,
    )
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
    return set(range(0, len(series.values), len(series.values) // 7)) <= kept
