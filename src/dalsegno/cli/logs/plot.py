"""Plot metrics of runs, into a file or in the terminal.

Several runs get a panel each, or one common panel with --compare. The faint line is the logged values, the strong line
their moving mean. A training metric is drawn with its evaluation metrics. Restarts and rollbacks are marked.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import TYPE_CHECKING

from dalsegno.cli.tables import print_json, shows_colours
from dalsegno.errors import ConfigurationError

from .arguments import add_json, add_metrics, add_runs, given_runs, settings_of
from .pictures import add_output, add_title, output_path, write

if TYPE_CHECKING:
    from dalsegno.analysis import TrainingLog


def describe(parser: argparse.ArgumentParser) -> None:
    add_runs(parser, optional=True)
    add_metrics(parser, "the loss")
    parser.add_argument("--loss-curves", action="store_true", help="plot the loss, and the learning rate below it")
    parser.add_argument("--compare", action="store_true", help="draw all runs in one panel; default: a panel each")
    add_view(parser)
    parser.add_argument("--labels", nargs="+", metavar="NAME", help="names of the runs, in their order")
    add_title(parser)
    parser.add_argument("--terminal", action="store_true", help="draw in the terminal; default: into a file")
    add_output(parser, "plot")
    add_json(parser)


def add_view(parser: argparse.ArgumentParser) -> None:
    """The fields of a :class:`~dalsegno.analysis.View`."""
    axes = ("step", "epoch", "time", "tokens")
    parser.add_argument("--x", "--x-axis", choices=axes, default="step", help="x axis; default: %(default)s")
    parser.add_argument(
        "--smooth",
        type=int,
        metavar="N",
        help="records in the moving mean, 1 for none; default: 1/100 of the records, none below 200",
    )
    parser.add_argument("--log", "--log-scale", action="store_true", help="logarithmic y axis; default: linear")
    parser.add_argument("--perplexity", action="store_true", help="plot exp(loss) in place of the loss")
    parser.add_argument(
        "--xlim", type=_limits, metavar="A:B", help="range of the x axis, either end optional; default: all"
    )
    parser.add_argument(
        "--ylim", type=_limits, metavar="A:B", help="range of the y axis, either end optional, --ylim=-1:1 if negative"
    )
    parser.add_argument(
        "--ignore-outliers",
        action="store_true",
        help="fit the y axis to the middle 98%% of the values; default: to all",
    )


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no run, or nothing to draw.
        UnknownName: for a metric that no run logs.
        ConfigurationError: for an invalid value, or if the plotting library is not installed.
    """
    from dalsegno.analysis import View, plot_logs, sketch_logs

    view = settings_of(View, arguments)
    if arguments.terminal and arguments.json:
        raise ConfigurationError("--terminal and --json both write to standard output; leave one of them out")
    if arguments.loss_curves and arguments.metrics:
        raise ConfigurationError("--loss-curves and --metrics both choose metrics; leave one of them out")
    path = None if arguments.terminal else output_path(arguments, "plot")
    logs = _labelled(given_runs(arguments), arguments.labels)
    metrics = _loss_curves(logs) if arguments.loss_curves else arguments.metrics
    if path is None:
        width, colours = _terminal()
        print(sketch_logs(logs, metrics, view, compare=arguments.compare, width=width, colours=colours))
        return 0
    picture = plot_logs(logs, metrics, view, compare=arguments.compare).titled(arguments.title)
    write(picture, path, quiet=arguments.json)
    if arguments.json:
        print_json({"file": str(path), "runs": [log.name for log in logs], "metrics": metrics, "x": view.x})
    return 0


def _labelled(logs: list[TrainingLog], labels: list[str] | None) -> list[TrainingLog]:
    """Raises ConfigurationError if there are not as many labels as runs."""
    if labels is not None and len(labels) != len(logs):
        raise ConfigurationError(f"--labels: {len(labels)} names for {len(logs)} runs")
    for log, label in zip(logs, labels or (), strict=False):
        log.name = label
    return logs


def _loss_curves(logs: list[TrainingLog]) -> list[str]:
    """The loss and the learning rate, under their names in the runs."""
    from dalsegno.analysis.summary import RATE

    losses = [log.loss for log in logs if log.loss]
    rates = [name for log in logs for name in log.metrics() if name in RATE]
    return [*losses[:1], *rates[:1]]


def _terminal() -> tuple[int, bool]:
    """Width in columns (100 for a file or pipe), and whether it shows colours."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 100, shows_colours(sys.stdout)


def _limits(text: str) -> tuple[float | None, float | None]:
    low, colon, high = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r}: write a range as A:B, A: or :B")
    try:
        return (float(low) if low else None, float(high) if high else None)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
