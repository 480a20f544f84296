"""Notebook display of logs: a small HTML table and an SVG curve, without plotting libraries."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from .plotting.curves import Log
from .plotting.svg import svg_curve
from .series import Series

MOST_RUNS = 30
"""Most rows in a table of runs; further runs are only counted."""


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
    """None if the log has no loss, or no value of it."""
    loss = log.metric(log.loss) if log.loss else None
    return loss if loss is not None and len(loss) else None


def _facts(loss: Series) -> list[tuple[str, str]]:
    facts = [("step", f"{int(loss.steps[-1]):,}"), (loss.name, f"{loss.values[-1]:.5g}")]
    finite = np.isfinite(loss.values)
    if finite.any():
        best = int(np.argmin(np.where(finite, loss.values, np.inf)))
        facts.append((f"best {loss.name}", f"{loss.values[best]:.5g} at step {int(loss.steps[best]):,}"))
    return facts
