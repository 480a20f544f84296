"""A heatmap as a matplotlib figure."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter
from numpy.typing import NDArray

from dalsegno.analysis.series import ParameterSeries

from .figure import INK, Picture, plain

ROW = 0.17
"""Height of a labelled parameter, in inches."""
MOST_NAMED = 90
"""Most labelled parameters; of more, every n-th is labelled."""


def heatmap_figure(
    series: ParameterSeries,
    title: str,
    limits: tuple[float | None, float | None],
    size: tuple[float, float] | None,
) -> Picture:
    """Draw the ``series`` of one run, with at least one step and one parameter.

    ``limits``: of the colour scale. ``size``: in inches. None for any of them: by the data.
    """
    rows = len(series.parameters)
    figure = Figure(figsize=size or (9.5, 1.6 + ROW * min(max(rows, 6), MOST_NAMED)), layout="constrained")
    axes = figure.subplots()
    values = np.where(np.isfinite(series.values) & (series.values > 0), series.values, np.nan).T
    known = values[np.isfinite(values)]
    low, high = (known.min(), known.max()) if len(known) else (0.1, 1.0)
    low, high = limits[0] or low, limits[1] or high
    edges = _borders(series.steps)
    scale = LogNorm(low, high if high > low else low * 10)
    mesh = axes.pcolormesh(edges, np.arange(rows + 1), values, norm=scale, cmap="viridis", rasterized=True)
    every = -(-rows // MOST_NAMED)
    axes.set_yticks(np.arange(0, rows, every) + 0.5, series.parameters[::every], fontsize=7.5)
    axes.set_ylim(rows, 0)
    axes.set_xlabel("step", color=INK)
    axes.xaxis.set_major_formatter(FuncFormatter(plain))
    axes.set_title(f"{series.run}: {title} of each parameter", loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="x", labelsize=9)
    axes.tick_params(length=0, labelcolor=INK)
    bar = figure.colorbar(mesh, ax=axes, pad=0.01, aspect=40, format=FuncFormatter(lambda value, _: f"{value:g}"))
    bar.set_label(f"{title} (log scale)", color=INK)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.6)))
    bar.ax.tick_params(which="both", labelsize=8, labelcolor=INK)
    return Picture(figure)


def _borders(steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Borders of the columns, midway between the steps. Shape (n + 1,)."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middles = (steps[:-1] + steps[1:]) / 2
    return np.concatenate([[1.5 * steps[0] - 0.5 * steps[1]], middles, [1.5 * steps[-1] - 0.5 * steps[-2]]])
