"""The demo's plot: the losses of both runs, records lost by killed legs, and the legs below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.logs import read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class LegSpan:
    """The steps of one leg."""

    first: int
    last: int
    killed: str | None
    """When it was killed, in words; None if it reached the end."""


# From the palette of Okabe and Ito (2008), distinct for every kind of colour vision.
REFERENCE, LOST, KILL = "#56B4E9", "#E69F00", "#D55E00"
RESUMED = "#000000"


def draw(target: Path, reference: Path, killed: Path, legs: Sequence[LegSpan]) -> Path:
    """Plot the losses (nats per byte) of two runs over their steps into a PNG; returns ``target``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.8), dpi=120, layout="constrained")
    figure.suptitle("A run killed twice, drawn over an uninterrupted one", fontsize=13)
    losses, spans = figure.subplots(2, 1, sharex=True, height_ratios=[7, 2])
    _draw_losses(losses, reference / "logs", killed / "logs")
    _draw_legs(spans, legs)
    _mark_kills(losses, spans, legs)
    losses.legend(loc="upper right", facecolor="white", framealpha=1, edgecolor="none")
    figure.savefig(target)
    return target


def _draw_losses(axes: Axes, reference: Path, killed: Path) -> None:
    for number, tail in enumerate(sorted(killed.glob("rewound/train.jsonl.*"))):
        label = None if number else "logged by a killed leg after its last checkpoint, repeated by the next"
        axes.plot(*_points(tail, "loss"), color=LOST, linewidth=9, alpha=0.5, solid_capstyle="butt", label=label)
    ours, theirs = reference / "train.jsonl", killed / "train.jsonl"
    axes.plot(*_points(ours, "loss"), color=REFERENCE, linewidth=4, label="never killed")
    axes.plot(*_points(theirs, "loss"), color=RESUMED, linewidth=1.1, label="killed and resumed")
    axes.plot(*_points(ours, "eval_loss"), "o", color=REFERENCE, markersize=9, label="never killed, validation loss")
    axes.plot(
        *_points(theirs, "eval_loss"), "o", color=RESUMED, markersize=3.5, label="killed and resumed, validation loss"
    )
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _points(log: Path, metric: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric in a log or a log tail."""
    records: list[dict[str, Any]] = [record for record in read_records(log) if metric in record]
    return [record["global_step"] for record in records], [record[metric] for record in records]


def _draw_legs(axes: Axes, legs: Sequence[LegSpan]) -> None:
    for row, leg in enumerate(legs):
        axes.plot([leg.first, leg.last], [row, row], color=RESUMED, linewidth=3, solid_capstyle="butt")
    for row, (leg, following) in enumerate(pairwise(legs)):
        axes.annotate(
            "",
            xy=(following.first, row + 1),
            xytext=(leg.last, row),
            arrowprops={"arrowstyle": "->", "color": KILL, "linewidth": 1.1},
        )
    axes.set_yticks(range(len(legs)), [f"leg {number}" for number, _ in enumerate(legs, start=1)])
    axes.set_ylim(len(legs) - 0.5, -0.5)
    axes.set_xlabel("optimizer steps")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _mark_kills(losses: Axes, spans: Axes, legs: Sequence[LegSpan]) -> None:
    end = legs[-1].last
    for row, leg in enumerate(legs):
        if leg.killed is None:
            continue
        for axes in (losses, spans):
            axes.axvline(leg.last, color=KILL, linewidth=1.1, linestyle=(0, (5, 2)), zorder=0)
        if leg.last < 0.7 * end:
            x, offset, align = leg.last, (6, 0), ("left", "center")
        elif leg.first > 0.3 * end:
            x, offset, align = leg.first, (-6, 0), ("right", "center")
        else:
            x, offset, align = leg.last, (-4, 4), ("right", "bottom")
        spans.annotate(
            f"SIGKILL {leg.killed}",
            xy=(x, row),
            xytext=offset,
            textcoords="offset points",
            ha=align[0],
            va=align[1],
            color=KILL,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
