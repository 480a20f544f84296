"""List every callback that has a bare name: the built-in ones, and those that installed packages offer."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dalsegno.errors import ConfigurationError

if TYPE_CHECKING:
    from dalsegno.config import Entry


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """One that cannot be imported is listed with the reason."""
    from dalsegno.cli.tables import Column, print_json, print_table
    from dalsegno.config import entries

    rows = [_row(offer) for offer in entries()]
    if arguments.json:
        print_json(rows)
    else:
        print_table([Column("name", "callback"), Column("origin", "from"), Column("summary", "")], rows)
    return 0


def _row(offer: Entry) -> dict[str, Any]:
    from dalsegno.config import summary

    try:
        text = summary(offer.load())
    except ConfigurationError as error:
        text = str(error)
    return {"name": offer.name, "origin": offer.origin, "summary": text}
