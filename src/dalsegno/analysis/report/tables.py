"""Tables of a report: the text of their cells. ``report.html`` has the markup."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dalsegno.analysis.comparison import compare_series
from dalsegno.analysis.divergence import DetectorSettings
from dalsegno.analysis.lineage import LegSummary
from dalsegno.analysis.log import TrainingLog
from dalsegno.analysis.replay import detect_divergence
from dalsegno.analysis.spikes import Spike, find_spikes
from dalsegno.analysis.summary import Summary
from dalsegno.state import ResumeProof

LEAST_RECORDS = 2  # least common records for a comparison
MOST_SPIKES = 20  # most spikes of one run and metric; the tallest are shown

Cell = str | tuple[str, str]
"""Text, or (text, CSS classes): ``number``, ``bad``, ``good``, ``long``."""


@dataclass(frozen=True, slots=True)
class Table:
    """Column titles, and rows of as many cells."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def summary_tables(summaries: Sequence[Summary]) -> list[Table]:
    head = ["run", "state", "steps", "loss", "best", "evaluation", "gradient norm", "learning rate"]
    more = ["run", "began (UTC)", "training", "lost", "restarts", "steps repeated", "speed", "peak memory"]
    return [Table(head, [*map(_results, summaries)]), Table(more, [*map(_times, summaries)])]


def _results(summary: Summary) -> list[Cell]:
    loss, gradient, rate = summary.loss, summary.grad_norm, summary.learning_rate
    return [
        summary.run,
        (summary.state, "bad" if summary.state in ("diverged", "died", "failed") else "good"),
        *_numbers(
            summary.step,
            loss.final if loss else None,
            _at_step(loss.best, loss.best_step) if loss else None,
            ", ".join(f"{each.name} {_number(each.final)}" for each in summary.evaluation[:2]),
            _at_step(gradient.worst, gradient.worst_step) if gradient else None,
            f"{_number(rate.first)} → {_number(rate.final)}" if rate else None,
        ),
    ]


def _times(summary: Summary) -> list[Cell]:
    return [
        summary.run,
        _moment(summary.began),
        *_numbers(
            _span(summary.training_seconds),
            _span(summary.lost_seconds),
            summary.restarts,
            summary.redone_steps,
            next((f"{_number(average)} {name}" for name, average in summary.throughput.items()), None),
            f"{summary.peak_mem / 2**30:.2f} GiB" if summary.peak_mem else None,
        ),
    ]


def lineage_tables(logs: Sequence[TrainingLog]) -> list[tuple[str, Table]]:
    """The legs of runs that were restarted, or ended for a recorded reason, by its name."""
    head = ["leg", "began (UTC)", "from", "resumed", "steps", "repeated", "ranks", "ended", "why"]
    found = [(log.name, log.lineage()) for log in logs]
    return [
        (name, Table(head, [_leg(each) for each in legs]))
        for name, legs in found
        if len(legs) > 1 or any(each.leg.why for each in legs)
    ]


def interventions_table(logs: Sequence[TrainingLog]) -> Table:
    """What was changed during the runs, by whom."""
    rows: list[list[Cell]] = [
        [log.name, *_numbers(each.step), _moment(each.time), (each.what, "long"), each.by]
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
            ends = _numbers(found.first, found.second, found.difference, found.noise)
            rows.append([other.name, metric, *_numbers(found.records), differs, parts, *ends])
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
        f"{name.replace('_', ' ')} {value:g}"
        for name in ("threshold", "relative_threshold", "baseline_smoothing")
        if (value := getattr(settings, name)) is not None
    ]
    always = f"smoothing {settings.smoothing:g}, patience {settings.patience}, warm-up {settings.warmup}"
    return ", ".join([*parts, always])


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
        *_numbers(summary.redone, str(leg.world_size)),
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
    recovered: Cell = "yes" if spike.recovered else ("no", "bad")
    return [run, metric, *_numbers(spike.step, spike.value, spike.usual, sigmas, spike.records), recovered]


def _numbers(*values: str | float | None) -> list[Cell]:
    return [(value if isinstance(value, str) else _number(value), "number") for value in values]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if isinstance(value, int) or 1e4 <= abs(value) < 1e7 else f"{value:.5g}"


def _at_step(value: float | None, step: int | None) -> str:
    return "" if step is None else f"{_number(value)} at {step:,}"


def _moment(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def _span(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
