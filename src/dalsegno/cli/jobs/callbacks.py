"""List the callbacks of a job."""

from __future__ import annotations

import argparse

from .arguments import add_job, add_json, client_of


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_job(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises as :func:`client_of` does."""
    from dalsegno.cli.tables import Column, print_json, print_table

    with client_of(arguments) as client:
        rows = client.callbacks()["callbacks"]
    if arguments.json:
        print_json(rows)
        return 0
    columns = [
        Column("key", "callback"),
        Column("class", "class"),
        Column("on", "", lambda is_on: "" if is_on else "switched off"),
    ]
    print_table(columns, rows)
    return 0
