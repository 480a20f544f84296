"""Notebook display of logs: a small HTML table and an SVG curve of a few kilobytes, without plotting libraries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


MARGINS = 48, 8, 8, 20  # left, right, top and bottom, for the labels, in pixels


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps numbers from ``low`` to ``high`` to pixels from ``begin`` to ``end``."""

    low: float
    high: float
    begin: int
    end: int

    def __call__(self, number: float) -> float:
        return self.begin + (number - self.low) / ((self.high - self.low) or 1) * (self.end - self.begin)


def svg_curve(series: Series, *, width: int = 460, height: int = 150, labelled: bool = True) -> str:
    """A series as an SVG element: the smoothed line over a faint one of the logged values; empty without finite values.

    Text takes the colour of the surrounding page, so that it is readable in light and dark mode.
    """
    finite = np.abs(series.values) <= HUGE
    if not finite.any():
        return ""
    steps, values = series.steps[finite], series.values[finite]
    left, right, top, bottom = MARGINS if labelled else (2, 2, 2, 2)
    x = _Scale(float(steps.min()), float(steps.max()), left, width - right)
    y = _Scale(float(values.min()), float(values.max()), height - bottom, top)

    def line(values: NDArray[np.float64], style: str) -> str:
        kept = downsample(values, width)
        places = zip(steps[kept].tolist(), values[kept].tolist(), strict=True)
        points = [f"{x(step):.1f},{y(value):.1f}" for step, value in places]
        points *= 2 if len(points) == 1 else 1  # a line from a point to itself draws a dot
        return f"<polyline points='{' '.join(points)}' fill='none' stroke='{colour(0)}' {style}/>"

    window = automatic_window(len(values))
    raw = "stroke-width='1' opacity='.3'" if window > 1 else "stroke-width='1.5'"
    raw = raw if len(values) > 1 else "stroke-width='5' stroke-linecap='round'"
    lines = [_labels(x, y, height)] if labelled else []
    lines.append(line(values, raw))
    if window > 1:
        lines.append(line(trailing_mean(values, window), "stroke-width='1.8'"))
    return (
        f"<svg width='{width}' height='{height}' viewBox='0 0 {width} {height}' role='img' "
        f"aria-label='{escape(series.name, quote=True)} by step' style='font:10px sans-serif' fill='currentColor'>"
        f"{''.join(lines)}</svg>"
    )


def _labels(x: _Scale, y: _Scale, height: int) -> str:
    rows = [
        f"<line x1='{x.begin}' x2='{x.end}' y1='{y(tick):.1f}' y2='{y(tick):.1f}' stroke='currentColor' opacity='.15'/>"
        f"<text x='{x.begin - 5}' y='{y(tick) + 3:.1f}' text-anchor='end'>{label}</text>"
        for tick, label in labelled(nice_ticks(y.low, y.high, 4))
    ]
    columns = [
        f"<text x='{x(tick):.1f}' y='{height - 5}' text-anchor='middle'>{label}</text>"
        for tick, label in labelled(nice_ticks(x.low, x.high, 5))
        if x(tick) < x.end - 12
    ]
    return "".join([*rows, *columns])
