"""plot_logs: curves of runs, as a picture or in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dalsegno.analysis.extras import require_extra

from .curves import Log, panels
from .view import View

if TYPE_CHECKING:
    from .figure import Picture


def plot_logs(
    logs: Sequence[Log], metrics: Sequence[str] | None = None, view: View | None = None, *, compare: bool = False
) -> Picture:
    """Draw metrics of runs: a row a metric, a column a run; with ``compare`` all runs over each other.

    Args:
        metrics: None: the loss. With a metric of training go those of evaluation that measure the same.
        view: what runs to the right, smoothing, scales.

    Raises:
        UnknownName: for a metric that none of the logs has.
        NotFound: if there is nothing to draw at all.
        ConfigurationError: if matplotlib is not installed, or a log does not know what runs to the right.
    """
    view = view or View()
    require_extra("matplotlib", "plots are drawn")
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
    """As :func:`plot_logs`, in braille for a terminal of ``width`` columns; all panels stand below each other.

    Without colours, runs in one panel are drawn as letters. Raises as :func:`plot_logs` does.
    """
    view = view or View()
    require_extra("plotille", "plots in a terminal are drawn")
    from .terminal import sketch

    return sketch(panels(logs, metrics, view, compare=compare), view, width=width, colours=colours)
