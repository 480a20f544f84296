"""Draw a heatmap of each parameter's gradient or weight norm over the steps.

Reads the logs that GradNormLogger and ParameterNormLogger write beside the run's own log.
"""

from __future__ import annotations

import argparse

from .arguments import add_json, add_runs
from .pictures import add_output, output_path, write

METRICS = ("grad_norm", "norm", "spectral_norm")


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_runs(parser, several=False)
    parser.add_argument("--metric", choices=METRICS, default="grad_norm", help="norm to draw; default: %(default)s")
    parser.add_argument("-f", "--filter", metavar="REGEX", help="draw only parameters whose name matches; default: all")
    add_output(parser, "heatmap")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no such log, or no parameter matches.
        ConfigurationError: for an invalid value, or if matplotlib is not installed.
    """
    from dalsegno.analysis import matching, open_log, plot_heatmap
    from dalsegno.cli.tables import print_json

    path = output_path(arguments, "heatmap")
    series = matching(open_log(arguments.run_path, arguments.step_key).parameters(arguments.metric), arguments.filter)
    write(plot_heatmap(series), path, quiet=arguments.json)
    if arguments.json:
        about = {"file": str(path), "run": series.run, "metric": series.name}
        print_json({**about, "steps": series.steps.tolist(), "parameters": list(series.parameters)})
    return 0
