"""Arguments shared by the commands."""

from __future__ import annotations

import argparse
from typing import TypeVar

from dalsegno.cli.paths import place

RUN = "run directory, log file, or directory of runs"

Settings = TypeVar("Settings")


def add_runs(parser: argparse.ArgumentParser, *, several: bool = True) -> None:
    """``RUN``, one or several, as ``arguments.runs`` (a list) or ``arguments.run_path``; and ``--step-key``."""
    if several:
        parser.add_argument("runs", metavar="RUN", nargs="+", type=place, help=RUN)
    else:
        parser.add_argument("run_path", metavar="RUN", type=place, help=RUN)
    add_step_key(parser)


def add_step_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--step-key", metavar="NAME", help="key of the step in the records; default: global_step, step, iteration, …"
    )


def add_metrics(parser: argparse.ArgumentParser, default: str = "all") -> None:
    """``--metrics`` as ``arguments.metrics``: a list, or None."""
    parser.add_argument(
        "--metrics", metavar="A,B", type=_names, help=f"metrics, separated by commas; default: {default}"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def settings_of(kind: type[Settings], arguments: argparse.Namespace) -> Settings:
    """An instance of a dataclass whose fields are the names of options."""
    from dataclasses import fields

    return kind(**{field.name: getattr(arguments, field.name) for field in fields(kind)})  # type: ignore[arg-type]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
