"""Delete the checkpoints of a run that no retention rule keeps.

Rules are given as options; without any, those of the run's last training apply. The newest checkpoint that verifies is
never deleted, nor a damaged one, nor one with files that are not part of it. Fails while the run is training.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.cli.tables import Column, number, print_json, print_table, size
from dalsegno.errors import ConfigurationError

from .arguments import add_json, add_place

if TYPE_CHECKING:
    from dalsegno.checkpoint.inspect.listing import CheckpointInfo
    from dalsegno.policies.retention import Retention


def describe(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be deleted; delete nothing")
    parser.add_argument("--keep-latest", metavar="N", type=int, help="keep the N newest")
    parser.add_argument("--keep-best", metavar="N", type=int, help="keep the N best by --metric")
    parser.add_argument("--metric", metavar="NAME", help="metric of --keep-best; default: the evaluation loss")
    parser.add_argument(
        "--mode", choices=("min", "max"), help="best is the lowest or highest metric; default: min if it ends in 'loss'"
    )
    parser.add_argument("--every", metavar="STEPS", type=int, help="keep those whose step is a multiple of STEPS")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no checkpoint.
        Locked: if the run is training.
        ConfigurationError: if neither the options nor the run give a rule.
    """
    from dalsegno.checkpoint.format import checkpoint_dir, names
    from dalsegno.checkpoint.inspect.disk_usage import freed_bytes
    from dalsegno.checkpoint.inspect.listing import directory_of, is_checkpoint, list_checkpoints
    from dalsegno.system.lock import DirectoryLock

    if is_checkpoint(arguments.place):
        raise ConfigurationError(f"{arguments.place}: is a checkpoint; name the run whose checkpoints to prune")
    directory = directory_of(arguments.place)
    run_folder = directory.parent if directory.name == names.CHECKPOINTS else directory
    with nullcontext() if arguments.dry_run else DirectoryLock(run_folder):
        found = list_checkpoints(directory)
        rows = _rows(found, _rule(arguments, found))
        staying = {each.path for each in found}
        for row in rows:
            path = Path(row["path"])
            if row["kept"]:
                continue
            freed = freed_bytes(path, staying - {path})
            row["deleted"] = not arguments.dry_run and checkpoint_dir.delete(path)
            if row["deleted"] or arguments.dry_run:
                row["freed"] = freed
                staying.remove(path)
    _print(rows, arguments)
    return 0


def _rule(arguments: argparse.Namespace, found: list[CheckpointInfo]) -> Retention:
    from dalsegno.checkpoint.inspect.retention_reasons import rule_of_run
    from dalsegno.policies.retention import Best, EveryNth, Latest, retention_of

    rules: list[Retention | str] = []
    if arguments.keep_latest is not None:
        rules.append(Latest(arguments.keep_latest))
    if arguments.keep_best is not None:
        rules.append(Best(arguments.keep_best, arguments.metric, arguments.mode))
    elif arguments.metric is not None or arguments.mode is not None:
        raise ConfigurationError("--metric and --mode define the best checkpoints: add --keep-best N")
    if arguments.every is not None:
        rules.append(EveryNth(arguments.every))
    rule = retention_of(rules) if rules else rule_of_run(found)
    if rule is None:
        raise ConfigurationError(
            f"{arguments.place}: this run keeps every checkpoint; choose with --keep-latest, --keep-best or --every"
        )
    return rule


def _rows(found: list[CheckpointInfo], rule: Retention) -> list[dict[str, Any]]:
    from dalsegno.checkpoint.inspect.retention_reasons import NEWEST, reasons

    whole = [each for each in found if each.summary is not None]
    trusted = next((each.step for each in reversed(whole) if _verifies(each)), None)
    kept = reasons(rule, [each.summary for each in whole if each.summary is not None])
    rows = []
    for each in whole:
        why = [*kept[each.step or 0]]
        if each.step == trusted and NEWEST not in why:
            why.append("newest that verifies")
        rows.append(
            {"path": str(each.path), "step": each.step, "size": each.size, "kept": why, "deleted": False, "freed": 0}
        )
    return rows


def _verifies(found: CheckpointInfo) -> bool:
    from dalsegno.errors import DamagedCheckpoint

    assert found.checkpoint is not None
    try:
        found.checkpoint.verify(found.checkpoint.manifest.files)
    except DamagedCheckpoint:
        return False
    return True


def _print(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json(rows)
        return
    going = "would be deleted" if arguments.dry_run else "deleted"
    for row in rows:
        row["fate"] = ", ".join(row["kept"]) or (going if row["deleted"] or arguments.dry_run else "not deleted")
    columns = [Column("step", "step", number, True), Column("size", "size", size, True), Column("fate", "kept by")]
    print_table(columns, rows)
    print(f"{size(sum(row['freed'] for row in rows))} {'would be freed' if arguments.dry_run else 'freed'}")
