"""plot_logs, sketch_logs, plot_heatmap: runs as pictures or in the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dalsegno.analysis.series import ParameterSeries
from dalsegno.errors import ConfigurationError, NotFound
from dalsegno.stateful.annotations import check_types
from dalsegno.system.imports import require_extra

from . import Limits, View
from .curves import Log, panels

if TYPE_CHECKING:
    from .figure import Picture


@check_types
def plot_logs(
    logs: Sequence[Log], metrics: Sequence[str] | None = None, view: View | None = None, *, compare: bool = False
) -> Picture:
    """Plot metrics of runs: one row per metric, one column per run; with ``compare`` all runs in one panel.

    Args:
        metrics: None: the loss. A training metric is drawn with its evaluation metrics.
        view: x axis, smoothing, scales.

    Raises:
        UnknownName: for a metric that no log has.
        NotFound: if there is nothing to draw.
        ConfigurationError: if matplotlib is not installed, or a log does not have the quantity of the x axis.
    """
    require_extra("analysis", "matplotlib", "plotting")
    from .figure import draw

    view = view or View()
    return draw(panels(logs, metrics, view, compare=compare), view)


@check_types
def sketch_logs(
    logs: Sequence[Log],
    metrics: Sequence[str] | None = None,
    view: View | None = None,
    *,
    compare: bool = False,
    width: int = 80,
    colours: bool = False,
) -> str:
    """As :func:`plot_logs`, as text in braille dots for a terminal of ``width`` columns, one panel below the other.

    Without colours, the runs of a panel are drawn as letters. Raises as :func:`plot_logs` does.
    """
    view = view or View()
    require_extra("analysis", "plotille", "plotting in a terminal")
    from .terminal import sketch

    return sketch(panels(logs, metrics, view, compare=compare), view, width=width, colours=colours)


TITLES = {"grad_norm": "gradient norm", "norm": "weight norm", "spectral_norm": "spectral norm"}


@check_types
def matching(series: ParameterSeries, pattern: str | None) -> ParameterSeries:
    """The parameters whose names contain a match of the regular expression ``pattern``; None: all.

    Raises ConfigurationError for an invalid regular expression; NotFound if no parameter matches.
    """
    try:
        found = [index for index, name in enumerate(series.parameters) if re.search(pattern or "", name)]
    except re.error as error:
        raise ConfigurationError(f"{pattern!r} is not a regular expression: {error}") from error
    if not found:
        examples = ", ".join(series.parameters[:5])
        raise NotFound(f"no parameter of {series.run} matches {pattern!r}; its parameters include {examples}")
    return replace(
        series, parameters=tuple(series.parameters[index] for index in found), values=series.values[:, found]
    )


@check_types
def plot_heatmap(
    series: ParameterSeries,
    pattern: str | None = None,
    *,
    limits: Limits = (None, None),
    size: tuple[float, float] | None = None,
    log: bool = True,
) -> Picture:
    """Draw parameters from top to bottom in the order of the model, steps to the right.

    Non-finite values stay white, on a logarithmic scale also zeros.

    Args:
        pattern: a regular expression; draws only parameters whose names contain a match.
        limits: lowest and highest value of the colour scale; None: that of the data.
        size: width and height in inches; None: by the number of parameters.
        log: a logarithmic colour scale, not a linear one.

    Raises:
        ConfigurationError: if matplotlib is not installed, or for an invalid pattern, limit or size.
        NotFound: if no parameter matches, or the log is empty.
    """
    series = matching(series, pattern)
    if not len(series.steps):
        raise NotFound(f"{series.run}: its log of parameters has no records yet")
    low, high = limits
    least = 0.0 if log else -math.inf
    if any(each is not None and not least < each < math.inf for each in limits):
        raise ConfigurationError(f"limits {limits!r}: need {'numbers over 0' if log else 'finite numbers'}")
    if any(not 0 < each < math.inf for each in size or ()):
        raise ConfigurationError(f"size {size!r}: needs numbers over 0")
    if low is not None and high is not None and not low < high:
        raise ConfigurationError(f"limits {limits!r}: the lowest value must be below the highest")
    require_extra("analysis", "matplotlib", "plotting")
    from .figure import heatmap_figure

    return heatmap_figure(series, TITLES.get(series.name, series.name), limits, size, log)
