"""List the callbacks of a job."""

from __future__ import annotations

import argparse

from dalsegno.cli.tables import Column, print_rows

from .arguments import add_job, add_json, client_of


def describe(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises as :func:`client_of` does."""
    with client_of(arguments) as client:
        rows = client.callbacks()["callbacks"]
    columns = [
        Column("key", "callback"),
        Column("class", "class"),
        Column("on", "", lambda is_on: "" if is_on else "switched off"),
    ]
    print_rows(columns, rows, as_json=arguments.json)
    return 0
