"""Commands that draw: plot, heatmap, report."""

from __future__ import annotations

import argparse
import shutil
import sys
from functools import partial
from pathlib import Path

from dalsegno import analysis
from dalsegno.cli.command import JSON, METRIC, argument, command, converter, flag, one_of, option, settings_of, several
from dalsegno.cli.console import print_json, shows_colours, size
from dalsegno.errors import ConfigurationError, NotFound

from .arguments import (
    EDIT,
    FORCE,
    TITLE,
    expect_free,
    given_run,
    given_runs,
    metric_names,
    output_path,
    picture_file,
    run_paths,
    save_picture,
    wanted_editor,
)


def _limits(text: str) -> tuple[float | None, float | None]:
    low, high = text.split(":")
    return (float(low) if low else None, float(high) if high else None)


_RANGE = converter(_limits, "a range of numbers: A:B, A: or :B")

VIEW = several(
    argument(
        "--x",
        "--x-axis",
        choices=("step", "epoch", "time", "tokens"),
        default="step",
        help="x axis; default: %(default)s",
    ),
    option(
        "--smooth",
        metavar="N",
        help="records in the trailing mean, 1 for none; default: 1/100 of the records, none below 200",
    ),
    flag("--log", "--log-scale", help="logarithmic y axis; default: linear"),
    flag("--perplexity", help="plot exp(loss) in place of the loss"),
    option("--xlim", metavar="A:B", type=_RANGE, help="range of the x axis, either end optional; default: all"),
    option(
        "--ylim", metavar="A:B", type=_RANGE, help="range of the y axis, either end optional, --ylim=-1:1 if negative"
    ),
    flag("--ignore-outliers", help="fit the y axis to the middle 98%% of the values; default: to all"),
)
"""The fields of a :class:`~dalsegno.analysis.View`."""


@command(
    run_paths(optional=True),
    metric_names("the loss"),
    flag("--loss-curves", help="plot the loss, and the learning rate below it"),
    flag("--compare", help="draw all runs in one panel; default: a panel each"),
    VIEW,
    argument("--labels", nargs="+", metavar="NAME", help="names of the runs, in their order"),
    TITLE,
    flag("--terminal", help="draw in the terminal; default: into a file"),
    picture_file("plot"),
    EDIT,
    JSON,
)
def plot(arguments: argparse.Namespace) -> int:
    """Plot metrics of runs, into a file or in the terminal.

    Several runs get a panel each, or one common panel with --compare. The faint line is the logged values, the strong
    line their trailing mean; settings such as the learning rate are not smoothed. A training metric is drawn with its
    evaluation metrics. Restarts and rollbacks are marked.
    """
    view = settings_of(analysis.View, arguments)
    if arguments.terminal and (arguments.json or arguments.edit):
        other = "--json" if arguments.json else "--edit"
        raise ConfigurationError(f"--terminal draws on standard output, {other} needs a file; leave one of them out")
    if arguments.loss_curves and arguments.metrics:
        raise ConfigurationError("--loss-curves and --metrics both choose metrics; leave one of them out")
    path = None if arguments.terminal else output_path(arguments, "plot")
    editor = wanted_editor(arguments)
    logs = given_runs(arguments, partial(_has, arguments.metrics))
    if arguments.labels is not None and len(arguments.labels) != len(logs):
        raise ConfigurationError(f"--labels: {len(arguments.labels)} names for {len(logs)} runs")
    for log, label in zip(logs, arguments.labels or (), strict=False):
        log.name = label
    metrics = _loss_curves(logs) if arguments.loss_curves else arguments.metrics
    if path is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
        colours = shows_colours(sys.stdout)
        print(analysis.sketch_logs(logs, metrics, view, compare=arguments.compare, width=width, colours=colours))
        return 0
    picture = analysis.plot_logs(logs, metrics, view, compare=arguments.compare).titled(arguments.title)
    save_picture(picture, path, quiet=arguments.json, editor=editor)
    if arguments.json:
        print_json({"file": str(path), "runs": [log.name for log in logs], "metrics": metrics, "x": view.x})
    return 0


