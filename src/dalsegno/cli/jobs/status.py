"""Show a job's step, epoch, and the last values of what it logs."""

from __future__ import annotations

import argparse
from typing import Any

from dalsegno.cli.tables import moment, number, print_facts, print_json, text, visible

from .arguments import add_job, add_json, client_of

PLACE = {"job_id", "status", "timestamp", "logged_at", "global_step", "max_steps", "epoch"}
"""Keys of a status that are not logged values."""


def describe(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises as :func:`client_of` does."""
    with client_of(arguments) as client:
        status = client.status()
    if arguments.json:
        print_json(status)
        return 0
    facts = [
        ("step", step_of(status)),
        ("epoch", shown(status.get("epoch"))),
        ("last log", moment(status.get("logged_at"))),
        *((name, shown(value)) for name, value in status.items() if name not in PLACE),
    ]
    print_facts(visible(str(status.get("job_id"))), [(visible(name), visible(fact)) for name, fact in facts])
    return 0


def step_of(status: dict[str, Any]) -> str:
    """``120 of 1,000``; without the end, if it is not known."""
    step, goal = status.get("global_step"), status.get("max_steps")
    return f"{shown(step)} of {shown(goal)}" if isinstance(goal, int) and goal > 0 else shown(step)


def shown(value: Any) -> str:
    """A logged value."""
    return number(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else text(value)
