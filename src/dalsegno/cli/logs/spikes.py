"""Find records that stand out of the noise of those before them.

A record stands out if it lies more than --sigmas standard deviations over the median of the records before it; what is
not a finite number always does.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .arguments import add_json, add_metrics, add_runs

if TYPE_CHECKING:
    from dalsegno.analysis import TrainingLog


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_runs(parser)
    add_metrics(parser, "which to look at; default: the loss and grad_norm")
    parser.add_argument("--sigmas", type=float, default=6.0, metavar="S", help="default: %(default)g")
    parser.add_argument("--window", type=int, metavar="N", help="records that the median is of; default: 16 to 50")
    parser.add_argument("--mode", choices=("min", "max"), default="min", help="max: spikes fall, as an accuracy's do")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no run.
        UnknownName: for a metric that one of them does not have.
        ConfigurationError: for a value that cannot work.
    """
    from dataclasses import asdict
    from functools import partial

    from dalsegno.analysis import find_spikes, open_logs
    from dalsegno.cli.tables import Column, number, print_json, print_table

    from .per_run_results import PerRunResults

    def outstanding(log: TrainingLog) -> list[dict[str, Any]]:
        usual = [name for name in (log.loss, "grad_norm") if name in log.metrics()]
        look = partial(find_spikes, window=arguments.window, sigmas=arguments.sigmas, mode=arguments.mode)
        curves = log.series(arguments.metrics or usual)
        return [{"run": log.name, "metric": name, **asdict(spike)} for name in curves for spike in look(curves[name])]

    answers = PerRunResults(open_logs(arguments.runs, arguments.step_key), outstanding)
    rows = [row for _, of_run in answers.given for row in of_run]
    if arguments.json:
        print_json(rows)
    elif rows:
        print_table(
            [
                Column("run", "run"),
                Column("metric", "metric"),
                Column("step", "step", number, True),
                Column("value", "value", number, True),
                Column("usual", "usual", number, True),
                Column("sigmas", "sigmas", lambda sigmas: f"{sigmas:.0f}", True),
                Column("records", "records", number, True),
                Column("recovered", "back?", lambda back: "yes" if back else "no", False, lambda b: "" if b else "red"),
            ],
            rows,
        )
    elif answers.given:
        print("No record stands out.")
    return answers.status()
