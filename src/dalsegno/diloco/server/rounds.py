"""Rounds, members and submissions of a DiLoCo run: the state, changed only by events, and what is due by the rules."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from dalsegno.diloco.wire.messages import Positive, Result, Settings, Submission, WorkerId, check_fields
from dalsegno.errors import ConfigurationError, StateMismatch
from dalsegno.stateful.schema import Count, Must, check

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


_Seconds = Annotated[float, Must("seconds, 0 or more", lambda seconds: 0 <= seconds < math.inf)]


@dataclass(frozen=True, slots=True)
class Rules:
    """How a server treats its workers. Raises ConfigurationError for a value that cannot work."""

    num_workers: Positive
    """Workers that must have joined before the first round ends."""
    asynchronous: bool = False
    """Apply each submission when it arrives, instead of the mean of all workers' ones."""
    min_workers: Positive = 1
    """Submissions that a round has at least, whatever happened to the other workers."""
    heartbeat_timeout: _Seconds = 120.0
    """Seconds without a request of a worker after which rounds no longer wait for it; 0: they wait for ever."""
    save_every: Positive = 10
    """Outer steps between two checkpoints. In between, submissions are kept."""
    dylu: bool = False
    """Recommend each worker a number of local steps that follows its speed."""
    dylu_base_sync_every: Positive = 500
    """That of the fastest worker."""

    def __post_init__(self) -> None:
        check_fields(self, "DiLoCoServer")
        if self.min_workers > self.num_workers:
            raise ConfigurationError(
                f"DiLoCoServer: min_workers={self.min_workers}; more than num_workers={self.num_workers}"
            )


class Rounds:
    """Decides by the rules, the state of the run, and the workers that are alive. Changes no state."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._seen: dict[str, float] = {}  # monotonic time of each worker's newest request

    def note_seen(self, worker_id: str) -> None:
        """Takes no lock."""
        self._seen[worker_id] = time.monotonic()

    def seconds_ago(self, worker_id: str) -> float | None:
        """Seconds since a worker was seen; None: not since the server's start."""
        seen = self._seen.get(worker_id)
        return None if seen is None else time.monotonic() - seen

    def is_alive(self, worker_id: str) -> bool:
        ago, timeout = self.seconds_ago(worker_id), self._rules.heartbeat_timeout
        return timeout == 0 or (ago is not None and ago < timeout)

    def ready(self, state: ServerState) -> list[str]:
        """The workers whose submissions are to be applied now, together."""
        pending = {name: each for name, each in state.members.items() if each.pending is not None}
        if self._rules.asynchronous:
            return sorted(pending, key=lambda name: pending[name].accepted)[:1]
        if len(state.members) < self._rules.num_workers or len(pending) < self._rules.min_workers:
            return []
        return [] if any(self._is_awaited(state, name) for name in state.members) else sorted(pending)

    def waiting(self, state: ServerState) -> list[str]:
        """The workers that wait for the next round although the present one has lost all its workers."""
        if self._rules.asynchronous or any(self._is_in_round(state, name) for name in state.members):
            return []
        return [
            name
            for name, each in state.members.items()
            if each.base > state.version and not each.has_left and self.is_alive(name)
        ]

    def may_repeat(self, state: ServerState) -> list[str]:
        """The workers whose versions are kept, so that they can repeat what they did: those in the run, and of those
        that have left or died, ``num_workers``: the last ones that submitted or joined."""
        members = state.members
        is_here = {name: not each.has_left and self.is_alive(name) for name, each in members.items()}
        gone = sorted((name for name in members if not is_here[name]), key=lambda name: members[name].accepted)
        return [*(name for name in members if is_here[name]), *gone[-self._rules.num_workers :]]

    def is_in_progress(self, state: ServerState, worker_id: str) -> bool:
        """Whether a worker that joins now is too late for the present round."""
        if self._rules.asynchronous:
            return False
        member = state.members.get(worker_id)
        if member is not None and member.pending is not None:
            return True
        others = [name for name in state.members if name != worker_id]
        return len(state.members) >= self._rules.num_workers and any(self._is_in_round(state, name) for name in others)

    def check_next(self, state: ServerState, submission: Submission) -> None:
        """Raises StateMismatch if a submission is not the next one of its worker, or is of an old round."""
        member, who = state.members[submission.worker_id], f"{submission.worker_id}, submission {submission.number}"
        if member.pending is not None or submission.number != member.number + 1:
            raise StateMismatch(f"{who}: not the next one; {member.number} was accepted last")
        if submission.base != member.base:
            raise StateMismatch(f"{who}: relative to version {submission.base}; the worker was given {member.base}")
        if submission.fragment >= state.settings.num_fragments:
            raise StateMismatch(f"{who}: there is no fragment {submission.fragment}")
        if not self._rules.asynchronous:
            if submission.base != state.version:
                raise StateMismatch(
                    f"{who}: belongs to the old round of version {submission.base}; now it is {state.version}"
                )
            if submission.fragment != state.version % state.settings.num_fragments:
                raise StateMismatch(f"{who}: fragment {submission.fragment} is not that of this round")

    def recommended_steps(self, state: ServerState, worker_ids: Sequence[str]) -> dict[str, int]:
        """Dynamic local updates: the steps of each worker are in proportion to its speed (arXiv:2401.09135, 5.2)."""
        fastest = max((each.speed for each in state.members.values() if not each.has_left), default=0.0)
        following = [name for name in worker_ids if state.members[name].dylu] if fastest > 0 else []
        base = self._rules.dylu_base_sync_every
        return {name: max(1, math.floor(state.members[name].speed / fastest * base)) for name in following}

    def _is_in_round(self, state: ServerState, worker_id: str) -> bool:
        return state.members[worker_id].pending is not None or self._is_awaited(state, worker_id)

    def _is_awaited(self, state: ServerState, worker_id: str) -> bool:
        """Whether the round in progress waits for a worker's submission."""
        member = state.members[worker_id]
        is_due = member.pending is None and member.base == state.version and not member.has_left
        return is_due and self.is_alive(worker_id)
