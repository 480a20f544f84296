"""Draw a heatmap of each parameter's gradient or weight norm over the steps.

Reads the logs that GradNormLogger and ParameterNormLogger write beside the run's own log.
"""

from __future__ import annotations

import argparse

from dalsegno.cli.tables import print_json

from .arguments import add_json, add_runs, given_run
from .pictures import add_output, add_title, output_path, write

METRICS = ("grad_norm", "norm", "spectral_norm")


def describe(parser: argparse.ArgumentParser) -> None:
    add_runs(parser, several=False, optional=True)
    parser.add_argument("--metric", choices=METRICS, default="grad_norm", help="norm to draw; default: %(default)s")
    parser.add_argument("-f", "--filter", metavar="REGEX", help="draw only parameters whose name matches; default: all")
    parser.add_argument("--step-stride", type=int, default=1, metavar="N", help="draw every N-th record; default: 1")
    parser.add_argument("--vmin", type=float, metavar="V", help="low end of the colour scale; default: the data's")
    parser.add_argument("--vmax", type=float, metavar="V", help="high end of the colour scale; default: the data's")
    parser.add_argument(
        "--figsize", type=float, nargs=2, metavar=("W", "H"), help="size in inches; default: by the parameters"
    )
    parser.add_argument("--log-scale", action="store_true", help="has no effect: the colour scale is logarithmic")
    add_title(parser)
    add_output(parser, "heatmap")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no such log, or no parameter matches.
        ConfigurationError: for an invalid value, or if matplotlib is not installed.
    """
    from dalsegno.analysis import matching, plot_heatmap

    path = output_path(arguments, "heatmap")
    series = matching(given_run(arguments).parameters(arguments.metric), arguments.filter)
    series = series.every(arguments.step_stride)
    limits, size = (arguments.vmin, arguments.vmax), arguments.figsize
    write(plot_heatmap(series, limits=limits, size=size).titled(arguments.title), path, quiet=arguments.json)
    if arguments.json:
        about = {"file": str(path), "run": series.run, "metric": series.name}
        print_json({**about, "steps": series.steps.tolist(), "parameters": list(series.parameters)})
    return 0
