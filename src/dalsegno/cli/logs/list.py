"""List the runs in a folder: steps, losses, state, last change."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import add_json


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("folder", metavar="DIR", nargs="?", type=Path, default=Path(), help="default: this folder")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no run.
    """
    from dalsegno.analysis import open_log
    from dalsegno.cli.tables import Column, number, print_json, print_table

    rows = []
    for log in open_log(arguments.folder):
        loss = log.metric(log.loss) if log.loss else None
        rows.append(
            {
                "run": log.name,
                "step": int(loss.steps[-1]) if loss else None,
                "loss": float(loss.values[-1]) if loss else None,
            }
        )
    if arguments.json:
        print_json(rows)
    else:
        print_table(
            [Column("run", "run"), Column("step", "step", number, right=True), Column("loss", "loss", number, True)],
            rows,
        )
    return 0
