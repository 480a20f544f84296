"""Remove the files of jobs that were killed.

Jobs that run, and jobs on other machines, are kept. Only the jobs' own files in the user's state folder are removed.
"""

from __future__ import annotations

import argparse

from dalsegno.cli.tables import print_json

from .arguments import add_json


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--unreadable", action="store_true", help="also those whose file cannot be read")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Remove them."""
    from dalsegno.control.jobs import remove_dead

    removed = [job.job_id for job in remove_dead(unreadable=arguments.unreadable)]
    if arguments.json:
        print_json(removed)
    else:
        print("\n".join(f"removed {job_id}" for job_id in removed) or "nothing to remove")
    return 0
