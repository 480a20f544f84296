"""Train a small transformer, kill it twice with SIGKILL, resume it, and show that nothing differs.

The model learns the source code of Python's standard library, byte by byte. It is trained once without interruption,
and once killed between two steps and again during a checkpoint write. Then all tensors, states and log records of the
two runs are compared, and both losses are plotted, if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dalsegno.cli.command import command, option
from dalsegno.errors import ConfigurationError

LEAST_STEPS = 12


@command(
    option("--out", metavar="DIR", default=Path("demo-run"), help="output directory"),
    option("--steps", metavar="N", default=600, help="optimizer steps of the run"),
    option("--seed", metavar="N", default=7, help="seed of the training and the kills"),
    statuses={1: "the runs differ"},
    help=__doc__,
)
def demo(arguments: argparse.Namespace) -> int:
    if arguments.steps < LEAST_STEPS:
        raise ConfigurationError(f"--steps {arguments.steps}: two kills need at least {LEAST_STEPS} steps")
    if arguments.seed < 0:
        raise ConfigurationError(f"--seed {arguments.seed}: must be at least 0")
    out: Path = arguments.out
    if out.exists() and not out.is_dir():
        raise ConfigurationError(f"--out {out}: not a directory")
    if out.is_dir() and any(out.iterdir()) and not (out / MARK).is_file():
        raise ConfigurationError(f"--out {out}: contains files that no demo wrote; name another directory")
    print(f"Train, kill, resume, compare. All files are written to {out.absolute()}.", flush=True)
    from .story import tell  # takes seconds, and fails without torch: nothing is written yet

    with own_folder(out):
        return tell(out, arguments.steps, arguments.seed)


MARK = "demo.json"
"""Marks the output directory of a demo, whose contents the next demo may replace."""

WRITTEN = ("reference", "killed", "console", "loss.png")


@contextmanager
def own_folder(out: Path) -> Iterator[None]:
    """Create ``out`` if needed, lock it, and delete the runs of an earlier demo. Raises Locked if one is running."""
    from dalsegno.system import filesystem
    from dalsegno.system.lock import DirectoryLock

    filesystem.make_directory(out)
    note = {"written by": "dalsegno demo", "the next one replaces": WRITTEN}
    filesystem.replace_durably(out / MARK, (json.dumps(note, indent=2) + "\n").encode())
    with DirectoryLock(out):
        for name in WRITTEN:
            filesystem.remove(out / name)
        yield
