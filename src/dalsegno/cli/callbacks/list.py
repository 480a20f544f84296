"""List every callback with a short name: built-in ones, and those that installed packages provide."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dalsegno.cli.arguments import add_json
from dalsegno.cli.tables import Column, print_rows
from dalsegno.errors import ConfigurationError

if TYPE_CHECKING:
    from dalsegno.config import NamedCallback


def describe(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """A callback that cannot be imported is listed with the error."""
    from dalsegno.config import named_callbacks

    rows = [_row(each) for each in named_callbacks()]
    columns = [Column("name", "callback"), Column("origin", "from"), Column("summary", "")]
    print_rows(columns, rows, as_json=arguments.json)
    return 0


def _row(entry: NamedCallback) -> dict[str, Any]:
    from dalsegno.config import summary

    try:
        text = summary(entry.load())
    except ConfigurationError as error:
        text = str(error)
    return {"name": entry.name, "origin": entry.origin, "summary": text}
