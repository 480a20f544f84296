"""Check every byte of checkpoints against its checksum.

Changes nothing. Skips saves in progress, and checkpoints that a run has set aside as damaged, unless DIR names them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.cli.tables import Column, number, print_json, print_table, size
from dalsegno.errors import ConfigurationError

from .arguments import add_json, add_place

if TYPE_CHECKING:
    from dalsegno.checkpoint import Checkpoint
    from dalsegno.checkpoint.inspect.listing import CheckpointInfo

EXIT_STATUSES = {1: "a checkpoint is damaged"}

THREADS = 8
"""Files read in parallel: hashing one file takes one core, and many disks are faster with several readers."""


def describe(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    parser.add_argument(
        "--threads", type=int, default=THREADS, metavar="N", help="files read in parallel; default: %(default)s"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no checkpoint.
        ConfigurationError: for fewer than one thread.
    """
    from dalsegno.checkpoint.inspect.listing import CheckpointStatus, is_checkpoint, list_checkpoints

    if arguments.threads < 1:
        raise ConfigurationError(f"--threads {arguments.threads}: must be at least 1")
    left_out = () if is_checkpoint(arguments.place) else (CheckpointStatus.PARTIAL, CheckpointStatus.QUARANTINED)
    found = [each for each in list_checkpoints(arguments.place) if each.status not in left_out]
    problems = problems_of(found, arguments.threads)
    rows = [_row(each, problems[each.path]) for each in found]
    if arguments.json:
        print_json(rows)
    else:
        columns = [
            Column("step", "step", number, right=True),
            Column("files", "files", number, right=True),
            Column("size", "size", size, right=True),
            Column("verified", "", lambda good: "verified" if good else "DAMAGED", style=_style),
        ]
        print_table(columns, rows)
        for row in rows:
            for problem in row["problems"]:
                print(problem)
    return 0 if all(row["verified"] for row in rows) else 1


def _style(good: bool) -> str:
    return "green" if good else "red"


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


def _row(found: CheckpointInfo, problems: Sequence[str]) -> dict[str, Any]:
    return {
        "path": str(found.path),
        "step": found.step,
        "files": len(found.checkpoint.manifest.files) if found.checkpoint else 0,
        "size": found.size,
        "verified": not problems,
        "problems": problems,
    }


def _problem_with(checkpoint: Checkpoint, name: str) -> str | None:
    try:
        checkpoint.verify([name])
    except OSError as error:  # damaged (DamagedCheckpoint is an OSError), or unreadable
        return str(error)
    return None
