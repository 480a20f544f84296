"""Find spikes: records far outside the noise of the records before them.

A spike lies more than --sigmas standard deviations above the median of the preceding records, or is NaN or infinite.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from dalsegno.cli.tables import Column, number, print_json, print_table

from .arguments import add_json, add_metrics, add_runs

if TYPE_CHECKING:
    from dalsegno.analysis import TrainingLog

EXIT_STATUSES = {2: "error, or a run that cannot be read; the others are searched"}


def describe(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    add_metrics(parser, "the loss and grad_norm")
    parser.add_argument(
        "--sigmas", type=float, default=6.0, metavar="S", help="height in standard deviations; default: %(default)g"
    )
    parser.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="preceding records of the median; default: 1/10 of the records, from 16 to 50",
    )
    parser.add_argument(
        "--mode",
        choices=("min", "max"),
        default="min",
        help="max: spikes point down, as for an accuracy; default: %(default)s",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no run.
        UnknownName: for a metric that one of the runs does not log.
        ConfigurationError: for an invalid value.
    """
    from dataclasses import asdict

    from dalsegno.analysis import find_spikes, open_logs

    from .per_run_results import PerRunResults

    def spikes(log: TrainingLog) -> list[dict[str, Any]]:
        default = [name for name in (log.loss, "grad_norm") if name in log.metrics()]
        find = partial(find_spikes, window=arguments.window, sigmas=arguments.sigmas, mode=arguments.mode)
        curves = log.series(arguments.metrics or default)
        return [{"run": log.name, "metric": name, **asdict(spike)} for name in curves for spike in find(curves[name])]

    results = PerRunResults(open_logs(arguments.runs, arguments.step_key), spikes)
    rows = [row for _, of_run in results.found for row in of_run]
    if arguments.json:
        print_json(rows)
    elif rows:
        print_table(
            [
                Column("run", "run"),
                Column("metric", "metric"),
                Column("step", "step", number, True),
                Column("value", "value", number, True),
                Column("usual", "median", number, True),
                Column("sigmas", "sigmas", lambda sigmas: f"{sigmas:.0f}", True),
                Column("records", "records", number, True),
                Column("recovered", "recovered", _yes_or_no, False, lambda recovered: "" if recovered else "red"),
            ],
            rows,
        )
    elif results.found:
        print("No spikes.")
    return results.status()


def _yes_or_no(recovered: bool) -> str:
    return "yes" if recovered else "no"
