"""Rendezvous: how the hosts of a launch find each other, before each leg."""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from .options import LaunchOptions

_HOST = "localhost"
_TIMEOUT = timedelta(minutes=30)


def rendezvous_for(options: LaunchOptions) -> RendezvousHandler:
    """torch's c10d rendezvous, or, on one host, a store: c10d waits a second before each leg for further hosts."""
    if options.max_nodes == 1:
        return OneHost(options.run_id)
    # Else the host of rank 0 announces its store before the first leg only, and one that joins later waits in vain.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return get_rendezvous_handler(
        RendezvousParameters("c10d", options.endpoint, options.run_id, options.min_nodes, options.max_nodes)
    )


class OneHost(RendezvousHandler):
    """The store of a single host, on a free port; a new name space for each leg."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        self._legs = 0
        self._is_closed = False

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "one-host"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        self._legs += 1
        store = PrefixStore(f"dalsegno/{self._run_id}/{self._legs}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_HOST, self._store.port))

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def shutdown(self) -> bool:
        self.set_closed()
        return True
