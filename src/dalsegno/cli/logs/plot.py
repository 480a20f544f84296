"""Draw metrics of runs, into a file or into the terminal.

Several runs stand side by side, or, with --compare, over each other. A faint line shows what was logged, a strong one
its moving mean; with a metric of training go those of evaluation that measure the same. Restarts and rollbacks are
marked.
"""

from __future__ import annotations

import argparse

from dalsegno.errors import ConfigurationError

from .arguments import add_json, add_metrics, add_runs, settings_of
from .pictures import add_output, output_path, write


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_runs(parser)
    add_metrics(parser, "which to look at; default: the loss")
    parser.add_argument("--compare", action="store_true", help="all runs in one panel")
    add_view(parser)
    parser.add_argument("--terminal", action="store_true", help="draw in the terminal itself")
    add_output(parser, "plot")
    add_json(parser)


def add_view(parser: argparse.ArgumentParser) -> None:
    """What makes up a :class:`~dalsegno.analysis.View`."""
    parser.add_argument("--x", choices=("step", "epoch", "time", "tokens"), default="step", help="default: %(default)s")
    parser.add_argument("--smooth", type=int, metavar="N", help="records to average; 1: none; default: a hundredth")
    parser.add_argument("--log", action="store_true", help="a logarithmic scale of values")
    parser.add_argument("--perplexity", action="store_true", help="e to the loss in place of the loss")
    parser.add_argument("--xlim", type=_limits, metavar="A:B", help="from where to where; either may be left out")
    parser.add_argument(
        "--ylim", type=_limits, metavar="A:B", help="the same for values; --ylim=-1:1 for negative ones"
    )
    parser.add_argument("--ignore-outliers", action="store_true", help="scale for the middle 98 of 100 values")


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no run, or nothing to draw.
        UnknownName: for a metric that no run has.
        ConfigurationError: for a value that cannot work; if what draws is not installed.
    """
    from dalsegno.analysis import View, open_logs, plot_logs, sketch_logs
    from dalsegno.cli.tables import print_json

    view = settings_of(View, arguments)
    if arguments.terminal and arguments.json:
        raise ConfigurationError("--terminal draws, --json prints what a program can read; leave one of them out")
    if arguments.terminal:
        logs = open_logs(arguments.runs, arguments.step_key)
        width, colours = _terminal()
        print(sketch_logs(logs, arguments.metrics, view, compare=arguments.compare, width=width, colours=colours))
        return 0
    path = output_path(arguments, "plot")
    logs = open_logs(arguments.runs, arguments.step_key)
    write(plot_logs(logs, arguments.metrics, view, compare=arguments.compare), path, quiet=arguments.json)
    if arguments.json:
        print_json({"file": str(path), "runs": [log.name for log in logs], "metrics": arguments.metrics, "x": view.x})
    return 0


def _terminal() -> tuple[int, bool]:
    """Its width, and whether it shows colours. A file is 100 columns wide."""
    import os
    import shutil
    import sys

    shown = sys.stdout.isatty()
    return shutil.get_terminal_size().columns if shown else 100, shown and not os.environ.get("NO_COLOR")


def _limits(text: str) -> tuple[float | None, float | None]:
    low, colon, high = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form A:B")
    try:
        return (float(low) if low else None, float(high) if high else None)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
