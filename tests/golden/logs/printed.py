"""Writes what the commands print of the logs that lie here: ``python tests/golden/logs/printed.py``. A test holds them
together; look at the difference before you keep it."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dalsegno.cli import main as dalsegno

HERE = Path(__file__).parent
PRINTED = HERE / "printed"

COMMANDS = {
    "list": "list",
    "list-json": "list --json",
    "summary": "summary killed diverged",
    "summary-json": "summary killed --json",
    "summary-md": "summary pair-a pair-b diverged --format md",
    "summary-one-line": "summary . --format one-line",
    "show": "show killed --step 30:",
    "show-where": "show . --where 'eval_loss < 5 and step > 20' --metrics eval_loss",
    "show-json": "show diverged --kind eval --json",
    "tail": "tail killed pair-b -n 3 --metrics loss,eval_loss",
    "lineage": "lineage killed diverged",
    "lineage-tails": "lineage killed --tails",
    "lineage-json": "lineage killed --json",
    "export-csv": "export diverged --to csv",
    "export-json": "export diverged --json",
    "plot-terminal": "plot killed --terminal",
    "plot-terminal-compare": "plot pair-a pair-b --terminal --compare --log --metrics loss,grad_norm",
    "compare": "compare pair-a pair-b killed",
    "compare-json": "compare pair-a pair-b --metrics eval_loss --json",
    "diff": "diff pair-a pair-b -n 3",
    "diff-same": "diff pair-a pair-a",
    "diff-json": "diff pair-a killed --json",
    "spikes": "spikes . --window 4 --sigmas 3",
    "spikes-json": "spikes pair-b --window 4 --sigmas 3 --json",
    "detect": "detect . --threshold 1 --patience 2 --warmup 3",
    "detect-marked": "detect --threshold 1 --good pair-a pair-b killed --bad diverged",
    "detect-json": "detect --bad diverged --good killed --threshold none --relative-threshold 1.5 --warmup 2 --json",
    "detect-sweep": "detect --sweep --good pair-a pair-b killed --bad diverged",
    "detect-sweep-json": "detect --sweep --good pair-a --bad diverged --json",
}
"""From a file's name to the command, without ``dalsegno logs``."""


def printed(command: str) -> str:
    """What it prints, on a machine in UTC, in this folder; and its exit status."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with _in_utc(), contextlib.chdir(HERE), contextlib.redirect_stdout(out):
        status = dalsegno(["logs", *shlex.split(command)])
    out.flush()
    out.seek(0)
    return f"$ dalsegno logs {command}\n{out.read()}= {status}\n"


@contextlib.contextmanager
def _in_utc() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        yield
    finally:
        if before is None:
            del os.environ["TZ"]
        else:
            os.environ["TZ"] = before
        time.tzset()


def main() -> int:
    PRINTED.mkdir(exist_ok=True)
    for name, command in COMMANDS.items():
        (PRINTED / f"{name}.txt").write_text(printed(command))
    return 0


if __name__ == "__main__":
    sys.exit(main())
