"""How logs show themselves in a notebook: a small table and a curve. Needs nothing but the logs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from .plotting.curves import Log
from .plotting.svg import svg_curve
from .series import Series

MOST_RUNS = 30
"""Rows of a table of runs; of further ones only the number is told."""


def html_repr(log: Log) -> str:
    """HTML of one run: what it is, how far it is, and its loss."""
    loss = _loss(log)
    facts = [("run", log.name), *(_facts(loss) if loss else [("records", "none with a loss")])]
    if restarts := log.restarts():
        facts.append(("restarts", str(len(restarts))))
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(what)}</th><td>{escape(it)}</td></tr>" for what, it in facts
    )
    beside = "display:flex;gap:1.5em;align-items:center;flex-wrap:wrap"
    return f"<div style='{beside}'><table>{rows}</table>{svg_curve(loss) if loss else ''}</div>"


def cards(logs: Sequence[Log]) -> str:
    """HTML of several runs: a row each."""
    head = "".join(f"<th style='text-align:left'>{title}</th>" for title in ("run", "step", "loss", ""))
    rest = f"<p>and {len(logs) - MOST_RUNS} more</p>" if len(logs) > MOST_RUNS else ""
    return f"<table><tr>{head}</tr>{''.join(map(_row, logs[:MOST_RUNS]))}</table>{rest}"


def _row(log: Log) -> str:
    loss = _loss(log)
    cells = [log.name, f"{int(loss.steps[-1]):,}", f"{loss.values[-1]:.5g}"] if loss else [log.name, "", ""]
    curve = svg_curve(loss, width=160, height=36, labelled=False) if loss else ""
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}<td>{curve}</td></tr>"


def _loss(log: Log) -> Series | None:
    """None if there is none, or nothing logged of it."""
    loss = log.metric(log.loss) if log.loss else None
    return loss if loss is not None and len(loss) else None


def _facts(loss: Series) -> list[tuple[str, str]]:
    facts = [("step", f"{int(loss.steps[-1]):,}"), (loss.name, f"{loss.values[-1]:.5g}")]
    finite = np.isfinite(loss.values)
    if finite.any():
        best = int(np.argmin(np.where(finite, loss.values, np.inf)))
        facts.append((f"best {loss.name}", f"{loss.values[best]:.5g} at step {int(loss.steps[best]):,}"))
    return facts
