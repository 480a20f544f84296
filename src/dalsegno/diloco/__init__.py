"""DiLoCo: train one model on machines that communicate rarely.

Workers train on their own for some hundred steps, then send how their parameters have changed. A server takes the mean
of these changes as the gradient of an outer optimizer, and returns its result (DiLoCo, Douillard et al. 2023,
arXiv:2311.08105).

``wire`` is what travels and its form, ``server`` and ``worker`` are the two sides; neither imports the other.
The names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.imports import lazy_exports

if TYPE_CHECKING:
    from .server.outer import DelayedNesterov as DelayedNesterov
    from .server.outer import delayed_nesterov as delayed_nesterov
    from .server.outer import nesterov as nesterov
    from .server.rounds import Rules as Rules
    from .server.server import DiLoCoServer as DiLoCoServer
    from .worker.client import DiLoCoClient as DiLoCoClient
    from .worker.options import WorkerOptions as WorkerOptions
    from .worker.worker import DiLoCoWorker as DiLoCoWorker
else:
    __getattr__, __dir__ = lazy_exports(__name__)
    __all__ = __dir__()
