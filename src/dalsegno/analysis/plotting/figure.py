"""Panels and heatmaps as matplotlib figures."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogFormatter
from numpy.typing import NDArray

from dalsegno.analysis.series import ParameterSeries
from dalsegno.errors import ConfigurationError

from . import View
from .curves import LOST, RUNS, Curve, Panel, value_range
from .pixels import downsample, lone

FORMATS = ("png", "svg", "pdf")
DPI = 144
BUCKETS = 1200  # stretches of a downsampled curve: about its width in pixels
INK = "#333333"
ABREAST = 4  # most panels in a line; further ones go below
WIDTH = 9.0  # width of a picture of one panel, in inches
MOST_INSIDE, LONGEST_INSIDE = 9, 44
"""Most entries of a legend inside the axes, and most characters of one; larger legends go below the picture."""
LONGEST = 90  # most characters of a run's name in a legend; longer names lose their middle

_LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)))
"""Line styles: one for each time that the palette repeats."""
_STYLES: dict[bool, Any] = {False: (0, (5, 3)), True: (0, (1, 2))}  # line styles of restarts and rollbacks
_SHAPES = {False: "^", True: "<"}  # markers of restarts and rollbacks


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure that can be saved and displays itself in a notebook."""

    figure: Figure

    def save(self, path: str | Path) -> Path:
        """Write ``path``, in the format of its suffix: ``.png``, ``.svg`` or ``.pdf``; returns the path.

        Raises ConfigurationError for another suffix.
        """
        path = Path(path)
        if path.suffix[1:].lower() not in FORMATS:
            raise ConfigurationError(f"{path}: must end in {', '.join(f'.{each}' for each in FORMATS)}")
        undated = {"CreationDate": None} if path.suffix.lower() == ".pdf" else {"Date": None}
        self.figure.savefig(path, dpi=DPI, metadata=None if path.suffix.lower() == ".png" else undated)
        return path

    def titled(self, title: str | None) -> Picture:
        """Write a title above everything; None: leave it as it is. Returns the picture."""
        if title is not None:
            self.figure.suptitle(title, fontsize=12, fontweight="bold", color=INK)
        return self

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.figure.savefig(data, format="png", dpi=DPI)
        return data.getvalue()


def draw(rows: Sequence[Sequence[Panel]], view: View) -> Picture:
    """Draw rows of panels. Panels of a row share the y axis, those of a column the x axis."""
    # Rows that are too long are broken: the first panels of each row, then the next ones of each.
    begins = range(0, max(map(len, rows)), ABREAST)
    lines = [(row, row[begin : begin + ABREAST]) for begin in begins for row in rows]
    columns = max(len(panels) for _, panels in lines)
    width = WIDTH if columns == 1 else 4.6 * columns
    legends = {id(panel): _legend(panel) for row in rows for panel in row}
    labels = {str(handle.get_label()): handle for handles in legends.values() for handle in handles}
    outside: list[Line2D] = []
    if any(len(each) > MOST_INSIDE for each in legends.values()) or any(len(each) > LONGEST_INSIDE for each in labels):
        legends, outside = {}, list(labels.values())
    longest = max((len(str(handle.get_label())) for handle in outside), default=0)
    abreast = max(1, int(width / (0.075 * longest + 0.55)))
    height = (4.8 if len(lines) == 1 else 3.2 * len(lines)) + 0.19 * math.ceil(len(outside) / abreast)
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(len(lines), columns, sharex="col", sharey="row", squeeze=False)
    for (row, panels), places in zip(lines, grid, strict=True):
        for panel, axes in zip(panels, places, strict=False):
            _draw_panel(axes, panel, view, legends.get(id(panel), []), titled=row is rows[0])
            axes.label_outer()
            if row is rows[-1] and len(lines) > len(rows):
                axes.tick_params(labelbottom=True)
                axes.set_xlabel(panel.x_label, color=INK)
        for axes in places[len(panels) :]:
            axes.set_axis_off()
        _scale_values(list(places), panels, row, view)
    if outside:
        figure.legend(handles=outside, fontsize=8.5, frameon=False, loc="outside lower left", ncols=abreast)
    return Picture(figure)


