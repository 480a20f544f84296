"""Arguments shared by the commands."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TypeVar

from dalsegno.cli.arguments import add_json as add_json
from dalsegno.cli.arguments import place

if TYPE_CHECKING:
    from dalsegno.analysis import TrainingLog

RUN = "run directory, log file, or directory of runs"

Settings = TypeVar("Settings")


def add_runs(parser: argparse.ArgumentParser, *, several: bool = True, optional: bool = False) -> None:
    """``RUN``, one or several, as ``arguments.runs`` (a list) or ``arguments.run_path``; and ``--step-key``.

    ``optional``: without one it is empty, or None; see :func:`given_runs` and :func:`given_run`.
    """
    help_text = f"{RUN}; default: the newest run below the current directory" if optional else RUN
    if several:
        parser.add_argument("runs", metavar="RUN", nargs="*" if optional else "+", type=place, help=help_text)
    else:
        parser.add_argument("run_path", metavar="RUN", nargs="?" if optional else None, type=place, help=help_text)
    add_step_key(parser)


def given_runs(arguments: argparse.Namespace) -> list[TrainingLog]:
    """The runs of an optional ``RUN``.

    Raises:
        NotFound: if there is no run.
    """
    from dalsegno.analysis import open_logs

    return open_logs(arguments.runs, arguments.step_key) if arguments.runs else [_newest_run(arguments.step_key)]


def given_run(arguments: argparse.Namespace) -> TrainingLog:
    """The run of an optional single ``RUN``. Raises as :func:`given_runs` does."""
    from dalsegno.analysis import open_log

    path = arguments.run_path
    return _newest_run(arguments.step_key) if path is None else open_log(path, arguments.step_key)


def _newest_run(step_key: str | None) -> TrainingLog:
    """The run below the current directory whose log has changed last."""
    from dalsegno.analysis import open_logs

    return max(open_logs(["."], step_key), key=lambda log: log.source.path.stat().st_mtime_ns)


def add_step_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--step-key", metavar="NAME", help="key of the step in the records; default: global_step, step, iteration, …"
    )


def add_metrics(parser: argparse.ArgumentParser, default: str = "all") -> None:
    """``--metrics`` as ``arguments.metrics``: a list, or None."""
    parser.add_argument(
        "--metrics", metavar="A,B", type=_names, help=f"metrics, separated by commas; default: {default}"
    )


def settings_of(kind: type[Settings], arguments: argparse.Namespace) -> Settings:
    """An instance of a dataclass whose fields are the names of options."""
    from dataclasses import fields

    return kind(**{field.name: getattr(arguments, field.name) for field in fields(kind)})  # type: ignore[arg-type]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
