"""Find records that stand out of the noise of those before them.

A record stands out if it lies more than --sigmas standard deviations over the median of the records before it; what is
not a finite number always does.
"""

from __future__ import annotations

import argparse

from .arguments import add_json, add_runs
from .plot import add_metrics


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_runs(parser)
    add_metrics(parser, "default: the loss and grad_norm")
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

    from dalsegno.analysis import find_spikes, open_logs
    from dalsegno.cli.tables import Column, number, print_json, print_table

    rows = []
    for log in open_logs(arguments.runs, arguments.step_key):
        usual = [name for name in (log.loss, "grad_norm") if name in log.metrics()]
        for metric in arguments.metrics or usual:
            found = find_spikes(
                log.metric(metric), window=arguments.window, sigmas=arguments.sigmas, mode=arguments.mode
            )
            rows += [{"run": log.name, "metric": metric, **asdict(spike)} for spike in found]
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
    else:
        print("No record stands out.")
    return 0
