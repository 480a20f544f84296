"""Commands on the checkpoints of a run: list, verify, prune, clean."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.cli.command import DIR, JSON, METRIC, argument, command, flag, option
from dalsegno.cli.console import Column, numbers, print_json, print_rows, print_table, size, sizes, texts
from dalsegno.errors import ConfigurationError, DamagedCheckpoint
from dalsegno.logs.values import WALL_CLOCK_ENDINGS

if TYPE_CHECKING:
    from dalsegno.checkpoint import Checkpoint
    from dalsegno.checkpoint.listing import CheckpointInfo
    from dalsegno.checkpoint.memory_dir import MemoryDir
    from dalsegno.policies.retention import Retention

STYLES = {
    "verified": "green",
    "partial": "yellow",
    "newer": "yellow",
    "damaged": "red",
    "quarantined": "red",
    "unreadable": "red",
}


@command(
    DIR,
    flag("--verify", help="read every byte and check it against its checksum"),
    JSON,
    statuses={1: "a checkpoint is damaged"},
)
def list_all(arguments: argparse.Namespace) -> int:
    """List checkpoints: step, time, size, ranks, metrics, the rules that keep each, and its condition.

    "on disk" leaves out the files that a checkpoint shares with an older one: frozen parameters that have not changed.
    "valid": the manifest is valid and every file has the size it records. "verified" (with --verify): every byte
    matches its checksum. A checkpoint that no rule keeps is deleted after the run's next save.
    """
    from dalsegno.checkpoint import listing

    found = everything = listing.list_checkpoints(arguments.place)
    if listing.is_checkpoint(arguments.place):
        everything = listing.list_checkpoints(listing.directory_of(arguments.place))
    valid = [each.summary for each in everything if each.summary is not None]
    why, best = listing.reasons(listing.rule_of_run(everything), valid), listing.best_step(everything)
    on_disk = listing.added_bytes([each.path for each in everything])
    rows = [
        _list_row(each, best)
        | {"on_disk": on_disk.get(each.path), "kept": why[each.summary.step] if each.summary else []}
        for each in found
    ]
    if arguments.verify:
        problems = problems_of([each for each in found if each.status is listing.CheckpointStatus.VALID])
        for row, each in zip(rows, found, strict=True):
            if each.path in problems:
                row["condition"] = listing.CheckpointStatus.DAMAGED.value if problems[each.path] else "verified"
                row["problem"] = "; ".join(problems[each.path]) or None
    columns = [
        *numbers(step="step"),
        Column("saved", "saved", _local),
        *sizes(size="size", on_disk="on disk"),
        *numbers(ranks="ranks"),
        Column("metrics", "metrics", _metrics),
        Column("best", "best", lambda best: "best" if best else ""),
        Column("kept", "kept by", ", ".join),
        Column("condition", "condition", style=lambda condition: STYLES.get(condition, "")),
    ]
    if any(row["problem"] for row in rows):
        columns.append(Column("problem", "problem", lambda problem: problem or ""))
    print_rows(columns, rows, as_json=arguments.json)
    return 1 if any(row["condition"] == listing.CheckpointStatus.DAMAGED for row in rows) else 0


def _list_row(found: CheckpointInfo, best: int | None) -> dict[str, Any]:
    its = found.checkpoint.manifest if found.checkpoint else None
    return {
        "path": str(found.path),
        "step": found.step,
        "saved": its.created if its else None,
        "size": found.size,
        "ranks": its.world_size if its else None,
        "metrics": dict(its.metrics) if its else {},
        "best": found.summary is not None and found.step == best,
        "condition": found.status.value,
        "problem": found.problem,
    }


def _local(moment: str | None) -> str:
    """The time in a manifest, in local time."""
    try:
        return f"{datetime.fromisoformat(moment or '').astimezone():%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return moment or "–"


def _metrics(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.5g}" for name, value in metrics.items() if not name.endswith(WALL_CLOCK_ENDINGS))


THREADS = 8
"""Files read in parallel: hashing one file takes one core, and many disks are faster with several readers."""


@command(
    DIR,
    option("--threads", metavar="N", default=THREADS, help="files read in parallel"),
    JSON,
    statuses={1: "a checkpoint is damaged"},
)
def verify(arguments: argparse.Namespace) -> int:
    """Check every byte of checkpoints against its checksum.

    Changes nothing. Skips saves in progress, and checkpoints that a run has set aside as damaged, unless DIR names
    them.
    """
    from dalsegno.checkpoint.listing import CheckpointStatus, is_checkpoint, list_checkpoints

    if arguments.threads < 1:
        raise ConfigurationError(f"--threads {arguments.threads}: must be at least 1")
    left_out = () if is_checkpoint(arguments.place) else (CheckpointStatus.PARTIAL, CheckpointStatus.QUARANTINED)
    found = [each for each in list_checkpoints(arguments.place) if each.status not in left_out]
    problems = problems_of(found, arguments.threads)
    rows = [
        {
            "path": str(each.path),
            "step": each.step,
            "files": len(each.checkpoint.manifest.files) if each.checkpoint else 0,
            "size": each.size,
            "verified": not problems[each.path],
            "problems": problems[each.path],
        }
        for each in found
    ]
    if arguments.json:
        print_json(rows)
    else:
        columns = [*numbers(step="step", files="files"), *sizes(size="size")]
        colours = {True: "green", False: "red"}
        verified = Column("verified", "", lambda good: "verified" if good else "DAMAGED", style=colours.__getitem__)
        print_table([*columns, verified], rows)
        for each in found:
            for problem in problems[each.path]:
                print(problem)
    return 0 if all(row["verified"] for row in rows) else 1


def problems_of(found: Sequence[CheckpointInfo], threads: int = THREADS) -> dict[Path, list[str]]:
    """Path → one message per file that fails verification; empty for a checkpoint that verifies.

    The largest files start first, so that no thread is left alone with one at the end.
    """
    from concurrent.futures import ThreadPoolExecutor

    from tqdm import tqdm

    problems: dict[Path, list[str]] = {each.path: [] for each in found}
    readable = [each.checkpoint for each in found if each.checkpoint is not None]
    work = [(each, name, file.size) for each in readable for name, file in each.manifest.files.items()]
    work.sort(key=lambda item: -item[2])
    bar = tqdm(total=sum(item[2] for item in work), unit="B", unit_scale=True, disable=not sys.stderr.isatty())
    with bar, ThreadPoolExecutor(threads) as pool:
        running = [(item, pool.submit(_problem_with, *item[:2])) for item in work]
        for (checkpoint, _, bytes_read), problem in running:
            if message := problem.result():
                problems[checkpoint.path].append(message)
            bar.update(bytes_read)
    for each in found:
        if each.problem and not problems[each.path]:
            problems[each.path].append(each.problem)
    return {path: sorted(each) for path, each in problems.items()}


def _problem_with(checkpoint: Checkpoint, name: str) -> str | None:
    try:
        checkpoint.verify([name])
    except OSError as error:  # damaged (DamagedCheckpoint is an OSError), or unreadable
        return str(error)
    return None


@command(
    DIR,
    flag("--dry-run", help="print what would be deleted; delete nothing"),
    option("--keep-latest", metavar="N", help="keep the N newest"),
    option("--keep-best", metavar="N", help="keep the N best by --metric"),
    option(*METRIC, metavar="NAME", help="metric of --keep-best; default: the evaluation loss"),
    argument(
        "--mode", choices=("min", "max"), help="best is the lowest or highest metric; default: by the metric's name"
    ),
    option("--every", metavar="STEPS", help="keep those whose step is a multiple of STEPS"),
    JSON,
)
def prune(arguments: argparse.Namespace) -> int:
    """Delete the checkpoints of a run that no retention rule keeps.

    Rules are given as options; without any, those of the run's last training apply. The newest checkpoint that verifies
    is never deleted, nor a damaged one, nor one with files that are not part of it. Fails while the run is training.
    """
    from dalsegno.checkpoint import checkpoint_dir, names
    from dalsegno.checkpoint.listing import directory_of, freed_bytes, is_checkpoint, list_checkpoints
    from dalsegno.system.lock import DirectoryLock

    if is_checkpoint(arguments.place):
        raise ConfigurationError(f"{arguments.place}: is a checkpoint; name the run whose checkpoints to prune")
    directory = directory_of(arguments.place)
    run_folder = directory.parent if directory.name == names.CHECKPOINTS else directory
    with nullcontext() if arguments.dry_run else DirectoryLock(run_folder):
        found = list_checkpoints(directory)
        rows = _prune_rows(found, _rule(arguments, found))
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
    if arguments.json:
        print_json(rows)
        return 0
    going = "would be deleted" if arguments.dry_run else "deleted"
    for row in rows:
        row["fate"] = ", ".join(row["kept"]) or (going if row["deleted"] or arguments.dry_run else "not deleted")
    print_table([*numbers(step="step"), *sizes(size="size"), *texts(fate="kept by")], rows)
    print(f"{size(sum(row['freed'] for row in rows))} {'would be freed' if arguments.dry_run else 'freed'}")
    return 0


def _rule(arguments: argparse.Namespace, found: list[CheckpointInfo]) -> Retention:
    from dalsegno.checkpoint.listing import rule_of_run
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


def _prune_rows(found: list[CheckpointInfo], rule: Retention) -> list[dict[str, Any]]:
    from dalsegno.checkpoint.listing import NEWEST, reasons

    whole = [each for each in found if each.summary is not None]
    trusted = next((each.step for each in reversed(whole) if _verifies(each)), None)
    kept = reasons(rule, [each.summary for each in whole if each.summary is not None])
    if trusted is not None and NEWEST not in kept[trusted]:
        kept[trusted].append("newest that verifies")
    return [
        {
            "path": str(each.path),
            "step": each.step,
            "size": each.size,
            "kept": kept[each.step or 0],
            "deleted": False,
            "freed": 0,
        }
        for each in whole
    ]


def _verifies(found: CheckpointInfo) -> bool:
    assert found.checkpoint is not None
    try:
        found.checkpoint.verify(found.checkpoint.manifest.files)
    except DamagedCheckpoint:
        return False
    return True


@command(
    argument("runs", metavar="DIR", nargs="*", type=Path, help="only of these runs; default: of all"),
    flag("--yes", help="remove them"),
    JSON,
)
def clean(arguments: argparse.Namespace) -> int:
    """Free the shared memory that runs on this host have left for their next leg.

    Lists the memory checkpoints of this user's runs; with --yes, removes them. Those of a run that is training stay,
    and so do those whose run is not found here: it may be in another container. To remove the latter, name the run's
    directory, which must be gone. Use it for runs that will not be resumed on this host: a resumed run cleans up by
    itself.
    """
    from dalsegno.checkpoint import memory_dir

    wanted = [path.resolve() for path in arguments.runs]
    found = [each for each in memory_dir.find_all() if not wanted or each.output_dir in wanted]
    rows, removable = [], []
    for each in sorted(found, key=lambda each: str(each.output_dir)):
        state = _state(each)
        is_gone = each.output_dir in wanted and not each.output_dir.exists()
        is_removable = state in (_RESUMABLE, _LEFT_OVER) or is_gone
        if is_removable:
            removable.append(each)
        rows.append(
            {
                "run": str(each.output_dir),
                "path": str(each.path),
                "step": each.newest_step,
                "size": each.size,
                "state": state,
                "removed": is_removable and arguments.yes,
                "removable": is_removable,
            }
        )
    freed = memory_dir.size_of(removable)
    for each in removable if arguments.yes else []:
        memory_dir.remove(each)
    if arguments.json:
        print_json(rows)
    elif not rows:
        print("no memory checkpoints on this host")
    else:
        print_table([*texts(run="run"), *numbers(step="step"), *sizes(size="size"), *texts(state="state")], rows)
        print(f"{size(freed)} freed" if arguments.yes else f"{size(freed)} would be freed: add --yes")
    return 0


_IN_USE = "in use"
_RESUMABLE = "of the last leg"
_LEFT_OVER = "left over"
_UNKNOWN = "of another container, or of a deleted run"


def _state(directory: MemoryDir) -> str:
    """Whether a process writes to it, the run's next leg can resume from it, or neither; or its run is not here."""
    from dalsegno.checkpoint import memory_dir
    from dalsegno.logs import RunFile
    from dalsegno.system.lock import DirectoryLock

    if not directory.is_of(directory.output_dir):
        return _UNKNOWN
    if DirectoryLock.is_held(directory.output_dir):
        return _IN_USE
    last = RunFile(directory.output_dir).last_leg()
    if last is None or directory.newest_step is None:
        return _LEFT_OVER
    former = None if last.from_checkpoint is None else memory_dir.name_of(Path(last.from_checkpoint))
    return _RESUMABLE if directory.name in (last.memory, former) else _LEFT_OVER
