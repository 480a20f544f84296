"""Write a log for other programs: as CSV, Parquet, JSON or TensorBoard's events.

Of a folder of runs all are written, with a column "run". CSV and JSON go to the standard output if no -o says where.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dalsegno.errors import ConfigurationError

from .arguments import add_runs
from .pictures import add_force, expect_free

TARGETS = ("csv", "parquet", "json", "tensorboard")


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_runs(parser, several=False)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--to", choices=TARGETS)
    target.add_argument("--json", dest="to", action="store_const", const="json", help="the same as --to json")
    parser.add_argument("-o", "--output", type=Path, metavar="PATH", help="a file; for TensorBoard a folder")
    add_force(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no log.
        ConfigurationError: if the output cannot be written there, or needs what is not installed.
    """
    from dalsegno.analysis import open_log
    from dalsegno.analysis.export import export_log

    output: Path | None = arguments.output
    if output is None and arguments.to in ("parquet", "tensorboard"):
        raise ConfigurationError(f"--to {arguments.to} needs -o: it is nothing to look at")
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigurationError(f"-o {output}: there is no folder {output.parent}")
    if output is not None and arguments.to != "tensorboard":
        expect_free(output, arguments)
    log = open_log(arguments.run_path, arguments.step_key)
    export_log(log, arguments.to, sys.stdout.buffer if output is None else output)
    if output is not None:
        print(f"wrote {output}")
    if log.skipped:
        print(f"dalsegno: skipped {log.skipped.count:,}: {log.skipped}", file=sys.stderr)
    return 0
