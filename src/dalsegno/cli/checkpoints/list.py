"""List checkpoints: step, time, size, ranks, metrics, the rules that keep each, and its condition.

"on disk" leaves out the files that a checkpoint shares with an older one: frozen parameters that have not changed.
"valid": the manifest is valid and every file has the size it records. "verified" (with --verify): every byte matches
its checksum. A checkpoint that no rule keeps is deleted after the run's next save.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dalsegno.cli.tables import Column, number, print_rows, size

from .arguments import add_json, add_place

if TYPE_CHECKING:
    from dalsegno.checkpoint.inspect.listing import CheckpointInfo

EXIT_STATUSES = {1: "a checkpoint is damaged"}

TIMES = ("_runtime", "_per_second")
"""Suffixes of metrics that measure the machine, not the model."""

STYLES = {
    "verified": "green",
    "partial": "yellow",
    "newer": "yellow",
    "damaged": "red",
    "quarantined": "red",
    "unreadable": "red",
}


def describe(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    parser.add_argument("--verify", action="store_true", help="read every byte and check it against its checksum")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises NotFound if there is no checkpoint."""
    from dalsegno.checkpoint.inspect.disk_usage import added_bytes
    from dalsegno.checkpoint.inspect.listing import CheckpointStatus, directory_of, is_checkpoint, list_checkpoints

    found = list_checkpoints(arguments.place)
    everything = list_checkpoints(directory_of(arguments.place)) if is_checkpoint(arguments.place) else found
    why, best = _reasons(everything), _best(everything)
    on_disk = added_bytes([each.path for each in everything])
    rows = [
        _row(each, best) | {"on_disk": on_disk.get(each.path), "kept": why[each.summary.step] if each.summary else []}
        for each in found
    ]
    if arguments.verify:
        _note_verified(rows, found)
    columns = [
        Column("step", "step", number, right=True),
        Column("saved", "saved", _local),
        Column("size", "size", size, right=True),
        Column("on_disk", "on disk", size, right=True),
        Column("ranks", "ranks", number, right=True),
        Column("metrics", "metrics", _metrics),
        Column("best", "best", lambda best: "best" if best else ""),
        Column("kept", "kept by", ", ".join),
        Column("condition", "condition", style=lambda condition: STYLES.get(condition, "")),
    ]
    if any(row["problem"] for row in rows):
        columns.append(Column("problem", "problem", lambda problem: problem or ""))
    print_rows(columns, rows, as_json=arguments.json)
    return 1 if any(row["condition"] == CheckpointStatus.DAMAGED for row in rows) else 0


def _reasons(found: Sequence[CheckpointInfo]) -> dict[int, list[str]]:
    """Step → retention rules of the run that keep its checkpoint."""
    from dalsegno.checkpoint.inspect.retention_reasons import reasons, rule_of_run

    return reasons(rule_of_run(found), [each.summary for each in found if each.summary is not None])


def _best(found: Sequence[CheckpointInfo]) -> CheckpointInfo | None:
    """The newest checkpoint whose manifest marks it as the best at its save: no later one was better."""
    return next((each for each in reversed(found) if each.checkpoint and each.checkpoint.manifest.best), None)


def _row(found: CheckpointInfo, best: CheckpointInfo | None) -> dict[str, Any]:
    its = found.checkpoint.manifest if found.checkpoint else None
    return {
        "path": str(found.path),
        "step": found.step,
        "saved": its.created if its else None,
        "size": found.size,
        "ranks": its.world_size if its else None,
        "metrics": dict(its.metrics) if its else {},
        "best": best is not None and found.path.name == best.path.name,
        "condition": found.status.value,
        "problem": found.problem,
    }


def _note_verified(rows: Sequence[dict[str, Any]], found: Sequence[CheckpointInfo]) -> None:
    from dalsegno.checkpoint.inspect.listing import CheckpointStatus

    from .verify import problems_of

    problems = problems_of([each for each in found if each.status is CheckpointStatus.VALID])
    for row, each in zip(rows, found, strict=True):
        if each.path in problems:
            row["condition"] = CheckpointStatus.DAMAGED.value if problems[each.path] else "verified"
            row["problem"] = "; ".join(problems[each.path]) or None


def _local(moment: str | None) -> str:
    """The time in a manifest, in local time."""
    try:
        return f"{datetime.fromisoformat(moment or '').astimezone():%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return moment or "–"


def _metrics(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.5g}" for name, value in metrics.items() if not name.endswith(TIMES))
