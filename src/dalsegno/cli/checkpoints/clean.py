"""Free the shared memory that runs on this host have left for their next leg.

Lists the memory checkpoints of this user's runs; with --yes, removes them. Those of a run that is training stay, and so
do those whose run is not found here: it may be in another container. To remove the latter, name the run's directory,
which must be gone. Use it for runs that will not be resumed on this host: a resumed run cleans up by itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.cli.tables import Column, number, print_json, print_table, size

from .arguments import add_json

if TYPE_CHECKING:
    from dalsegno.checkpoint.format.memory_dir import MemoryDir


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="DIR", nargs="*", type=Path, help="only of these runs; default: of all")
    parser.add_argument("--yes", action="store_true", help="remove them")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises OSError if one cannot be removed."""
    from dalsegno.checkpoint.format import memory_dir

    wanted = [path.resolve() for path in arguments.runs]
    found = [each for each in memory_dir.find_all() if not wanted or each.output_dir in wanted]
    rows, removable = [], []
    for each in sorted(found, key=lambda each: str(each.output_dir)):
        rows.append(_row(each))
        is_gone = each.output_dir in wanted and not each.output_dir.exists()
        rows[-1]["removable"] = rows[-1]["state"] in (_RESUMABLE, _LEFT_OVER) or is_gone
        if rows[-1]["removable"]:
            removable.append(each)
            rows[-1]["removed"] = arguments.yes
    freed = memory_dir.size_of(removable)
    for each in removable if arguments.yes else []:
        memory_dir.remove(each)
    _print(rows, freed, arguments)
    return 0


_IN_USE = "in use"
_RESUMABLE = "of the last leg"
_LEFT_OVER = "left over"
_UNKNOWN = "of another container, or of a deleted run"


def _row(directory: MemoryDir) -> dict[str, Any]:
    return {
        "run": str(directory.output_dir),
        "path": str(directory.path),
        "step": directory.newest_step,
        "size": directory.size,
        "state": _state(directory),
        "removed": False,
    }


def _state(directory: MemoryDir) -> str:
    """Whether a process writes to it, the run's next leg can resume from it, or neither; or its run is not here."""
    from dalsegno.checkpoint.format import memory_dir
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


def _print(rows: list[dict[str, Any]], freed: int, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json(rows)
        return
    if not rows:
        print("no memory checkpoints on this host")
        return
    print_table(
        [
            Column("run", "run"),
            Column("step", "step", number, right=True),
            Column("size", "size", size, right=True),
            Column("state", "state"),
        ],
        rows,
    )
    print(f"{size(freed)} freed" if arguments.yes else f"{size(freed)} would be freed: add --yes")
