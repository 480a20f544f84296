"""Arguments shared by the commands."""

from __future__ import annotations

from pathlib import Path

from dalsegno.cli.command import Parser, place


def add_place(parser: Parser) -> None:
    """``DIR``, as ``arguments.place``."""
    parser.add_argument(
        "place",
        metavar="DIR",
        nargs="?",
        type=place,
        default=Path(),
        help="run directory or checkpoint; default: the current directory",
    )
