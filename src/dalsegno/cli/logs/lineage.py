"""Show the process lives of a run: from which checkpoint each went on, what was done twice, and why it ended.

Legs that a later one has gone back behind, so that nothing of them is left, stand aside. What was cut off of the log
is kept; --tails shows its records.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dalsegno.errors import NotFound

from .arguments import add_json, add_runs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from dalsegno.analysis import LegSummary, Tail, TrainingLog


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_runs(parser)
    parser.add_argument("--tails", action="store_true", help="show the records that were cut off, too")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no run.json, as other programs' runs have none.
        StateMismatch: if run.json is damaged.
    """
    from dataclasses import asdict

    from dalsegno.analysis import open_logs
    from dalsegno.cli.tables import print_json

    logs = [(log, log.lineage()) for log in open_logs(arguments.runs, arguments.step_key)]
    for log, lives in logs:
        if not lives:
            raise NotFound(f"{log.path}: no run.json in it; dalsegno writes one, and it is what legs are known from")
    if arguments.json:
        runs = []
        for log, lives in logs:
            legs = [
                {**asdict(life), "cut_off": [_cut_off(tail, arguments.tails) for tail in life.cut_off]}
                for life in lives
            ]
            runs.append({"run": log.name, "path": str(log.path), "legs": legs})
        print_json(runs)
    else:
        for log, lives in logs:
            print("\n".join(_tree(log, lives, arguments.tails)))
    return 0


def _cut_off(tail: Tail, records: bool) -> dict[str, Any]:
    told = {"path": str(tail.path), "first_step": tail.first_step, "last_step": tail.last_step}
    return {**told, "records": tail.records if records else len(tail.records)}


def _tree(log: TrainingLog, lives: Sequence[LegSummary], tails: bool) -> Iterator[str]:
    from dalsegno.analysis.lineage import state_of

    from .records import told

    redone = sum(life.redone for life in lives)
    twice = f", {_count(redone, 'step')} done twice" if len(lives) > 1 else ""
    yield f"{log.name}  {state_of(lives, False, True)}, {_count(len(lives), 'leg')}{twice}"
    kept = _line_of(lives)
    for place, life in enumerate(lives):
        last = place == len(lives) - 1
        aside = life.leg not in kept
        branch, stem = _branch(aside, lives[place + 1].leg in kept if aside else last)
        first, *more = _told(life)
        yield f"{branch} {first}"
        for line in more:
            yield f"{stem}{line}"
        for tail in life.cut_off:
            path = tail.path.resolve().relative_to(log.output_dir) if log.output_dir else tail.path
            steps = f"steps {tail.first_step:,} to {tail.last_step:,}"
            yield f"{stem}cut off then: {_count(len(tail.records), 'record')}, {steps}: {path}"
            if tails:
                yield from (f"{stem}  {told(record, None)}" for record in tail.records)


def _branch(aside: bool, ends: bool) -> tuple[str, str]:
    """What stands before a leg's first line, and before its others."""
    if aside:
        return ("│ └─", "│     ") if ends else ("│ ├─", "│ │   ")
    return ("└─", "    ") if ends else ("├─", "│   ")


def _told(life: LegSummary) -> list[str]:
    """A leg in a few lines."""
    from dalsegno.cli.tables import moment, span

    start = f"from {life.from_checkpoint}" if life.from_checkpoint else "from the beginning"
    by = f" by {life.by}" if life.by else ""
    end = "running" if life.reason is None else f"{life.reason}{by}"
    ranks = _count(life.world_size, "rank")
    lines = [
        f"leg {life.leg}  {start}, {_steps(life)}: {end}",
        f"{moment(life.started)}, {span(life.ended - life.started)}, {ranks}, process {life.pid} on {life.host}",
    ]
    if life.why:
        lines.append(life.why.splitlines()[0])
    if life.idle is not None:
        lines.append(f"{_count(life.redone, 'step')} done again, {span(life.idle)} until the next leg")
    return lines


def _steps(life: LegSummary) -> str:
    """A leg may have died before its first checkpoint, and have left no record."""
    if life.last_step <= life.first_step:
        return f"no step after {life.first_step:,} known"
    return f"steps {life.first_step:,} to {life.last_step:,}"


def _line_of(lives: Sequence[LegSummary]) -> set[int]:
    """The legs of which something is left: those that lead to the last one."""
    parents = {life.leg: life.parent for life in lives}
    line: set[int] = set()
    leg: int | None = lives[-1].leg
    while leg is not None and leg not in line:
        line.add(leg)
        leg = parents.get(leg)
    return line


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
