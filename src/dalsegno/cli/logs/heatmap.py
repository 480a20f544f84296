"""Draw a number for each parameter over the steps: norms of gradients, of weights.

They come from the logs that GradNormLogger and its like write beside the run's own.
"""

from __future__ import annotations

import argparse

from .arguments import add_json, add_runs
from .pictures import add_output, output_path, write

METRICS = ("grad_norm", "norm", "spectral_norm")


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_runs(parser, several=False)
    parser.add_argument("--metric", choices=METRICS, default="grad_norm", help="default: %(default)s")
    parser.add_argument("-f", "--filter", metavar="REGEX", help="only parameters in whose name it is found")
    add_output(parser, "heatmap")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no such log, or no parameter is left.
        ConfigurationError: for a value that cannot work; if matplotlib is not installed.
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
