"""Arguments that several of the commands take."""

from __future__ import annotations

import argparse
from typing import TypeVar

from dalsegno.cli.paths import place

Settings = TypeVar("Settings")


def add_runs(parser: argparse.ArgumentParser, *, several: bool = True) -> None:
    """``RUN``, one or several, as ``arguments.runs`` (a list) or ``arguments.run_path``; and ``--step-key``."""
    where = "a run's folder, a log file, or a folder of runs"
    if several:
        parser.add_argument("runs", metavar="RUN", nargs="+", type=place, help=where)
    else:
        parser.add_argument("run_path", metavar="RUN", type=place, help=where)
    add_step_key(parser)


def add_step_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step-key", metavar="NAME", help="what the records call the step, if it has an unusual name")


def add_metrics(parser: argparse.ArgumentParser, help: str = "only these, separated by commas") -> None:
    """``--metrics`` as ``arguments.metrics``: a list, or None."""
    parser.add_argument("--metrics", metavar="A,B", type=_names, help=help)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def settings_of(kind: type[Settings], arguments: argparse.Namespace) -> Settings:
    """An object of a dataclass of which each field is an option of the same name."""
    from dataclasses import fields

    return kind(**{field.name: getattr(arguments, field.name) for field in fields(kind)})  # type: ignore[arg-type]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
