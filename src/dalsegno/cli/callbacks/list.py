"""List every callback with a short name: built-in ones, and those that installed packages provide."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dalsegno.errors import ConfigurationError

if TYPE_CHECKING:
    from dalsegno.config import NamedCallback


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """A callback that cannot be imported is listed with the error."""
    from dalsegno.cli.tables import Column, print_json, print_table
    from dalsegno.config import named_callbacks

    rows = [_row(each) for each in named_callbacks()]
    if arguments.json:
        print_json(rows)
    else:
        print_table([Column("name", "callback"), Column("origin", "from"), Column("summary", "")], rows)
    return 0


def _row(entry: NamedCallback) -> dict[str, Any]:
    from dalsegno.config import summary

    try:
        text = summary(entry.load())
    except ConfigurationError as error:
        text = str(error)
    return {"name": entry.name, "origin": entry.origin, "summary": text}
