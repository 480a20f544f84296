"""Arguments of the commands that read logs: runs, metrics, output files; and results of several runs."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from dalsegno import analysis
from dalsegno.cli.command import FAILED, METRICS, Arguments, argument, expect_directory_of, flag, option, place, several
from dalsegno.cli.console import complain
from dalsegno.errors import ConfigurationError, DalsegnoError

if TYPE_CHECKING:
    from dalsegno.analysis.plotting.figure import Picture

RUN = "run directory, log file, or directory of runs"

STEP_KEY = option(
    "--step-key", metavar="NAME", help="key of the step in the records; default: global_step, step, iteration, …"
)
TITLE = argument("--title", help="title above the picture; default: none")
FORCE = flag("--force", help="overwrite an existing file")

EDIT = flag("-e", "--edit", help="open the picture: in VS Code from its terminal, else with $VISUAL or $EDITOR")


def run_paths(*, several_runs: bool = True, optional: bool = False) -> Arguments:
    """``RUN``, one or several, as ``arguments.runs`` (a list) or ``arguments.run_path``; and ``--step-key``.

    ``optional``: without one it is empty, or None; see :func:`given_runs` and :func:`given_run`.
    """
    help = f"{RUN}; default: the newest below the current directory that has what is shown" if optional else RUN
    name, count = ("runs", "*" if optional else "+") if several_runs else ("run_path", "?" if optional else None)
    return several(argument(name, metavar="RUN", nargs=count, type=place, help=help), STEP_KEY)


Has = Callable[["analysis.TrainingLog"], bool]
"""Whether a run has what a command shows."""


def _is_readable(log: analysis.TrainingLog) -> bool:
    next(log.records(), None)
    return True


def given_runs(arguments: argparse.Namespace, has: Has = _is_readable) -> list[analysis.TrainingLog]:
    """The runs of an optional ``RUN``; without it the newest that has what is shown. Raises NotFound without a run."""
    if arguments.runs:
        return analysis.open_logs(arguments.runs, arguments.step_key)
    return [_newest_run(arguments.step_key, has)]


def given_run(arguments: argparse.Namespace, has: Has) -> analysis.TrainingLog:
    """As :func:`given_runs`, of an optional single ``RUN``."""
    path = arguments.run_path
    return _newest_run(arguments.step_key, has) if path is None else analysis.open_log(path, arguments.step_key)


def _newest_run(step_key: str | None, has: Has) -> analysis.TrainingLog:
    """The run below the current directory whose log has changed last, of those that have it; of all if none has. Says
    which logs before it cannot be read."""
    logs = sorted(analysis.open_logs(["."], step_key), key=lambda log: log.source.path.stat().st_mtime_ns, reverse=True)
    unread = []
    for log in logs:
        try:
            if has(log):
                break
        except (DalsegnoError, OSError) as error:
            unread.append(f"{log.name}: {error}")
    else:
        return logs[0]
    for each in unread:
        complain(each)
    return log


def metric_names(default: str = "all") -> Arguments:
    """``--metrics`` as ``arguments.metrics``: a list, or None."""

    def names(text: str) -> list[str]:
        return [name.strip() for name in text.split(",") if name.strip()]

    return option(*METRICS, metavar="A,B", type=names, help=f"metrics, separated by commas; default: {default}")


FORMATS = ("png", "svg", "pdf")


def picture_file(default: str | None) -> Arguments:
    """``-o``, ``--force``, ``--format``. ``default``: file name without suffix; None: no picture unless asked for."""
    file = f"{default}.png" if default else "no picture"
    return several(
        option("-o", "--output", metavar="FILE", help=f"picture file; default: {file}"),
        FORCE,
        argument("--format", choices=FORMATS, help="picture format; default: by the suffix of FILE, else png"),
    )


def expect_free(path: Path, arguments: argparse.Namespace) -> Path:
    """Raises ConfigurationError if the file exists, without ``--force``."""
    if path.exists() and not arguments.force:
        raise ConfigurationError(f"{path} exists; --force overwrites it, -o names another file")
    return path


def output_path(arguments: argparse.Namespace, default: str) -> Path:
    """Path of the picture. Raises ConfigurationError if it cannot be written there in that format."""
    wanted: str | None = arguments.format
    path: Path = arguments.output or Path(f"{default}.{wanted or 'png'}")
    suffix = path.suffix[1:].lower()
    if suffix not in FORMATS and wanted is not None:
        return expect_free(path.with_name(f"{path.name}.{wanted}"), arguments)
    if suffix not in FORMATS:
        raise ConfigurationError(f"-o {path}: must end in {', '.join(f'.{each}' for each in FORMATS)}")
    if wanted not in (None, suffix):
        raise ConfigurationError(f"-o {path} contradicts --format {wanted}; leave one of them out")
    expect_directory_of(path)
    return expect_free(path, arguments)


def save_picture(picture: Picture, path: Path, *, quiet: bool, editor: Sequence[str] = ()) -> None:
    """``editor``: the command that opens it; empty: none."""
    picture.save(path)
    if not quiet:
        print(f"wrote {path}")
    if editor:
        subprocess.run([*editor, str(path)], check=False)


def wanted_editor(arguments: argparse.Namespace) -> list[str]:
    """The user's editor as a command; empty without ``--edit``. Raises ConfigurationError if there is none."""
    if not arguments.edit:
        return []
    in_vs_code = os.environ.get("TERM_PROGRAM") == "vscode" and shutil.which("code")
    named = "code" if in_vs_code else os.environ.get("VISUAL") or os.environ.get("EDITOR") or ""
    words = shlex.split(named)
    if not words or shutil.which(words[0]) is None:
        what = f"{named!r} is not a program here" if words else "neither $VISUAL nor $EDITOR is set"
        raise ConfigurationError(f"-e: {what}; set EDITOR to a program that opens pictures, such as code or xdg-open")
    return words


T = TypeVar("T")


class PerRunResults(Generic[T]):
    """A function applied to each of several logs; a log that fails does not stop the others."""

    def __init__(self, logs: Iterable[analysis.TrainingLog], compute: Callable[[analysis.TrainingLog], T]) -> None:
        self.found: list[tuple[analysis.TrainingLog, T]] = []
        self.failed: list[tuple[analysis.TrainingLog, str]] = []
        """With the error message."""
        for log in logs:
            try:
                self.found.append((log, compute(log)))
            except (DalsegnoError, OSError) as error:
                self.failed.append((log, str(error)))

    def status(self) -> int:
        """The exit status. Prints the failures on stderr."""
        for log, error in self.failed:
            complain(f"{log.name}: {error}")
        return FAILED if self.failed else 0
