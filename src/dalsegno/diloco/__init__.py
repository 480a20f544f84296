"""DiLoCo: train one model on machines that communicate rarely.

Workers train on their own for some hundred steps, then send how their parameters have changed. A server takes the mean
of these changes as the gradient of an outer optimizer, and returns its result (DiLoCo, Douillard et al. 2023,
arXiv:2311.08105).

Both sides rest on these modules, each of which imports only from those above it::

    quantization elements as int8
    signature    names, dtypes and shapes of what is synchronized; fragments
    frames       tensors on the wire
    server:      outer, state, spool → journal, versions → store → run → rules, presence → patience, status
                 → coordinator → api → server
    worker:      options, client, shards, progress → link, heartbeat, transfer → exchange → flight → worker

The names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .client import DiLoCoClient
    from .options import WorkerOptions
    from .outer import DelayedNesterov, delayed_nesterov, nesterov
    from .rules import Rules
    from .server import DiLoCoServer
    from .worker import DiLoCoWorker

_HOMES = {
    "client": ("DiLoCoClient",),
    "options": ("WorkerOptions",),
    "outer": ("DelayedNesterov", "delayed_nesterov", "nesterov"),
    "rules": ("Rules",),
    "server": ("DiLoCoServer",),
    "worker": ("DiLoCoWorker",),
}

__all__ = [
    "DelayedNesterov",
    "DiLoCoClient",
    "DiLoCoServer",
    "DiLoCoWorker",
    "Rules",
    "WorkerOptions",
    "delayed_nesterov",
    "nesterov",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
