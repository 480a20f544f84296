"""A curve as an inline SVG element of a few kilobytes, without plotting libraries."""

from __future__ import annotations

from html import escape

import numpy as np
from numpy.typing import NDArray

from dalsegno.analysis.series import HUGE, Series
from dalsegno.analysis.stats.smooth import automatic_window, smooth

from .downsample import downsample
from .palette import colour
from .ticks import labelled, nice_ticks

Floats = NDArray[np.float64]

LEFT, RIGHT, TOP, BOTTOM = 48, 8, 8, 20
"""Margins for the labels, in pixels."""


def svg_curve(series: Series, *, width: int = 460, height: int = 150, labelled: bool = True) -> str:
    """A series as an SVG element: the smoothed line over a faint one of the logged values; empty without finite values.

    Text takes the colour of the surrounding page, so that it is readable in light and dark mode.
    """
    finite = np.abs(series.values) <= HUGE
    if not finite.any():
        return ""
    frame = _Frame(series.steps[finite].astype(np.float64), series.values[finite], width, height, labelled)
    window = automatic_window(len(frame.values))
    raw = "stroke-width='1' opacity='.3'" if window > 1 else "stroke-width='1.5'"
    raw = raw if len(frame.values) > 1 else "stroke-width='5' stroke-linecap='round'"
    lines = [frame.line(frame.values, raw)]
    if window > 1:
        lines.append(frame.line(smooth(frame.values, window), "stroke-width='1.8'"))
    return (
        f"<svg width='{width}' height='{height}' viewBox='0 0 {width} {height}' role='img' "
        f"aria-label='{escape(series.name, quote=True)} by step' style='font:10px sans-serif' fill='currentColor'>"
        f"{frame.labels() if labelled else ''}{''.join(lines)}</svg>"
    )


class _Frame:
    """Maps steps and values (finite, at least one) to pixels."""

    def __init__(self, steps: Floats, values: Floats, width: int, height: int, labelled: bool) -> None:
        self.values = values
        self._steps = steps
        self._width, self._height = width, height
        self._left, self._right, self._top, self._bottom = (LEFT, RIGHT, TOP, BOTTOM) if labelled else (2, 2, 2, 2)
        self._first, self._last = float(steps.min()), float(steps.max())
        self._low, self._high = float(values.min()), float(values.max())

    def line(self, values: Floats, style: str) -> str:
        kept = downsample(values, self._width)
        points = zip(self._steps[kept].tolist(), values[kept].tolist(), strict=True)
        path = " ".join(f"{self._x(step):.1f},{self._y(value):.1f}" for step, value in points)
        if len(kept) == 1:
            path = f"{path} {path}"  # a line from a point to itself draws a dot
        return f"<polyline points='{path}' fill='none' stroke='{colour(0)}' {style}/>"

    def labels(self) -> str:
        values = nice_ticks(self._low, self._high, 4)
        steps = nice_ticks(self._first, self._last, 5)
        right = self._width - self._right
        parts = [
            f"<line x1='{self._left}' x2='{right}' y1='{self._y(tick):.1f}' y2='{self._y(tick):.1f}' "
            f"stroke='currentColor' opacity='.15'/>"
            f"<text x='{self._left - 5}' y='{self._y(tick) + 3:.1f}' text-anchor='end'>{label}</text>"
            for tick, label in labelled(values)
        ]
        parts += [
            f"<text x='{self._x(tick):.1f}' y='{self._height - 5}' text-anchor='middle'>{label}</text>"
            for tick, label in labelled(steps)
            if self._x(tick) < right - 12
        ]
        return "".join(parts)

    def _x(self, step: float) -> float:
        part = (step - self._first) / ((self._last - self._first) or 1)
        return self._left + part * (self._width - self._left - self._right)

    def _y(self, value: float) -> float:
        part = (value - self._low) / ((self._high - self._low) or 1)
        return self._height - self._bottom - part * (self._height - self._top - self._bottom)