def _has(metrics: list[str] | None, log: analysis.TrainingLog) -> bool:
    """Whether a log has all these metrics; None: a loss."""
    return log.loss is not None if metrics is None else {*metrics} <= {*log.metrics()}


def _loss_curves(logs: list[analysis.TrainingLog]) -> list[str]:
    """The loss and the learning rate, under their names in the runs."""
    from dalsegno.analysis.summary import RATE

    losses = [log.loss for log in logs if log.loss]
    rates = [name for log in logs for name in log.metrics() if name in RATE]
    return [*losses[:1], *rates[:1]]


def _has_parameters(metric: str, log: analysis.TrainingLog) -> bool:
    try:
        return log.parameters(metric).values.size > 0
    except NotFound:
        return False


METRICS = ("grad_norm", "norm", "spectral_norm")


@command(
    run_paths(several_runs=False, optional=True),
    argument(*METRIC, choices=METRICS, default="grad_norm", help="norm to draw; default: %(default)s"),
    option("-f", "--filter", metavar="REGEX", help="draw only parameters whose name matches; default: all"),
    option("--step-stride", metavar="N", default=1, help="draw every N-th record; default: 1"),
    option("--vmin", metavar="V", help="low end of the colour scale; default: the data's"),
    option("--vmax", metavar="V", help="high end of the colour scale; default: the data's"),
    argument("--figsize", type=float, nargs=2, metavar=("W", "H"), help="size in inches; default: by the parameters"),
    one_of(
        flag("--log-scale", help="logarithmic colour scale, as by default"),
        flag("--linear", help="linear colour scale"),
    ),
    TITLE,
    picture_file("heatmap"),
    EDIT,
    JSON,
)
def heatmap(arguments: argparse.Namespace) -> int:
    """Draw a heatmap of each parameter's gradient or weight norm over the steps.

    Reads the logs that GradNormLogger and ParameterNormLogger write beside the run's own log.
    """
    path, editor = output_path(arguments, "heatmap"), wanted_editor(arguments)
    log = given_run(arguments, partial(_has_parameters, arguments.metric))
    series = analysis.matching(log.parameters(arguments.metric), arguments.filter).every(arguments.step_stride)
    limits, size = (arguments.vmin, arguments.vmax), arguments.figsize
    picture = analysis.plot_heatmap(series, limits=limits, size=size, log=not arguments.linear).titled(arguments.title)
    save_picture(picture, path, quiet=arguments.json, editor=editor)
    if arguments.json:
        about = {"file": str(path), "run": series.run, "metric": series.name}
        print_json({**about, "steps": series.steps.tolist(), "parameters": list(series.parameters)})
    return 0


@command(
    run_paths(),
    option("-o", "--output", metavar="FILE", default=Path("report.html"), help="HTML file"),
    FORCE,
    argument("--title", help="title of the page; default: the names of the runs"),
    JSON,
)
def report(arguments: argparse.Namespace) -> int:
    """Write a report on runs as one interactive HTML file.

    It contains summaries, curves to zoom, toggle and smooth, restarts, the comparison with the first run, the
    divergence detector's verdicts, spikes, parameter norms and log headers. The file works offline and is at most 5 MB.
    """
    path: Path = arguments.output
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigurationError(f"-o {path}: name a file in an existing directory")
    expect_free(path, arguments)
    logs = analysis.open_logs(arguments.runs, arguments.step_key)
    analysis.write_report(logs, path, title=arguments.title)
    if arguments.json:
        print_json({"file": str(path), "bytes": path.stat().st_size, "runs": [log.name for log in logs]})
    else:
        print(f"wrote {path} ({size(path.stat().st_size)})")
    return 0
