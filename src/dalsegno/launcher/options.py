"""LaunchOptions: how many ranks, on how many hosts, and what happens when one fails."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Literal

from dalsegno.distributed import accelerator
from dalsegno.errors import ConfigurationError

Start = Literal["forkserver", "fork"]

MAX_RESTARTS = 3
HANG_TIMEOUT = 1800.0
"""Seconds; as gloo's and longer than NCCL's default timeout of a collective."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Checked options of a launch."""

    nproc: int
    """Ranks on this host."""
    min_nodes: int
    max_nodes: int
    endpoint: str
    """``HOST:PORT`` of the rendezvous of several hosts."""
    run_id: str
    """Identifies the job at the endpoint."""
    max_restarts: int
    hang_timeout: float
    """Seconds without a step after which a rank counts as hung; infinite: never."""
    start: Start

    @classmethod
    def checked(
        cls,
        nproc: int | str = "auto",
        nnodes: int | str = 1,
        max_restarts: int = MAX_RESTARTS,
        hang_timeout: float = HANG_TIMEOUT,
        rdzv_endpoint: str | None = None,
        rdzv_id: str | None = None,
        start: Start = "forkserver",
    ) -> LaunchOptions:
        """Raises ConfigurationError for an invalid value."""
        ranks = max(1, accelerator.device_count()) if nproc == "auto" else nproc
        ranks = int(ranks) if isinstance(ranks, str) and ranks.isdecimal() else ranks
        if type(ranks) is not int or ranks < 1:
            raise ConfigurationError(f"nproc={nproc!r}; needs the number of ranks on this host, or 'auto': one per GPU")
        low, _, high = str(nnodes).partition(":")
        high = high or low
        if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
            raise ConfigurationError(f"nnodes={nnodes!r}; needs a number of hosts, or MIN:MAX")
        min_nodes, max_nodes = int(low), int(high)
        if max_nodes > 1 and rdzv_endpoint is None:
            raise ConfigurationError(
                f"nnodes={nnodes}: several hosts need --rdzv-endpoint HOST:PORT (rdzv_endpoint=), the same on all"
            )
        if type(max_restarts) is not int or max_restarts < 0:
            raise ConfigurationError(f"max_restarts={max_restarts!r}; needs an integer, 0 or more")
        if not isinstance(hang_timeout, (int, float)) or isinstance(hang_timeout, bool) or not hang_timeout > 0:
            raise ConfigurationError(f"hang_timeout={hang_timeout!r}; needs seconds, more than 0 ('inf' for no limit)")
        if start not in ("forkserver", "fork"):
            raise ConfigurationError(f"start={start!r}; allowed: 'forkserver' or 'fork'")
        return cls(
            nproc=ranks,
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            endpoint=rdzv_endpoint or "",
            run_id=rdzv_id or (os.environ.get("SLURM_JOB_ID", "dalsegno") if max_nodes > 1 else secrets.token_hex(8)),
            max_restarts=max_restarts,
            hang_timeout=float(hang_timeout),
            start=start,
        )