def _draw_panel(axes: Axes, panel: Panel, view: View, legend: Sequence[Line2D], *, titled: bool) -> None:
    for x, values in panel.lost:
        kept = downsample(values, BUCKETS)
        axes.plot(x[kept], values[kept], color=LOST, linewidth=5, alpha=0.45, solid_capstyle="butt", zorder=1)
    runs = panel.runs
    for curve in panel.curves:
        number = runs.index(curve.run)
        _draw_curve(axes, curve, _line_of(number), wider=len(runs) - 1 - number if len(runs) <= 3 else 0)
    _draw_marks(axes, panel)
    _draw_broken(axes, panel.curves)
    if titled:
        title = shortened(panel.title, round(axes.bbox.width / axes.figure.dpi * 11))
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_xlabel(panel.x_label, color=INK)
    axes.set_ylabel(panel.y_label, color=INK)
    axes.xaxis.set_major_formatter(EngFormatter(sep="") if view.x == "tokens" else FuncFormatter(plain))
    axes.grid(alpha=0.2, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(which="both", color="#999999", labelcolor=INK, labelsize=9)
    axes.margins(x=0.01)
    if view.xlim is not None:
        axes.set_xlim(*view.xlim)
    if len(legend) > 1:
        axes.legend(handles=legend, fontsize=8.5, framealpha=0.85, edgecolor="none", loc="best")


def plain(value: float, _: int | None) -> str:
    """Tick label: ``25,000``, ``0.5``."""
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def shortened(text: str, most: int) -> str:
    """``text`` without its middle if it has more than ``most`` characters."""
    half = max(1, (most - 1) // 2)
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def _line_of(number: int) -> Any:
    """Line style of a run, by its number in the panel."""
    return _LINES[number // len(RUNS) % len(_LINES)]


def _draw_curve(axes: Axes, curve: Curve, style: Any, wider: float) -> None:
    """``wider``: additional line width in points, so that a run shows below an identical one."""
    kept = downsample(curve.values, BUCKETS)
    x, values = curve.x[kept], curve.values[kept]
    if curve.dotted:
        axes.plot(x, values, "-", color=curve.colour, linewidth=0.7, alpha=0.5, zorder=3)
        (dots,) = axes.plot(x, values, "o", color=curve.colour, markersize=6 + wider, zorder=4)
        dots.set_markeredgecolor("white")
        dots.set_markeredgewidth(0.7)
    elif curve.smoothed is None:
        axes.plot(x, values, color=curve.colour, linestyle=style, linewidth=1.5 + wider, zorder=2)
    else:
        axes.plot(x, values, color=curve.colour, linewidth=0.7, alpha=0.28, zorder=2)
        kept = downsample(curve.smoothed, BUCKETS)
        x, values = curve.x[kept], curve.smoothed[kept]
        axes.plot(x, values, color=curve.colour, linestyle=style, linewidth=1.9 + wider, zorder=3)
    if not curve.dotted and (alone := lone(curve.values)).any():
        axes.plot(curve.x[alone], curve.values[alone], ".", color=curve.colour, markersize=6 + wider, zorder=3)


def _draw_marks(axes: Axes, panel: Panel) -> None:
    """Vertical lines in a panel of one run; otherwise markers in the run's colour above the x axis."""
    for mark in panel.marks:
        if len(panel.runs) == 1:
            axes.axvline(mark.x, color=INK, linewidth=0.9, alpha=0.6, linestyle=_STYLES[mark.rollback], zorder=0)
        else:
            above = axes.get_xaxis_transform()
            axes.plot([mark.x], [0.02], _SHAPES[mark.rollback], color=mark.colour, transform=above, zorder=5)


def _draw_broken(axes: Axes, curves: Sequence[Curve]) -> None:
    """Crosses along the upper edge for non-finite values; crosses that would touch are merged."""
    for curve in curves:
        x = curve.x[~np.isfinite(curve.values)]
        if len(x):
            space = float(np.ptp(curve.x)) / 80 or 1.0
            _, apart = np.unique(np.floor(x / space), return_index=True)
            top = axes.get_xaxis_transform()
            axes.plot(x[apart], np.full(len(apart), 0.98), "x", color=curve.colour, transform=top, zorder=5)


def _legend(panel: Panel) -> list[Line2D]:
    """Legend entries of the runs, then of the elements they share."""
    curves, runs = panel.curves, panel.runs
    alone = len(runs) == 1
    entry = partial(Line2D, [], [])
    handles = []
    for number, run in enumerate(runs):
        own = [curve for curve in curves if curve.run == run]
        label = panel.metric if alone else shortened(run, LONGEST)
        if not all(curve.dotted for curve in own):
            handles.append(entry(color=own[0].colour, linestyle=_line_of(number), linewidth=1.9, label=label))
        elif not alone:
            handles.append(entry(color=own[0].colour, linestyle="", marker="o", label=label))
    if dots := [curve for curve in curves if curve.dotted]:
        names = ", ".join(dict.fromkeys(curve.metric for curve in dots))
        handles.append(entry(color=dots[0].colour if alone else INK, linestyle="", marker="o", label=names))
    if windows := sorted({curve.window for curve in curves if curve.smoothed is not None}):
        mean = f"mean of {' to '.join(f'{window:,}' for window in dict.fromkeys([windows[0], windows[-1]]))}"
        handles.append(entry(color=INK, linewidth=0.8, alpha=0.45, label=f"as logged (strong: {mean})"))
    if panel.lost:
        handles.append(entry(color=LOST, linewidth=5, alpha=0.45, label="lost, then repeated"))
    for rollback in sorted({mark.rollback for mark in panel.marks}):
        line, shape = (_STYLES[rollback], None) if alone else ("", _SHAPES[rollback])
        name = "rollback" if rollback else "restart"
        handles.append(entry(color=INK, linestyle=line, linewidth=0.9, marker=shape, alpha=0.6, label=name))
    if any(not np.isfinite(curve.values).all() for curve in curves):
        handles.append(entry(color=INK, linestyle="", marker="x", label="not finite"))
    return handles


def _scale_values(places: list[Axes], panels: Sequence[Panel], row: Sequence[Panel], view: View) -> None:
    """Set the y axis of ``panels``, which is that of their ``row``; annotate each with the number of values outside."""
    curves = [curve for panel in row for curve in panel.curves]
    span = value_range(curves, view) or ((1.0, 10.0) if view.log else None)
    if span is not None:
        places[0].set_ylim(*_with_air(*span, log=view.log))
    if view.log:
        places[0].set_yscale("log")
        places[0].yaxis.set_major_formatter(LogFormatter())
        places[0].yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.6)))
    if view.ylim is not None:
        places[0].set_ylim(*view.ylim)
    low, high = places[0].get_ylim()
    for axes, panel in zip(places, panels, strict=False):
        left, right = axes.get_xlim()
        here = [curve.values[(curve.x >= left) & (curve.x <= right)] for curve in panel.curves]
        values = np.concatenate([np.empty(0), *(each[np.isfinite(each)] for each in here)])
        outside = [(int((values > high).sum()), "above"), (int((values < low).sum()), "below")]
        hidden = ", ".join(f"{count:,} {where}" for count, where in outside if count)
        if hidden:
            axes.annotate(f"not shown: {hidden}", (1, 1), xycoords="axes fraction", ha="right", va="bottom", fontsize=8)


