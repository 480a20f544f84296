"""Synchronization: what one of a worker's synchronizations did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Synchronization:
    """What a synchronization did."""

    round: int
    """Number of the worker's submission."""
    version: int | None
    """Of the global parameters that it led to; None if it was skipped."""
    local_steps: int
    samples: int
    staleness: int
    """Outer steps of other workers between the parameters that the worker began with and its own submission."""
    bytes: int
    """Of the submission."""
    outer_loss: float | None
    """Mean of the losses that the workers of this outer step have reported."""
    dropped: bool
    """The worker's steps did not count; it continues with the global parameters."""
    seconds: float
    """For which training waited."""

    def to_record(self) -> dict[str, Any]:
        """As a record of a log."""
        loss = {} if self.outer_loss is None else {"outer_loss": self.outer_loss}
        version = {"skipped": True} if self.version is None else {"version": self.version}
        dropped = {"dropped": True} if self.dropped else {}
        return {
            "round": self.round,
            **version,
            **dropped,
            "local_steps": self.local_steps,
            "samples": self.samples,
            "staleness": self.staleness,
            "bytes": self.bytes,
            **loss,
            "sync_runtime": self.seconds,
        }
