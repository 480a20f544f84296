"""End a job without a checkpoint: what was trained since the last one is lost.

Asks first, unless --force is given.
"""

from __future__ import annotations

import argparse
import sys

from dalsegno.errors import ConfigurationError

from .arguments import required_job
from .sending import EXIT_STATUSES as EXIT_STATUSES
from .sending import add_sending, send


def describe(parser: argparse.ArgumentParser) -> None:
    add_sending(parser)
    parser.add_argument("--force", action="store_true", help="do not ask")


def run(arguments: argparse.Namespace) -> int:
    """Send the command; raises as :func:`send` does.

    Raises:
        ConfigurationError: if standard input is not a terminal and ``--force`` is not given.
    """
    if not arguments.force and not _is_confirmed(arguments.remote or required_job(arguments)):
        print("not aborted")
        return 1
    return send(arguments, "abort")


def _is_confirmed(job: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigurationError("abort asks before it ends a job, and there is no terminal: add --force")
    return input(f"end {job} without a checkpoint? [y/N] ").strip().lower() in ("y", "yes")
