"""Send what still waits for a run's experiment trackers (W&B, MLflow), say after a dead network.

A later leg of the run does the same. Entries that a tracker has are not sent twice. Fails while the run is training.
"""

from __future__ import annotations

import argparse

from dalsegno.cli.arguments import place
from dalsegno.cli.tables import print_json

from .arguments import add_json

EXIT_STATUSES = {1: "entries still wait, or an outbox is damaged"}


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_path", metavar="RUN", type=place, help="run directory")
    parser.add_argument(
        "--wait", metavar="SECONDS", type=float, default=300.0, help="time that each tracker has; default: %(default)g"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if no logger of a tracker has written there.
        Locked: if the run is training.
    """
    from dataclasses import asdict

    from dalsegno.callbacks.trackers.left_entries import send_left_entries

    outcomes = send_left_entries(arguments.run_path, arguments.wait)
    if arguments.json:
        print_json([asdict(each) for each in outcomes])
    else:
        for each in outcomes:
            waiting = f", {each.waiting} still wait" if each.waiting else ""
            print(f"{each.logger}: {each.sent} entries sent{waiting}{f': {each.error}' if each.error else ''}")
    return 1 if any(each.waiting or each.error for each in outcomes) else 0
