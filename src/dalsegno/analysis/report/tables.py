"""Tables of a report: the text of their cells. ``report.html`` has the markup."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dalsegno.analysis.comparison import compare_series
from dalsegno.analysis.divergence import DetectorSettings, detect_divergence
from dalsegno.analysis.lineage import LegSummary
from dalsegno.analysis.log import TrainingLog
from dalsegno.analysis.spikes import Spike, find_spikes
from dalsegno.analysis.summary import MetricSummary, Summary
from dalsegno.state import ResumeProof

LEAST_RECORDS = 2
"""Least common records for a comparison."""
MOST_SPIKES = 20
"""Most spikes of one run and metric; the tallest are shown."""

Cell = str | tuple[str, str]
"""Text, or (text, CSS classes): ``number``, ``bad``, ``good``, ``long``."""


@dataclass(frozen=True, slots=True)
class Table:
    """Column titles, and rows of as many cells."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def summary_tables(summaries: Sequence[Summary]) -> list[Table]:
    head = ["run", "state", "steps", "loss", "best", "evaluation", "gradient norm", "learning rate"]
    rows: list[list[Cell]] = []
    for summary in summaries:
        state = "bad" if summary.state in ("diverged", "died", "failed") else "good"
        rows.append(
            [
                summary.run,
                (summary.state, state),
                (_number(summary.step), "number"),
                (_number(summary.loss.final if summary.loss else None), "number"),
                (_best(summary.loss), "number"),
                (", ".join(f"{each.name} {_number(each.final)}" for each in summary.evaluation[:2]), "number"),
                (_most(summary.grad_norm), "number"),
                (_change(summary.learning_rate), "number"),
            ]
        )
    times: list[list[Cell]] = []
    for summary in summaries:
        speed = next((f"{_number(average)} {name}" for name, average in summary.throughput.items()), "")
        times.append(
            [
                summary.run,
                _moment(summary.began),
                (_span(summary.training_seconds), "number"),
                (_span(summary.lost_seconds), "number"),
                (_number(summary.restarts), "number"),
                (_number(summary.redone_steps), "number"),
                (speed, "number"),
                (f"{summary.peak_mem / 2**30:.2f} GiB" if summary.peak_mem else "", "number"),
            ]
        )
    more = ["run", "began (UTC)", "training", "lost", "restarts", "steps repeated", "speed", "peak memory"]
    return [Table(head, rows), Table(more, times)]


def lineage_tables(logs: Sequence[TrainingLog]) -> list[tuple[str, Table]]:
    """The legs of runs that were restarted, or ended for a recorded reason, by its name."""
    head = ["leg", "began (UTC)", "from", "resumed", "steps", "repeated", "ranks", "ended", "why"]
    tables = []
    for log in logs:
        legs = log.lineage()
        if len(legs) > 1 or any(each.leg.why for each in legs):
            tables.append((log.name, Table(head, [_leg(each) for each in legs])))
    return tables


def interventions_table(logs: Sequence[TrainingLog]) -> Table:
    """What was changed during the runs, by whom."""
    rows: list[list[Cell]] = [
        [log.name, (f"{each.step:,}", "number"), _moment(each.time), (each.what, "long"), each.by]
        for log in logs
        for each in log.interventions()
    ]
    return Table(["run", "step", "when (UTC)", "what", "by"], rows)


def comparison_table(logs: Sequence[TrainingLog]) -> Table:
    """Each run compared with the first, by the losses of both."""
    first, rows = logs[0], []
    for other in logs[1:]:
        shared = [name for name in first.metrics() if name in other.metrics() and name.endswith("loss")]
        for metric in shared[:4]:
            found = compare_series(first.metric(metric), other.metric(metric))
            if found.records < LEAST_RECORDS:
                continue
            parts: Cell = ("nowhere", "good") if found.parts_at is None else (f"step {found.parts_at:,}", "bad")
            differs = "nowhere" if found.differs_at is None else f"step {found.differs_at:,}"
            ends = [(_number(value), "number") for value in (found.first, found.second, found.difference, found.noise)]
            rows.append([other.name, metric, (f"{found.records:,}", "number"), differs, parts, *ends])
    head = ["run", "metric", "compared", "differs at", "separates at", f"end of {first.name}", "end of this run"]
    return Table([*head, "difference", "noise"], rows)


