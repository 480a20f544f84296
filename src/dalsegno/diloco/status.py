"""Status: a DiLoCo run as JSON values, for people."""

from __future__ import annotations

import math
from typing import Any

from .presence import Presence
from .rules import Rules
from .run import OuterRun
from .state import Member


def status_of(
    run: OuterRun, rules: Rules, presence: Presence, failure: BaseException | None, obstacle: str | None
) -> dict[str, Any]:
    """The run and its workers.

    Args:
        failure: why no submission is applied any more.
        obstacle: why the disk refuses what workers wait for; the server tries again.
    """
    state = run.state if run.has_begun else None
    members = {} if state is None else state.members
    return {
        "run_id": None if state is None else state.run_id,
        "mode": "asynchronous" if rules.asynchronous else "synchronous",
        "version": None if state is None else state.version,
        "num_fragments": None if state is None else state.settings.num_fragments,
        "num_workers": rules.num_workers,
        "min_workers": rules.min_workers,
        "parameters": 0 if state is None else sum(math.prod(each["shape"]) for each in state.settings.tensors),
        "bytes_received": 0 if state is None else state.bytes_received,
        "failure": None if failure is None else str(failure),
        "obstacle": obstacle,
        "newest": run.newest_record,
        "workers": [
            {
                "worker_id": name,
                "state": _state_of(each, is_alive=presence.is_alive(name)),
                "submissions": each.number,
                "base": each.base,
                "staleness": max(0, (state.version if state else 0) - each.base),
                "steps_per_second": each.speed,
                "seen_seconds_ago": presence.seconds_ago(name),
            }
            for name, each in sorted(members.items())
        ],
    }


def _state_of(member: Member, *, is_alive: bool) -> str:
    if member.has_left:
        return "left"
    if not is_alive:
        return "dead"
    return "submitted" if member.pending is not None else "training"
