"""Summarize runs: steps, losses, evaluation, gradients, throughput, time, restarts, spikes."""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.cli.tables import NOTHING, moment, number, print_facts, print_json, span
from dalsegno.errors import ConfigurationError

from .arguments import add_json, add_runs, given_runs
from .pictures import add_force, expect_free

if TYPE_CHECKING:
    from dalsegno.analysis import MetricSummary, Summary, TrainingLog

EXIT_STATUSES = {2: "error, or a run that cannot be read; the others are summarized"}

SHOWN_SPIKES = 5


def describe(parser: argparse.ArgumentParser) -> None:
    add_runs(parser, optional=True)
    parser.add_argument("--all", action="store_true", help="summarize all runs below the current directory")
    parser.add_argument(
        "--format",
        choices=("text", "json", "md", "one-line"),
        default="text",
        help="output format, md being a Markdown table; default: %(default)s",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write; default: standard output")
    add_force(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no log.
        ConfigurationError: if the file exists, without ``--force``, or its directory does not; with both ``--all`` and
            runs.
    """
    from dalsegno.analysis import TrainingLog, open_logs
    from dalsegno.system.filesystem import replace_durably

    from .per_run_results import PerRunResults

    if arguments.all and arguments.runs:
        raise ConfigurationError("--all and RUN both name runs; leave one of them out")
    path: Path | None = None if arguments.output is None else expect_free(arguments.output, arguments)
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigurationError(f"-o {path}: there is no directory {path.parent}")
    logs = open_logs(["."], arguments.step_key) if arguments.all else given_runs(arguments)
    results = PerRunResults(logs, TrainingLog.summary)
    text = io.StringIO()
    with nullcontext() if path is None else redirect_stdout(text):
        _print(results.found, "json" if arguments.json else arguments.format)
    if path is not None:
        replace_durably(path, text.getvalue().encode())
        print(f"wrote {path}")
    return results.status()


def _print(summaries: Sequence[tuple[TrainingLog, Summary]], form: str) -> None:
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


def _facts(summary: Summary, log: TrainingLog) -> list[tuple[str, str]]:
    """Name and text of what the log contains, most wanted first."""
    records = ", ".join(f"{count:,} {kind}" for kind, count in summary.records.items())
    known: list[tuple[str, str | None]] = [
        ("state", _state(summary)),
        ("steps", number(summary.step)),
        ("epochs", None if summary.epoch is None else number(summary.epoch)),
        ("tokens", None if summary.tokens is None else f"{summary.tokens:,.0f}"),
        (summary.loss.name if summary.loss else "loss", _metric(summary.loss)),
        *((metric.name, _metric(metric)) for metric in summary.evaluation),
        ("gradient norm", _peak(summary.grad_norm)),
        ("learning rate", _change(summary.learning_rate)),
        *((name, number(average)) for name, average in summary.throughput.items()),
        ("peak memory", None if summary.peak_mem is None else f"{summary.peak_mem / 2**30:.2f} GiB"),
        ("time", _time(summary)),
        ("last change", None if summary.changed is None else moment(summary.changed)),
        ("spikes", _spikes(summary)),
        ("records", f"{records or NOTHING} ({summary.program})"),
        ("skipped", f"{summary.skipped:,}: {log.skipped}" if summary.skipped else None),
    ]
    return [(name, fact) for name, fact in known if fact is not None]


def _state(summary: Summary) -> str:
    breaks = _breaks(summary)
    repeated = [f"{summary.redone_steps:,} steps repeated"] if breaks else []
    resumed = [] if summary.resumed is None else [f"resumed: {summary.resumed}"]
    return ", ".join([summary.state, *breaks, *repeated, *resumed])


def _breaks(summary: Summary) -> list[str]:
    counts = {"restart": summary.restarts, "rollback": summary.rollbacks}
    return [f"{count} {what}{'s' if count > 1 else ''}" for what, count in counts.items() if count]


def _metric(metric: MetricSummary | None) -> str | None:
    if metric is None:
        return None
    best = f", best {number(metric.best)} at step {metric.best_step:,}" if metric.best_step is not None else ""
    mean = f", mean {number(metric.average)}" if metric.average is not None else ""
    wrong = f", {metric.not_finite:,} not finite" if metric.not_finite else ""
    return f"{number(metric.final)} at step {metric.final_step:,}{best}{mean}{wrong}"


def _peak(metric: MetricSummary | None) -> str | None:
    if metric is None or metric.worst is None:
        return None
    return f"max {number(metric.worst)} at step {metric.worst_step:,}, mean {number(metric.average)}"


def _change(metric: MetricSummary | None) -> str | None:
    return None if metric is None else f"first {number(metric.first)}, last {number(metric.final)}"


def _time(summary: Summary) -> str | None:
    if summary.training_seconds is None:
        return None
    lost = f", {span(summary.lost_seconds)} lost between legs" if summary.restarts and summary.lost_seconds else ""
    return f"{span(summary.training_seconds)} training{lost}"


def _spikes(summary: Summary) -> str | None:
    if not summary.spikes:
        return None
    highest = sorted(summary.spikes, key=lambda spike: -spike.sigmas)[:SHOWN_SPIKES]
    shown = ", ".join(
        f"{number(spike.value)} at step {spike.step:,}" for spike in sorted(highest, key=lambda s: s.step)
    )
    return f"{len(summary.spikes)}: {shown}{', …' if len(summary.spikes) > SHOWN_SPIKES else ''}"


def _one_line(summary: Summary) -> str:
    parts = [summary.run, summary.state, f"step {number(summary.step)}"]
    for metric in [summary.loss, *summary.evaluation[:1]]:
        if metric is not None:
            best = f" (best {number(metric.best)} at {metric.best_step:,})" if metric.best_step is not None else ""
            parts.append(f"{metric.name} {number(metric.final)}{best}")
    parts += _breaks(summary)
    if summary.spikes:
        parts.append(f"{len(summary.spikes)} spike{'s' if len(summary.spikes) > 1 else ''}")
    return "  ".join(parts)


def _markdown(runs: list[tuple[Summary, dict[str, str]]]) -> str:
    """A Markdown table with one column per run."""
    names = list(dict.fromkeys(name for _, facts in runs for name in facts))
    lines = [["", *(summary.run for summary, _ in runs)], ["---"] * (len(runs) + 1)]
    lines += [[name, *(facts.get(name, "") for _, facts in runs)] for name in names]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
