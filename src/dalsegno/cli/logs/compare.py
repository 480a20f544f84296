"""Compare runs with the first one, step by step: where the curves separate, and their difference at the end.

"differs at": first step with another value. "separates at": first step at which the mean difference leaves the noise of
both curves for more than half a window (it may return later). The last columns are means over the last window of
records, their difference and its standard error.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dalsegno.cli.tables import Column, number, print_json, print_table
from dalsegno.errors import ConfigurationError

from .arguments import add_json, add_metrics, add_runs
from .pictures import add_output, output_path, write

if TYPE_CHECKING:
    from dalsegno.analysis import TrainingLog

EXIT_STATUSES = {1: "a run separates from the first"}


def describe(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    add_metrics(parser, "the loss and the evaluation losses")
    parser.add_argument(
        "--window", type=int, metavar="N", help="records to average; default: 1/20 of the records, at most 50"
    )
    parser.add_argument(
        "--sigmas",
        type=float,
        default=4.0,
        metavar="S",
        help="mean difference that counts as separated, in standard errors; default: %(default)g",
    )
    add_output(parser, None)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no run.
        UnknownName: for a metric that one of the runs does not log.
        ConfigurationError: for fewer than two runs, or an invalid value.
    """
    from dalsegno.analysis import open_logs, plot_logs

    path = output_path(arguments, "compare") if arguments.output or arguments.format else None
    logs = open_logs(arguments.runs, arguments.step_key)
    if len(logs) < 2:
        raise ConfigurationError(f"only one run, {logs[0].name}; a comparison needs at least two")
    metrics = arguments.metrics or _in_common(logs)
    for log in logs:
        log.series([name for name in metrics if name in log.metrics()])  # reads the log once for all metrics
    rows = [_row(logs[0], other, metric, arguments) for metric in metrics for other in logs[1:]]
    if path is not None:
        write(plot_logs(logs, metrics, compare=True), path, quiet=arguments.json)
    if arguments.json:
        print_json({"first": logs[0].name, "comparisons": rows})
    else:
        print(f"compared with {logs[0].name}:")
        print_table(
            [
                Column("metric", "metric"),
                Column("run", "run"),
                Column("records", "compared", number, True),
                Column("differs_at", "differs at", number, True),
                Column("parts_at", "separates at", number, True, lambda step: "" if step is None else "red"),
                Column("last_step", "last step", number, True),
                Column("first", logs[0].name, number, True),
                Column("second", "this run", number, True),
                Column("difference", "difference", number, True),
                Column("noise", "noise", number, True),
            ],
            rows,
        )
    return 1 if any(row["parts_at"] is not None for row in rows) else 0


def _in_common(logs: list[TrainingLog]) -> list[str]:
    """The loss and the evaluation losses that all runs log."""
    shared = [name for name in logs[0].metrics() if all(name in log.metrics() for log in logs)]
    chosen = [name for name in shared if name == logs[0].loss or (name.startswith("eval") and name.endswith("loss"))]
    if not chosen:
        names = ", ".join(shared) or "none"
        raise ConfigurationError(f"the runs have no loss in common; choose with --metrics one of: {names}")
    return chosen


def _row(first: TrainingLog, other: TrainingLog, metric: str, arguments: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import asdict

    from dalsegno.analysis import compare_series

    result = compare_series(
        first.metric(metric), other.metric(metric), window=arguments.window, sigmas=arguments.sigmas
    )
    return {"metric": metric, "run": other.name, **asdict(result)}