def _with_air(low: float, high: float, *, log: bool) -> tuple[float, float]:
    if log:
        ends = _with_air(math.log10(low), math.log10(high), log=False)
        return 10 ** ends[0], 10 ** ends[1]
    air = 0.04 * (high - low) or 0.04 * abs(high) or 0.04
    return low - air, high + air


ROW = 0.17  # height of a labelled parameter, in inches
MOST_NAMED = 90  # most labelled parameters; of more, every n-th is labelled


def heatmap_figure(
    series: ParameterSeries,
    title: str,
    limits: tuple[float | None, float | None],
    size: tuple[float, float] | None,
    log: bool,
) -> Picture:
    """Draw the ``series``, with at least one step and one parameter. Arguments are as for ``plot_heatmap``."""
    rows = len(series.parameters)
    figure = Figure(figsize=size or (9.5, 1.6 + ROW * min(max(rows, 6), MOST_NAMED)), layout="constrained")
    axes = figure.subplots()
    values = np.where(np.isfinite(series.values) & ((series.values > 0) | (not log)), series.values, np.nan).T
    known = values[np.isfinite(values)]
    low, high = (known.min(), known.max()) if len(known) else (0.1, 1.0)
    low, high = (found if given is None else given for given, found in zip(limits, (low, high), strict=True))
    edges = _borders(series.steps)
    if high <= low:
        high = low * 10 if log else low + 1
    scale = LogNorm(low, high) if log else Normalize(low, high)
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
    bar.set_label(f"{title} (log scale)" if log else title, color=INK)
    bar.outline.set_visible(False)
    if log:
        bar.ax.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.6)))
    bar.ax.tick_params(which="both", labelsize=8, labelcolor=INK)
    return Picture(figure)


def _borders(steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Borders of the columns, midway between the steps. Shape (n + 1,)."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middles = (steps[:-1] + steps[1:]) / 2
    return np.concatenate([[1.5 * steps[0] - 0.5 * steps[1]], middles, [1.5 * steps[-1] - 0.5 * steps[-2]]])
