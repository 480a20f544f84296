"""Panels as text for a terminal, in braille dots and the colours of the pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotille
from numpy.typing import NDArray

from . import Limits, View
from .curves import Curve, Panel, value_range
from .pixels import downsample, labelled, log_ticks, lone, nice_ticks

Floats = NDArray[np.float64]
Colour = tuple[int, int, int] | None

ROWS = 18  # height of a panel in lines
LEAST_WIDTH = 40
FAINT = (120, 120, 120)
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # markers of the runs where there are no colours


@dataclass(frozen=True, slots=True)
class _Scale:
    """Visible range; ``low`` and ``high`` are base-10 logarithms if ``log``."""

    left: float
    right: float
    low: float
    high: float
    log: bool

    def height(self, values: Floats) -> Floats:
        with np.errstate(invalid="ignore", divide="ignore"):
            heights = np.log10(np.where(values > 0, values, np.nan)) if self.log else values
        return np.clip(np.where(np.isfinite(heights), heights, np.nan), self.low, self.high)


def sketch(rows: Sequence[Sequence[Panel]], view: View, *, width: int, colours: bool) -> str:
    """All panels, one below the other, as text of ``width`` columns."""
    drawn = [_sketch_panel(panel, view, max(width, LEAST_WIDTH), colours) for panels in rows for panel in panels]
    return "\n\n".join(drawn)


def _sketch_panel(panel: Panel, view: View, width: int, colours: bool) -> str:
    heading = panel.y_label if panel.title == panel.y_label else f"{panel.title}: {panel.y_label}"
    scale = _scale(panel, view)
    if scale is None:
        return f"{heading}\nno values to draw"
    labels = _value_labels(scale)
    margin = max(map(len, labels.values()))
    canvas = plotille.Canvas(
        width - margin - 3, ROWS, scale.left, scale.low, scale.right, scale.high, mode="rgb" if colours else "names"
    )
    for mark in panel.marks:
        if scale.left <= mark.x <= scale.right:
            for height in np.linspace(scale.low, scale.high, 2 * ROWS):
                canvas.point(mark.x, float(height), color=FAINT if colours else None)
    if colours:
        for curve in panel.curves:
            if curve.smoothed is not None:
                _line(canvas, scale, curve.x, curve.values, FAINT, width)
    letters = len(panel.runs) > 1 and not colours
    for curve in panel.curves:
        if letters and curve.is_companion:
            continue  # a run's letter cannot show both training and evaluation
        _draw_curve(canvas, scale, curve, panel.runs, width, colours)
    lines = canvas.plot("\n").split("\n")
    rows = {ROWS - 1 - _row(scale, value): label for value, label in labels.items()}
    edges = [f"{rows.get(number, ''):>{margin}} {'┤' if number in rows else '│'}" for number in range(ROWS)]
    body = map("".join, zip(edges, lines, strict=True))
    return "\n".join([heading, *body, *_x_axis(scale, margin, width, panel.x_label), *_legend(panel, colours)])


def _draw_curve(
    canvas: plotille.Canvas, scale: _Scale, curve: Curve, runs: list[str], width: int, colours: bool
) -> None:
    values = curve.values if curve.smoothed is None else curve.smoothed
    colour = _rgb(curve.colour) if colours else None
    if len(runs) > 1 and not colours:
        letter = LETTERS[runs.index(curve.run) % len(LETTERS)]
        at = np.linspace(scale.left, scale.right, width // 2)
        known = np.isfinite(values)
        if known.any():
            heights = scale.height(np.interp(at, curve.x[known], values[known], left=np.nan, right=np.nan))
            for x, height in zip(at.tolist(), heights.tolist(), strict=True):
                if math.isfinite(height):
                    canvas.point(x, height, marker=letter)
    else:
        if not curve.dotted:
            _line(canvas, scale, curve.x, values, colour, width)
        shown, marker = (np.isfinite(values), "o") if curve.dotted else (lone(values), "•")
        for x, height in zip(curve.x[shown].tolist(), scale.height(values[shown]).tolist(), strict=True):
            if math.isfinite(height) and scale.left <= x <= scale.right:
                canvas.point(x, height, color=colour, marker=marker)
    for x in curve.x[~np.isfinite(curve.values)][:: max(1, len(curve.x) // width)].tolist():
        if scale.left <= x <= scale.right:
            canvas.point(x, scale.high - 0.01 * (scale.high - scale.low), color=colour, marker="×")


def _line(canvas: plotille.Canvas, scale: _Scale, x: Floats, values: Floats, colour: Colour, width: int) -> None:
    kept = downsample(values, 2 * width)  # a braille character is two dots wide
    places, heights = x[kept].tolist(), scale.height(values[kept]).tolist()
    for left, right, from_height, to_height in zip(places, places[1:], heights, heights[1:], strict=False):
        seen = scale.left <= left and right <= scale.right
        if seen and math.isfinite(from_height) and math.isfinite(to_height):
            canvas.line(left, from_height, right, to_height, color=colour)


def _scale(panel: Panel, view: View) -> _Scale | None:
    span = value_range(panel.curves, view)
    x = np.concatenate([curve.x for curve in panel.curves] or [np.empty(0)])
    if span is None or not len(x):
        return None
    left, right = _limits((float(x.min()), float(x.max())), view.xlim)
    low, high = _limits(span, view.ylim)
    if view.log:
        low, high = (math.log10(max(end, np.finfo(np.float64).tiny)) for end in (low, high))
    air = 0.03 * (high - low) or 0.5 * abs(high) or 0.5
    side = 0.005 * (right - left) or 0.5
    return _Scale(left - side, right + side, low - air, high + air, view.log)


def _limits(found: tuple[float, float], wanted: Limits | None) -> tuple[float, float]:
    low, high = (there if given is None else given for there, given in zip(found, wanted or (None, None), strict=True))
    return low, max(low, high)


def _value_labels(scale: _Scale) -> dict[float, str]:
    if scale.log:
        return {math.log10(tick): f"{tick:g}" for tick in log_ticks(10**scale.low, 10**scale.high, 5)}
    return dict(labelled(nice_ticks(scale.low, scale.high, 5)))


def _row(scale: _Scale, height: float) -> int:
    """Line of a height, counted from the bottom."""
    return min(ROWS - 1, int((height - scale.low) / (scale.high - scale.low) * ROWS))


def _x_axis(scale: _Scale, margin: int, width: int, label: str) -> list[str]:
    inside = width - margin - 3
    ruler, texts = ["─"] * inside, [" "] * (inside + margin + 3)
    for tick, text in labelled(nice_ticks(scale.left, scale.right, max(2, inside // 14))):
        column = min(inside - 1, int((tick - scale.left) / (scale.right - scale.left) * inside))
        ruler[column] = "┬"
        begin = max(0, min(margin + 2 + column - len(text) // 2, len(texts) - len(text)))
        texts[begin : begin + len(text)] = text
    return [f"{'':>{margin}} └{''.join(ruler)}", "".join(texts).rstrip(), label.rjust(width - 1)]


def _legend(panel: Panel, colours: bool) -> list[str]:
    runs = panel.runs
    first = {curve.run: curve.colour for curve in panel.curves}
    entries = []
    for number, run in enumerate(runs):
        sign = "━━" if colours or len(runs) == 1 else LETTERS[number % len(LETTERS)]
        entries.append(f"{_painted(sign, first[run], colours)} {run if len(runs) > 1 else panel.metric}")
    dotted = dict.fromkeys(curve.metric for curve in panel.curves if curve.dotted)
    entries += [f"o {name}" for name in dotted if colours or len(runs) == 1]
    entries += [f"⡇ {'rollback' if kind else 'restart'}" for kind in sorted({mark.rollback for mark in panel.marks})]
    if any(not np.isfinite(curve.values).all() for curve in panel.curves):
        entries.append("× not finite")
    return ["  ".join(entries)]


def _painted(text: str, colour: str, colours: bool) -> str:
    return f"\x1b[38;2;{';'.join(map(str, _rgb(colour)))}m{text}\x1b[0m" if colours else text


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
