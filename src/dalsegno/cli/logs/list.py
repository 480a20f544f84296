"""List the runs in a directory: state, steps, losses, restarts, last change."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.cli.tables import Column, moment, number, print_rows

from .arguments import add_json, add_step_key

if TYPE_CHECKING:
    from dalsegno.analysis import TrainingLog

EXIT_STATUSES = {2: "error, or a run that cannot be read; the others are listed"}

STYLES = {"running": "green", "diverged": "red", "failed": "red", "died": "yellow", "unreadable": "red"}


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="DIR",
        nargs="?",
        type=Path,
        default=Path(),
        help="directory of runs; default: the current directory",
    )
    add_step_key(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises NotFound if there is no run."""
    from dalsegno.analysis import open_log

    from .per_run_results import PerRunResults

    runs = open_log(arguments.folder, arguments.step_key)
    results = PerRunResults(runs, _row)
    row_of = {log.path: row for log, row in results.found}
    row_of |= {log.path: {**_name(log), "state": "unreadable", "error": error} for log, error in results.failed}
    rows = [row_of[log.path] for log in runs]
    columns = [
        Column("run", "run"),
        Column("state", "state", style=lambda state: STYLES.get(state, "")),
        Column("step", "step", number, right=True),
        Column("epoch", "epoch", number, right=True),
        Column("loss", "loss", number, right=True),
        Column("best_loss", "best", number, right=True),
        Column("eval_loss", "eval", number, right=True),
        Column("restarts", "restarts", number, right=True),
        Column("resumed", "resumed", style=lambda verdict: "red" if verdict == "differs" else ""),
        Column("changed", "last change", lambda seconds: moment(seconds)[: len("2026-01-31 12:00")], right=True),
    ]
    print_rows(columns, rows, as_json=arguments.json)
    return results.status()


def _row(log: TrainingLog) -> dict[str, Any]:
    summary = log.summary()
    evaluation = next((metric for metric in summary.evaluation if "loss" in metric.name), None)
    return {
        **_name(log),
        "state": summary.state,
        "step": summary.step,
        "epoch": summary.epoch,
        "loss": summary.loss.final if summary.loss else None,
        "best_loss": summary.loss.best if summary.loss else None,
        "eval_loss": evaluation.final if evaluation else None,
        "restarts": summary.restarts,
        "resumed": summary.resumed,
        "changed": summary.changed or log.source.changed(),
    }


def _name(log: TrainingLog) -> dict[str, Any]:
    return {"run": log.name, "path": str(log.path)}
