"""plot_heatmap: one number for each parameter, over the steps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dalsegno.analysis.extras import require_extra
from dalsegno.analysis.series import ParameterSeries
from dalsegno.errors import ConfigurationError, NotFound

if TYPE_CHECKING:
    from .figure import Picture

TITLES = {"grad_norm": "gradient norm", "norm": "weight norm", "spectral_norm": "spectral norm"}


def matching(series: ParameterSeries, pattern: str | None) -> ParameterSeries:
    """Only the parameters in whose name the regular expression ``pattern`` is found; None: all.

    Raises:
        ConfigurationError: if it is no regular expression.
        NotFound: if no parameter is left.
    """
    try:
        found = [index for index, name in enumerate(series.parameters) if re.search(pattern or "", name)]
    except re.error as error:
        raise ConfigurationError(f"{pattern!r} is not a regular expression: {error}") from error
    if not found:
        examples = ", ".join(series.parameters[:5])
        raise NotFound(f"no parameter of {series.run} matches {pattern!r}; there are, for example, {examples}")
    names = tuple(series.parameters[index] for index in found)
    return ParameterSeries(series.name, series.run, names, series.steps, series.values[:, found])


def plot_heatmap(series: ParameterSeries, pattern: str | None = None) -> Picture:
    """Parameters from top to bottom in the order of the model, steps to the right, a logarithmic scale of colours.

    Zero and what is not finite stays white.

    Args:
        pattern: a regular expression; only parameters in whose name it is found.

    Raises:
        ConfigurationError: if matplotlib is not installed, or for a broken pattern.
        NotFound: if no parameter matches, or nothing has been logged.
    """
    series = matching(series, pattern)
    if not len(series.steps):
        raise NotFound(f"{series.run}: its log of parameters has no records yet")
    require_extra("matplotlib", "plots are drawn")
    from .heatmap_figure import heatmap_figure

    return heatmap_figure(series, TITLES.get(series.name, series.name))
