"""Arguments shared by the commands."""

from __future__ import annotations

from pathlib import Path

from dalsegno.cli.command import argument, place

PLACE = argument(
    "place",
    metavar="DIR",
    nargs="?",
    type=place,
    default=Path(),
    help="run directory or checkpoint; default: the current directory",
)
