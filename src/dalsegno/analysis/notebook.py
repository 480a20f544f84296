"""Notebook display of logs: a small HTML table and an SVG curve of a few kilobytes, without plotting libraries."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from .plotting.curves import Log, colour
from .plotting.pixels import downsample, labelled, nice_ticks
from .series import HUGE, Series, automatic_window, trailing_mean

MOST_RUNS = 30  # most rows in a table of runs; further runs are only counted


def html_repr(log: Log) -> str:
    """HTML of one run: name, step, and loss with its curve."""
    loss = _loss(log)
    facts = [("run", log.name), *(_facts(loss) if loss else [("records", "none with a loss")])]
    if restarts := log.restarts():
        facts.append(("restarts", str(len(restarts))))
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(what)}</th><td>{escape(it)}</td></tr>" for what, it in facts
    )
    style = "display:flex;gap:1.5em;align-items:center;flex-wrap:wrap"
    return f"<div style='{style}'><table>{rows}</table>{svg_curve(loss) if loss else ''}</div>"


def cards(logs: Sequence[Log]) -> str:
    """HTML of several runs, one row each."""
    head = "".join(f"<th style='text-align:left'>{title}</th>" for title in ("run", "step", "loss", ""))
    rest = f"<p>and {len(logs) - MOST_RUNS} more</p>" if len(logs) > MOST_RUNS else ""
    return f"<table><tr>{head}</tr>{''.join(map(_row, logs[:MOST_RUNS]))}</table>{rest}"


def _row(log: Log) -> str:
    loss = _loss(log)
    cells = [log.name, f"{int(loss.steps[-1]):,}", f"{loss.values[-1]:.5g}"] if loss else [log.name, "", ""]
    curve = svg_curve(loss, width=160, height=36, labelled=False) if loss else ""
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}<td>{curve}</td></tr>"


def _loss(log: Log) -> Series | None:
    """None if the log has no value of a loss."""
    loss = log.metric(log.loss) if log.loss else None
    return loss if loss is not None and len(loss) else None


def _facts(loss: Series) -> list[tuple[str, str]]:
    facts = [("step", f"{int(loss.steps[-1]):,}"), (loss.name, f"{loss.values[-1]:.5g}")]
    finite = np.isfinite(loss.values)
    if finite.any():
        best = int(np.argmin(np.where(finite, loss.values, np.inf)))
        facts.append((f"best {loss.name}", f"{loss.values[best]:.5g} at step {int(loss.steps[best]):,}"))
    return facts


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
        lines.append(frame.line(trailing_mean(frame.values, window), "stroke-width='1.8'"))
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
