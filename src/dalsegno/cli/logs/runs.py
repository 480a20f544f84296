"""Commands that show whole runs: list, summary, lineage."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from dalsegno import analysis
from dalsegno.cli.command import JSON, argument, command, expect_directory_of, flag, option
from dalsegno.cli.console import (
    NOTHING,
    Column,
    moment,
    number,
    numbers,
    print_facts,
    print_json,
    print_rows,
    span,
    visible,
)
from dalsegno.errors import ConfigurationError, NotFound

from .arguments import FORCE, STEP_KEY, PerRunResults, expect_free, given_runs, run_paths
from .records import as_words

STYLES = {"running": "green", "diverged": "red", "failed": "red", "died": "yellow", "unreadable": "red"}


@command(
    argument(
        "folder",
        metavar="DIR",
        nargs="?",
        type=Path,
        default=Path(),
        help="directory of runs; default: the current directory",
    ),
    STEP_KEY,
    JSON,
    statuses={2: "error, or a run that cannot be read; the others are listed"},
)
def list_runs(arguments: argparse.Namespace) -> int:
    """List the runs in a directory: state, steps, losses, restarts, last change."""
    runs = analysis.open_log(arguments.folder, arguments.step_key)
    results = PerRunResults(runs, _list_row)
    row_of = {log.path: row for log, row in results.found}
    row_of |= {log.path: {**_name(log), "state": "unreadable", "error": error} for log, error in results.failed}
    rows = [row_of[log.path] for log in runs]
    columns = [
        Column("run", "run"),
        Column("state", "state", style=lambda state: STYLES.get(state, "")),
        *numbers(step="step", epoch="epoch", loss="loss", best_loss="best", eval_loss="eval", restarts="restarts"),
        Column("resumed", "resumed", style=lambda verdict: "red" if verdict == "differs" else ""),
        Column("changed", "last change", lambda seconds: moment(seconds)[: len("2026-01-31 12:00")], right=True),
    ]
    print_rows(columns, rows, as_json=arguments.json)
    return results.status()


def _list_row(log: analysis.TrainingLog) -> dict[str, Any]:
    summary = log.summary(brief=True)
    evaluation = next((metric for metric in summary.evaluation if "loss" in metric.name), None)
    return {
        **_name(log),
        "state": summary.state,
        "step": summary.step,
        "epoch": summary.epoch,
        "loss": summary.loss.final if summary.loss else None,
        "best_loss": summary.loss.best if summary.loss else None,
        "eval_loss": evaluation.final if evaluation else None,
        "restarts": summary.restarts,
        "resumed": summary.resumed,
        "changed": summary.changed or log.source.changed(),
    }


def _name(log: analysis.TrainingLog) -> dict[str, Any]:
    return {"run": log.name, "path": str(log.path)}


SHOWN_SPIKES = 5


@command(
    run_paths(optional=True),
    flag("--all", help="summarize all runs below the current directory"),
    argument(
        "--format",
        choices=("text", "json", "md", "one-line"),
        default="text",
        help="output format, md being a Markdown table; default: %(default)s",
    ),
    option("-o", "--output", metavar="FILE", help="file to write; default: standard output"),
    FORCE,
    JSON,
    statuses={2: "error, or a run that cannot be read; the others are summarized"},
)
def summary(arguments: argparse.Namespace) -> int:
    """Summarize runs: steps, losses, evaluation, gradients, throughput, time, restarts, spikes."""
    from dalsegno.system.filesystem import output_file

    if arguments.all and arguments.runs:
        raise ConfigurationError("--all and RUN both name runs; leave one of them out")
    path: Path | None = None if arguments.output is None else expect_free(arguments.output, arguments)
    if path is not None:
        expect_directory_of(path)
    logs = analysis.open_logs(["."], arguments.step_key) if arguments.all else given_runs(arguments)
    results = PerRunResults(logs, analysis.TrainingLog.summary)
    text = io.StringIO()
    with nullcontext() if path is None else redirect_stdout(text):
        _print_summaries(results.found, "json" if arguments.json else arguments.format)
    if path is not None:
        with output_file(path) as file:
            file.write(text.getvalue().encode())
        print(f"wrote {path}")
    return results.status()


def _print_summaries(summaries: Sequence[tuple[analysis.TrainingLog, analysis.Summary]], form: str) -> None:
    from dataclasses import asdict

    if form == "json":
        print_json([{**asdict(summary), "path": str(log.path)} for log, summary in summaries])
    elif form == "one-line":
        for _, summary in summaries:
            print(_one_line(summary))
    elif form == "md":
        print(_markdown([(summary, dict(_facts(summary, log))) for log, summary in summaries]))
    else:
        for number, (log, summary) in enumerate(summaries):
            if number:
                print()
            print_facts(summary.run, _facts(summary, log))


def _facts(summary: analysis.Summary, log: analysis.TrainingLog) -> list[tuple[str, str]]:
    """Name and text of what the log contains, most wanted first."""
    records = ", ".join(f"{count:,} {kind}" for kind, count in summary.records.items())
    rate = summary.learning_rate
    known: list[tuple[str, str | None]] = [
        ("state", _state(summary)),
        ("steps", number(summary.step)),
        ("epochs", None if summary.epoch is None else number(summary.epoch)),
        ("tokens", None if summary.tokens is None else f"{summary.tokens:,.0f}"),
        (summary.loss.name if summary.loss else "loss", _metric(summary.loss)),
        *((metric.name, _metric(metric)) for metric in summary.evaluation),
        ("gradient norm", _peak(summary.grad_norm)),
        ("learning rate", f"first {number(rate.first)}, last {number(rate.final)}" if rate else None),
        *((name, number(average)) for name, average in summary.throughput.items()),
        ("peak memory", None if summary.peak_mem is None else f"{summary.peak_mem / 2**30:.2f} GiB"),
        ("time", _time(summary)),
        ("last change", None if summary.changed is None else moment(summary.changed)),
        ("spikes", _spikes(summary)),
        ("records", f"{records or NOTHING} ({summary.program or 'no log yet'})"),
        ("skipped", f"{summary.skipped:,}: {log.skipped}" if summary.skipped else None),
        ("lost records", number(summary.lost_records) if summary.lost_records else None),
    ]
    return [(name, fact) for name, fact in known if fact is not None]


def _state(summary: analysis.Summary) -> str:
    breaks = _breaks(summary)
    repeated = [f"{summary.redone_steps:,} steps repeated"] if breaks else []
    resumed = [] if summary.resumed is None else [f"resumed: {summary.resumed}"]
    return ", ".join([summary.state, *breaks, *repeated, *resumed])


def _breaks(summary: analysis.Summary) -> list[str]:
    counts = {"restart": summary.restarts, "rollback": summary.rollbacks}
    return [f"{count} {what}{'s' if count > 1 else ''}" for what, count in counts.items() if count]


def _metric(metric: analysis.MetricSummary | None) -> str | None:
    if metric is None:
        return None
    best = f", best {number(metric.best)} at step {metric.best_step:,}" if metric.best_step is not None else ""
    mean = f", mean {number(metric.average)}" if metric.average is not None else ""
    wrong = f", {metric.not_finite:,} not finite" if metric.not_finite else ""
    return f"{number(metric.final)} at step {metric.final_step:,}{best}{mean}{wrong}"


def _peak(metric: analysis.MetricSummary | None) -> str | None:
    if metric is None or metric.worst is None:
        return None
    return f"max {number(metric.worst)} at step {metric.worst_step:,}, mean {number(metric.average)}"


def _time(summary: analysis.Summary) -> str | None:
    if summary.training_seconds is None:
        return None
    lost = f", {span(summary.lost_seconds)} lost between legs" if summary.restarts and summary.lost_seconds else ""
    return f"{span(summary.training_seconds)} training{lost}"


def _spikes(summary: analysis.Summary) -> str | None:
    if not summary.spikes:
        return None
    highest = sorted(summary.spikes, key=lambda spike: -spike.sigmas)[:SHOWN_SPIKES]
    shown = ", ".join(
        f"{number(spike.value)} at step {spike.step:,}" for spike in sorted(highest, key=lambda s: s.step)
    )
    return f"{len(summary.spikes)}: {shown}{', …' if len(summary.spikes) > SHOWN_SPIKES else ''}"


def _one_line(summary: analysis.Summary) -> str:
    parts = [summary.run, summary.state, f"step {number(summary.step)}"]
    for metric in [summary.loss, *summary.evaluation[:1]]:
        if metric is not None:
            best = f" (best {number(metric.best)} at {metric.best_step:,})" if metric.best_step is not None else ""
            parts.append(f"{metric.name} {number(metric.final)}{best}")
    parts += _breaks(summary)
    if summary.spikes:
        parts.append(f"{len(summary.spikes)} spike{'s' if len(summary.spikes) > 1 else ''}")
    return "  ".join(parts)


def _markdown(runs: list[tuple[analysis.Summary, dict[str, str]]]) -> str:
    """A Markdown table with one column per run."""
    names = list(dict.fromkeys(name for _, facts in runs for name in facts))
    lines = [["", *(summary.run for summary, _ in runs)], ["---"] * (len(runs) + 1)]
    lines += [[name, *(facts.get(name, "") for _, facts in runs)] for name in names]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


@command(run_paths(), flag("--tails", help="show the records that were cut off; default: count them"), JSON)
def lineage(arguments: argparse.Namespace) -> int:
    """Show the legs (process lives) of a run: where each resumed and whether exactly, its rollbacks, and why it ended.

    A leg of which no work is left, because a later one resumed from a checkpoint before it, is indented. Log records
    that were cut off are kept; --tails shows them.
    """
    logs = [(log, log.lineage()) for log in analysis.open_logs(arguments.runs, arguments.step_key)]
    for log, legs in logs:
        if not legs:
            raise NotFound(f"{log.path}: no run.json that lists the legs of a run; only dalsegno writes one")
    tails = arguments.tails
    if arguments.json:
        runs = [(log, [_as_json(leg, tails) for leg in legs]) for log, legs in logs]
        print_json([{"run": log.name, "path": str(log.path), "legs": legs} for log, legs in runs])
    else:
        for log, legs in logs:
            print("\n".join(map(visible, _tree(log, legs, tails))))
    return 0


def _as_json(summary: analysis.LegSummary, tails: bool) -> dict[str, Any]:
    from dataclasses import asdict

    later = ("parent", "last_step", "redone", "ended", "reason", "idle")
    known = asdict(summary.leg) | {name: getattr(summary, name) for name in later}
    cut_off = [
        {
            "path": str(tail.path),
            "first_step": tail.first_step,
            "last_step": tail.last_step,
            "records": tail.records if tails else len(tail.records),
        }
        for tail in summary.cut_off
    ]
    return {**known, "cut_off": cut_off}


def _tree(log: analysis.TrainingLog, legs: Sequence[analysis.LegSummary], tails: bool) -> Iterator[str]:
    from dalsegno.analysis.lineage import state_of

    redone = sum(each.redone for each in legs)
    repeated = f", {_count(redone, 'step')} repeated" if len(legs) > 1 else ""
    yield f"{log.name}  {state_of(legs, False, True)}, {_count(len(legs), 'leg')}{repeated}"
    kept = _ancestors_of_last(legs)
    for place, summary in enumerate(legs):
        last = place == len(legs) - 1
        aside = summary.leg.leg not in kept
        branch, stem = _branch(aside, legs[place + 1].leg.leg in kept if aside else last)
        first, *more = _as_lines(summary)
        yield f"{branch} {first}"
        for line in more:
            yield f"{stem}{line}"
        for tail in summary.cut_off:
            path = tail.path.resolve().relative_to(log.output_dir) if log.output_dir else tail.path
            records, steps = _count(len(tail.records), "record"), _steps(tail.first_step, tail.last_step)
            yield f"{stem}cut off the log: {records}, {steps}: {path}"
            if tails:
                yield from (f"{stem}  {as_words(record, None)}" for record in tail.records)


def _branch(aside: bool, ends: bool) -> tuple[str, str]:
    """Prefix of a leg's first line, and of its other lines."""
    if aside:
        return ("│ └─", "│     ") if ends else ("│ ├─", "│ │   ")
    return ("└─", "    ") if ends else ("├─", "│   ")