def verdict_table(logs: Sequence[TrainingLog], settings: DetectorSettings) -> Table:
    """What the divergence detector finds in each run that has a loss."""
    rows: list[list[Cell]] = []
    for log in logs:
        if log.loss is None:
            continue
        found = detect_divergence(log.metric(log.loss), settings)
        fired = found.fired
        verdict: Cell = ("diverges", "bad") if fired else ("passes", "good") if found.judged else "unknown"
        where = f"step {fired.step:,}" if fired else ""
        rows.append([log.name, log.loss, verdict, where, (found.reason or "", "long")])
    return Table(["run", "metric", "verdict", "at", "reason"], rows)


def limits(settings: DetectorSettings) -> str:
    """The detector's settings, in words."""
    parts = [
        f"threshold {settings.threshold:g}" if settings.threshold is not None else "",
        f"relative threshold {settings.relative_threshold:g}" if settings.relative_threshold is not None else "",
        f"baseline smoothing {settings.baseline_smoothing:g}" if settings.baseline_smoothing is not None else "",
        f"smoothing {settings.smoothing:g}, patience {settings.patience}, warm-up {settings.warmup}",
    ]
    return ", ".join(filter(None, parts))


def spikes_table(logs: Sequence[TrainingLog]) -> Table:
    rows: list[list[Cell]] = []
    for log in logs:
        for metric in [name for name in (log.loss, "grad_norm") if name in log.metrics()]:
            found = find_spikes(log.metric(metric))
            tallest = sorted(found, key=lambda spike: -spike.sigmas)[:MOST_SPIKES]
            rows += [_spike(log.name, metric, spike) for spike in sorted(tallest, key=lambda spike: spike.step)]
    head = ["run", "metric", "step", "value", "median", "standard deviations", "records", "recovered"]
    return Table(head, rows)


def _leg(summary: LegSummary) -> list[Cell]:
    leg, reason = summary.leg, summary.reason or "running"
    return [
        str(leg.leg),
        _moment(leg.started),
        f"leg {summary.parent}, step {leg.first_step:,}" if summary.parent else "scratch",
        _resumed(leg.resumed),
        f"{leg.first_step:,} – {summary.last_step:,}",
        (_number(summary.redone), "number"),
        (str(leg.world_size), "number"),
        (reason, "bad" if reason in ("died", "exception") else ""),
        (", ".join(filter(None, (leg.by, leg.why, leg.cause))), "long"),
    ]


def _resumed(proof: ResumeProof | None) -> Cell:
    if proof is None:
        return ""
    if proof.verdict == "exact":
        return "exactly", "good"
    return proof.line, "bad long" if proof.verdict == "differs" else "long"


def _spike(run: str, metric: str, spike: Spike) -> list[Cell]:
    sigmas = "∞" if math.isinf(spike.sigmas) else f"{spike.sigmas:.0f}"
    back: Cell = "yes" if spike.recovered else ("no", "bad")
    numbers = [f"{spike.step:,}", _number(spike.value), _number(spike.usual), sigmas, f"{spike.records:,}"]
    return [run, metric, *((each, "number") for each in numbers), back]


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if isinstance(value, int) or 1e4 <= abs(value) < 1e7 else f"{value:.5g}"


def _best(metric: MetricSummary | None) -> str:
    known = metric is not None and metric.best_step is not None
    return f"{_number(metric.best)} at {metric.best_step:,}" if metric is not None and known else ""


def _most(metric: MetricSummary | None) -> str:
    known = metric is not None and metric.worst_step is not None
    return f"{_number(metric.worst)} at {metric.worst_step:,}" if metric is not None and known else ""


def _change(metric: MetricSummary | None) -> str:
    return f"{_number(metric.first)} → {_number(metric.final)}" if metric is not None else ""


def _moment(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def _span(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
