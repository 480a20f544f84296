"""Rounds: which submissions are due, and which workers a round waits for. Changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dalsegno.errors import StateMismatch

from .presence import Presence
from .rules import Rules
from .state import ServerState, Submission


class Rounds:
    """Decides by the rules, the state of the run, and the workers that are alive."""

    def __init__(self, rules: Rules, presence: Presence) -> None:
        self._rules = rules
        self._presence = presence

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
            if each.base > state.version and not each.has_left and self._presence.is_alive(name)
        ]

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
        """Raises StateMismatch if a submission is not the next one of its worker, which has joined, or is of an old
        round."""
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
        return is_due and self._presence.is_alive(worker_id)
