"""Rules: how a DiLoCo server treats its workers."""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Rules:
    """How a server treats its workers.

    Raises:
        ConfigurationError: for a value that cannot work.
    """

    num_workers: int
    """Workers that must have joined before the first round ends."""
    asynchronous: bool = False
    """Apply each submission when it arrives, instead of the mean of all workers' ones."""
    min_workers: int = 1
    """Submissions that a round has at least, whatever happened to the other workers."""
    heartbeat_timeout: float = 120.0
    """Seconds without a request of a worker after which rounds no longer wait for it; 0: they wait for ever."""
    save_every: int = 10
    """Outer steps between two checkpoints. In between, submissions are kept."""
    dylu: bool = False
    """Recommend each worker a number of local steps that follows its speed."""
    dylu_base_sync_every: int = 500
    """That of the fastest worker."""

    def __post_init__(self) -> None:
        for name in ("num_workers", "min_workers", "save_every", "dylu_base_sync_every"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"DiLoCoServer: {name}={value!r}; needs an integer of at least 1")
        if not 0 <= self.heartbeat_timeout < float("inf"):
            raise ConfigurationError(f"heartbeat_timeout={self.heartbeat_timeout!r}; needs seconds, 0 or more")
        if self.min_workers > self.num_workers:
            raise ConfigurationError(
                f"DiLoCoServer: min_workers={self.min_workers}; more than num_workers={self.num_workers}"
            )
