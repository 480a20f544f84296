"""ServerState: rounds, members and submissions of a DiLoCo run, changed only by events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dalsegno.diloco.wire.messages import Result, Settings, Submission, WorkerId
from dalsegno.errors import StateMismatch
from dalsegno.stateful.schema import Count, check

MOST_RESULTS = 8
"""Results kept for a worker that has not saved a checkpoint since."""


@dataclass(slots=True)
class Member:
    """A worker, as the server knows it."""

    number: Count
    """Of its newest submission."""
    results: dict[int, Result]
    """By number of submission; those that the worker may still ask for."""
    pending: Submission | None = None
    """Accepted, not applied yet."""
    accepted: Count = 0
    """Number of the event that accepted its newest submission."""
    has_left: bool = False
    speed: float = 0.0
    """Steps per second, in its newest submission."""
    dylu: bool = False
    """Whether its number of local steps follows its speed."""

    @property
    def base(self) -> int:
        """Version that its next submission is relative to."""
        return self.results[max(self.results)].version


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker takes the parameters of ``version``, and counts its submissions from ``number``."""

    worker_id: WorkerId
    number: Count
    version: Count
    dylu: bool
    kind: Literal["joined"] = "joined"


@dataclass(frozen=True, slots=True)
class Accepted:
    """A submission is complete; once this event is in the journal, it is on disk."""

    submission: Submission
    kind: Literal["accepted"] = "accepted"


@dataclass(frozen=True, slots=True)
class Applied:
    """The outer optimizer takes the pending submissions of these workers, which makes the next version."""

    worker_ids: list[str]
    sync_every: dict[str, int]
    """Local steps until the next submission, for workers whose number of them follows their speed."""
    kind: Literal["applied"] = "applied"


@dataclass(frozen=True, slots=True)
class Left:
    """A worker has ended."""

    worker_id: WorkerId
    kind: Literal["left"] = "left"


@dataclass(frozen=True, slots=True)
class Returned:
    """A worker that has left continues with the parameters that it has."""

    worker_id: WorkerId
    dylu: bool
    kind: Literal["returned"] = "returned"


Event = Joined | Accepted | Applied | Left | Returned
_EVENTS = {kind.__name__.lower(): kind for kind in get_args(Event)}


@dataclass(slots=True)
class ServerState:
    """The state that the events of the journal lead to."""

    run_id: str
    settings: Settings
    optimizer: str
    """The outer optimizer, with its hyperparameters."""
    version: Count = 0
    """Number of outer steps."""
    events: Count = 0
    """Number of events so far."""
    members: dict[str, Member] = field(default_factory=dict)
    bytes_received: Count = 0

    def change(self, event: Event) -> None:
        """Apply an event. The outer step itself is the caller's."""
        self.events += 1
        match event:
            case Joined(worker_id, number, version, dylu):
                earlier = self.members.get(worker_id)
                pending = None if earlier is None else earlier.pending
                self.members[worker_id] = Member(number, {number: Result(version)}, pending, self.events, dylu=dylu)
            case Accepted(submission):
                member = self.members[submission.worker_id]
                newest = sorted(member.results)[-MOST_RESULTS:]
                oldest = min(submission.saved, newest[-1])
                member.results = {each: member.results[each] for each in newest if each >= oldest}
                member.number, member.pending, member.accepted = submission.number, submission, self.events
                member.speed, member.has_left = submission.speed, False
            case Applied(worker_ids, sync_every):
                self.version += 1
                loss = self.mean_loss(worker_ids)
                for worker_id in worker_ids:
                    member = self.members[worker_id]
                    assert member.pending is not None, "it has submitted"
                    has_rejoined = member.number in member.results  # since it submitted: it has no parameters
                    is_whole = has_rejoined or self.settings.num_fragments == 1
                    fragment = None if is_whole else member.pending.fragment
                    member.results[member.number] = Result(self.version, fragment, sync_every.get(worker_id), loss)
                    member.pending = None
            case Left(worker_id):
                self.members[worker_id].has_left = True
            case Returned(worker_id, dylu):
                self.members[worker_id].has_left, self.members[worker_id].dylu = False, dylu

    def pending(self, worker_ids: Iterable[str]) -> list[Submission]:
        """The submissions of these workers that are accepted and not applied."""
        return [each for name in worker_ids if (each := self.members[name].pending) is not None]

    def mean_loss(self, worker_ids: Iterable[str]) -> float | None:
        """Mean of the losses of their pending submissions, weighted by samples; None if none has one."""
        losses = [(each.loss, each.samples) for each in self.pending(worker_ids) if each.loss is not None]
        samples = sum(weight for _, weight in losses)
        return sum(loss * weight for loss, weight in losses) / samples if losses else None


def event_from_json(content: Any) -> Event:
    check(content, dict[str, Any], "event")
    kind = _EVENTS.get(str(content.get("kind")))
    if kind is None:
        raise StateMismatch(f"event.kind: is {content.get('kind')!r}; must be an event of a known kind")
    event: Event = check(content, kind, "event")
    return event
