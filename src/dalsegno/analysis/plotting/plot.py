"""plot_logs, sketch_logs: curves of runs as a picture or in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dalsegno.system.extras import require_extra

from .curves import Log, panels
from .view import View

if TYPE_CHECKING:
    from .figure import Picture


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
    view = view or View()
    require_extra("analysis", "matplotlib", "plotting")
    from .figure import draw

    return draw(panels(logs, metrics, view, compare=compare), view)


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
