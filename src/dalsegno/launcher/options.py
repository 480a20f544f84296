"""LaunchOptions: how many ranks, on how many hosts, and what happens when one fails."""

from __future__ import annotations

import os
import secrets
from dataclasses import InitVar, dataclass, field
from typing import Literal

from dalsegno.distributed import accelerator
from dalsegno.errors import ConfigurationError

Start = Literal["forkserver", "fork"]

MAX_RESTARTS = 3
HANG_TIMEOUT = 1800.0
"""Seconds; as gloo's and longer than NCCL's default timeout of a collective."""


@dataclass
class LaunchOptions:
    """Options of a launch. Raises ConfigurationError for an invalid value."""

    nproc: InitVar[int | str] = "auto"
    nnodes: InitVar[int | str] = 1
    max_restarts: int = MAX_RESTARTS
    hang_timeout: float = HANG_TIMEOUT
    """Seconds without a step after which a rank counts as hung; infinite: never."""
    endpoint: str | None = None
    """``HOST:PORT`` of the rendezvous of several hosts."""
    rdzv_id: InitVar[str | None] = None
    start: Start = "forkserver"

    ranks: int = field(init=False)
    """On this host."""
    nodes: tuple[int, int] = field(init=False)
    """Least and largest number of hosts."""
    run_id: str = field(init=False)
    """Identifies the job at the endpoint."""

    def __post_init__(self, nproc: int | str, nnodes: int | str, rdzv_id: str | None) -> None:
        ranks = max(1, accelerator.device_count()) if nproc == "auto" else nproc
        ranks = int(ranks) if isinstance(ranks, str) and ranks.isdecimal() else ranks
        if type(ranks) is not int or ranks < 1:
            raise ConfigurationError(f"nproc={nproc!r}; needs the number of ranks on this host, or 'auto': one per GPU")
        low, _, high = str(nnodes).partition(":")
        high = high or low
        if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
            raise ConfigurationError(f"nnodes={nnodes!r}; needs a number of hosts, or MIN:MAX")
        self.ranks, self.nodes = ranks, (int(low), int(high))
        if self.nodes[1] > 1 and self.endpoint is None:
            raise ConfigurationError(
                f"nnodes={nnodes}: several hosts need --rdzv-endpoint HOST:PORT (rdzv_endpoint=), the same on all"
            )
        if type(self.max_restarts) is not int or self.max_restarts < 0:
            raise ConfigurationError(f"max_restarts={self.max_restarts!r}; needs an integer, 0 or more")
        limit = self.hang_timeout
        if not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit > 0:
            raise ConfigurationError(f"hang_timeout={limit!r}; needs seconds, more than 0 ('inf' for no limit)")
        if self.start not in ("forkserver", "fork"):
            raise ConfigurationError(f"start={self.start!r}; allowed: 'forkserver' or 'fork'")
        unnamed = os.environ.get("SLURM_JOB_ID", "dalsegno") if self.nodes[1] > 1 else secrets.token_hex(8)
        self.run_id = rdzv_id or unnamed
