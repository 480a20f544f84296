"""Arguments that several of the commands take."""

from __future__ import annotations

import argparse
from pathlib import Path

from dalsegno.cli.paths import place


def add_place(parser: argparse.ArgumentParser) -> None:
    """``DIR``, as ``arguments.place``."""
    parser.add_argument(
        "place", metavar="DIR", nargs="?", type=place, default=Path(), help="run or checkpoint; default: this folder"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print it as JSON")
