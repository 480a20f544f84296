"""Arguments shared by the commands."""

from __future__ import annotations

import argparse
from pathlib import Path

from dalsegno.cli.arguments import add_json as add_json
from dalsegno.cli.arguments import place


def add_place(parser: argparse.ArgumentParser) -> None:
    """``DIR``, as ``arguments.place``."""
    parser.add_argument(
        "place",
        metavar="DIR",
        nargs="?",
        type=place,
        default=Path(),
        help="run directory or checkpoint; default: the current directory",
    )
