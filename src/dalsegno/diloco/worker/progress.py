"""Progress: where a worker is in its run, beside the global parameters, and what a synchronization did."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NotRequired, TypedDict, cast

from dalsegno.diloco.wire.messages import Positive, WorkerId
from dalsegno.stateful.schema import Count


class FlightState(TypedDict):
    """State of a submission that the server has, and whose result the worker has yet to take."""

    fragment: Count
    samples: Positive
    local_steps: Count


class WorkerState(TypedDict):
    """State of a worker, beside the global parameters."""

    worker_id: WorkerId
    run_id: str
    asynchronous: bool
    count: Count
    version: Count
    steps: Count
    samples: Count
    sync_every: Count
    synchronized: Count
    skipped: Count
    flight: NotRequired[FlightState]


@dataclass(slots=True)
class WorkerProgress:
    """What a worker has done, and what it is to do next."""

    worker_id: str
    run_id: str | None = None
    """None: the worker has no global parameters."""
    asynchronous: bool = False
    count: int = 0
    """Newest submission whose result the worker has."""
    version: int = 0
    """Version of the global parameters that this submission led to."""
    steps: int = 0
    """Local steps since the newest submission."""
    samples: int = 0
    """Trained on for the changes that have not been applied."""
    sync_every: int = field(kw_only=True)
    """Local steps between two synchronizations of a parameter."""
    synchronized: int = 0
    skipped: int = 0

    def state(self, flight: FlightState | None) -> WorkerState | None:
        """The state to save; None before the worker has global parameters."""
        if self.run_id is None:
            return None
        state = cast(WorkerState, asdict(self))
        return state if flight is None else {**state, "flight": flight}

    def restore(self, state: WorkerState, *, dylu: bool) -> None:
        """Continue from a saved state. ``dylu``: whether the server chooses ``sync_every``; otherwise the present one
        holds."""
        own = {"worker_id", "flight"} if dylu else {"worker_id", "flight", "sync_every"}
        for name, value in state.items():
            if name not in own:
                setattr(self, name, value)


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