def _as_lines(summary: analysis.LegSummary) -> list[str]:
    leg = summary.leg
    start = f"from {leg.from_checkpoint}" if leg.from_checkpoint else "from scratch"
    by = f" by {leg.by}" if leg.by else ""
    end = "running" if summary.reason is None else f"{summary.reason}{by}"
    ranks = _count(leg.world_size, "rank")
    first, last = leg.first_step, summary.last_step  # a leg that died before its first checkpoint may have no record
    steps = f"no step after {first:,} recorded" if last <= first else _steps(first, last)
    lines = [
        f"leg {leg.leg}  {start}, {steps}: {end}",
        f"{moment(leg.started)}, {span(summary.ended - leg.started)}, {ranks}, process {leg.pid} on {leg.host}",
    ]
    if leg.resumed is not None:
        lines.append(leg.resumed.line)
    lines += [f"changed: {each}" for each in leg.changed]
    if leg.lost_records:
        lines.append(f"{_count(leg.lost_records, 'log record')} lost")
    for each in leg.rollbacks:
        reason = each["reason"].splitlines()[0]
        lines.append(f"step {each['from_step']:,}: back to step {each['to_step']:,}, by {each['by']}: {reason}")
    if leg.why:
        lines.append(leg.why.splitlines()[0])
    if leg.cause:
        lines.append(leg.cause)
    if summary.idle is not None:
        again = _steps(summary.end_step - summary.redone + 1, summary.end_step) if summary.redone else "no step"
        lines.append(f"{again} repeated, {span(summary.idle)} until the next leg")
    return lines


def _steps(first: int, last: int) -> str:
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def _ancestors_of_last(legs: Sequence[analysis.LegSummary]) -> set[int]:
    """Numbers of the legs whose work is part of the run: the last leg and its ancestors."""
    parents = {each.leg.leg: each.parent for each in legs}
    ancestors: set[int] = set()
    leg: int | None = legs[-1].leg.leg
    while leg is not None and leg not in ancestors:
        ancestors.add(leg)
        leg = parents.get(leg)
    return ancestors


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
