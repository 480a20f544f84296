"""Show the legs (process lives) of a run: where each resumed and whether exactly, its rollbacks, and why it ended.

A leg of which no work is left, because a later one resumed from a checkpoint before it, is indented. Log records that
were cut off are kept; --tails shows them.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from dalsegno.cli.tables import moment, print_json, span
from dalsegno.errors import NotFound

from .arguments import add_json, add_runs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from dalsegno.analysis import LegSummary, Tail, TrainingLog


def describe(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument("--tails", action="store_true", help="show the records that were cut off; default: count them")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: without a run.json, which other programs do not write.
        StateMismatch: if run.json is damaged.
    """
    from dalsegno.analysis import open_logs

    logs = [(log, log.lineage()) for log in open_logs(arguments.runs, arguments.step_key)]
    for log, legs in logs:
        if not legs:
            raise NotFound(f"{log.path}: no run.json, which lists the legs of a run; only dalsegno writes one")
    if arguments.json:
        print_json(
            [
                {"run": log.name, "path": str(log.path), "legs": [_as_json(leg, arguments.tails) for leg in legs]}
                for log, legs in logs
            ]
        )
    else:
        for log, legs in logs:
            print("\n".join(_tree(log, legs, arguments.tails)))
    return 0


def _as_json(summary: LegSummary, tails: bool) -> dict[str, Any]:
    leg = summary.leg
    return {
        "leg": leg.leg,
        "parent": summary.parent,
        "from_checkpoint": leg.from_checkpoint,
        "first_step": leg.first_step,
        "last_step": summary.last_step,
        "redone": summary.redone,
        "world_size": leg.world_size,
        "host": leg.host,
        "pid": leg.pid,
        "started": leg.started,
        "ended": summary.ended,
        "reason": summary.reason,
        "by": leg.by,
        "why": leg.why,
        "cause": leg.cause,
        "idle": summary.idle,
        "resumed": None if leg.resumed is None else asdict(leg.resumed),
        "rollbacks": leg.rollbacks,
        "cut_off": [_tail_as_json(tail, tails) for tail in summary.cut_off],
    }


def _tail_as_json(tail: Tail, records: bool) -> dict[str, Any]:
    steps = {"path": str(tail.path), "first_step": tail.first_step, "last_step": tail.last_step}
    return {**steps, "records": tail.records if records else len(tail.records)}


def _tree(log: TrainingLog, legs: Sequence[LegSummary], tails: bool) -> Iterator[str]:
    from dalsegno.analysis.lineage import state_of

    from .records import as_words

    redone = sum(each.redone for each in legs)
    repeated = f", {_count(redone, 'step')} repeated" if len(legs) > 1 else ""
    yield f"{log.name}  {state_of(legs, False, True)}, {_count(len(legs), 'leg')}{repeated}"
    kept = _ancestors_of_last(legs)
    for place, summary in enumerate(legs):
        last = place == len(legs) - 1
        aside = summary.leg.leg not in kept
        branch, stem = _branch(aside, legs[place + 1].leg.leg in kept if aside else last)
        first, *more = _as_lines(summary)
        yield f"{branch} {first}"
        for line in more:
            yield f"{stem}{line}"
        for tail in summary.cut_off:
            path = tail.path.resolve().relative_to(log.output_dir) if log.output_dir else tail.path
            yield f"{stem}cut off the log: {_count(len(tail.records), 'record')}, {_steps_of(tail)}: {path}"
            if tails:
                yield from (f"{stem}  {as_words(record, None)}" for record in tail.records)


def _branch(aside: bool, ends: bool) -> tuple[str, str]:
    """Prefix of a leg's first line, and of its other lines."""
    if aside:
        return ("│ └─", "│     ") if ends else ("│ ├─", "│ │   ")
    return ("└─", "    ") if ends else ("├─", "│   ")


def _as_lines(summary: LegSummary) -> list[str]:
    leg = summary.leg
    start = f"from {leg.from_checkpoint}" if leg.from_checkpoint else "from scratch"
    by = f" by {leg.by}" if leg.by else ""
    end = "running" if summary.reason is None else f"{summary.reason}{by}"
    ranks = _count(leg.world_size, "rank")
    lines = [
        f"leg {leg.leg}  {start}, {_steps(leg.first_step, summary.last_step)}: {end}",
        f"{moment(leg.started)}, {span(summary.ended - leg.started)}, {ranks}, process {leg.pid} on {leg.host}",
    ]
    if leg.resumed is not None:
        lines.append(leg.resumed.line)
    for each in leg.rollbacks:
        reason = each["reason"].splitlines()[0]
        lines.append(f"step {each['from_step']:,}: back to step {each['to_step']:,}, by {each['by']}: {reason}")
    if leg.why:
        lines.append(leg.why.splitlines()[0])
    if leg.cause:
        lines.append(leg.cause)
    if summary.idle is not None:
        lines.append(f"{_count(summary.redone, 'step')} repeated, {span(summary.idle)} until the next leg")
    return lines


def _steps(first: int, last: int) -> str:
    """A leg that died before its first checkpoint may have left no record."""
    return f"no step after {first:,} recorded" if last <= first else f"steps {first:,} to {last:,}"


def _steps_of(tail: Tail) -> str:
    first, last = tail.first_step, tail.last_step
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def _ancestors_of_last(legs: Sequence[LegSummary]) -> set[int]:
    """Numbers of the legs whose work is part of the run: the last leg and its ancestors."""
    parents = {each.leg.leg: each.parent for each in legs}
    ancestors: set[int] = set()
    leg: int | None = legs[-1].leg.leg
    while leg is not None and leg not in ancestors:
        ancestors.add(leg)
        leg = parents.get(leg)
    return ancestors


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
