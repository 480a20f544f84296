"""Export a log as CSV, Parquet, JSON or TensorBoard event files.

A directory of runs is exported as a whole, with a column "run". Without -o, CSV and JSON go to standard output.
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
    add_runs(parser, several=False)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--to", choices=TARGETS, help="output format")
    target.add_argument("--json", dest="to", action="store_const", const="json", help="short for --to json")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="PATH",
        help="output file, for tensorboard a directory; default: standard output",
    )
    add_force(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no log.
        ConfigurationError: if the output cannot be written there, or Polars is not installed.
    """
    from dalsegno.analysis import open_log
    from dalsegno.analysis.export import export_log

    output: Path | None = arguments.output
    if output is None and arguments.to in ("parquet", "tensorboard"):
        raise ConfigurationError(f"--to {arguments.to} needs -o: it cannot be printed")
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigurationError(f"-o {output}: there is no directory {output.parent}")
    if output is not None and arguments.to != "tensorboard":
        expect_free(output, arguments)
    log = open_log(arguments.run_path, arguments.step_key)
    export_log(log, arguments.to, sys.stdout.buffer if output is None else output)
    if output is not None:
        print(f"wrote {output}")
    if log.skipped:
        print(f"dalsegno: skipped {log.skipped.count:,}: {log.skipped}", file=sys.stderr)
    return 0
