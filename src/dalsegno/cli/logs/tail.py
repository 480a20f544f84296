"""Show the last records of runs, and with -f the new ones as they come; several runs side by side.

A log that is cut back while it is followed, since its run goes on from a checkpoint, is followed from there; one that
goes on in another file, in that one. It ends with Ctrl-C. With --json: a record a line.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dalsegno.errors import ConfigurationError

from .arguments import add_json, add_metrics, add_runs

if TYPE_CHECKING:
    from dalsegno.analysis import TrainingLog
    from dalsegno.analysis.follow import Cut
    from dalsegno.logs.values import Record

WIDE = 56
"""Characters of a run's column where there is no terminal."""


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_runs(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on as the logs go on")
    parser.add_argument("-n", "--lines", type=int, metavar="N", default=10, help="how many of the last; default: 10")
    add_metrics(parser)
    parser.add_argument(
        "--interval", type=float, default=0.2, metavar="SECONDS", help="between two looks; default: %(default)s"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no log.
        ConfigurationError: for a negative number of lines, or an interval that is not over 0.
    """
    from dalsegno.analysis import open_logs
    from dalsegno.analysis.follow import Follower

    if arguments.lines < 0:
        raise ConfigurationError(f"-n {arguments.lines}: needs at least 0")
    if not arguments.interval > 0:
        raise ConfigurationError(f"--interval {arguments.interval}: needs seconds, a number over 0")
    logs = open_logs(arguments.runs, arguments.step_key)
    show = _Json(logs) if arguments.json else _SideBySide(logs, arguments.metrics)
    followers = [Follower(log.source, log.path if log.path.is_dir() else None) for log in logs]
    for place, follower in enumerate(followers):
        for record in follower.last(arguments.lines):
            show.record(place, record)
    while arguments.follow:
        time.sleep(arguments.interval)
        for place, follower in enumerate(followers):
            for news in follower.new():
                if isinstance(news, dict):
                    show.record(place, news)
                else:
                    show.cut(place, news)
    return 0


class _SideBySide:
    """A column for each run, and one line for each record."""

    def __init__(self, logs: Sequence[TrainingLog], metrics: Sequence[str] | None) -> None:
        self._metrics = metrics
        self._live = sys.stdout.isatty()
        self._alone = len(logs) == 1
        columns = shutil.get_terminal_size().columns if self._live else WIDE * len(logs)
        self._width = columns // len(logs)
        if not self._alone:
            self._line("".join(log.name[: self._width - 2].ljust(self._width) for log in logs))

    def record(self, place: int, record: Record) -> None:
        from .records import told

        if self._metrics and not any(name in record for name in self._metrics):
            return
        self._cell(place, told(record, self._metrics))

    def cut(self, place: int, cut: Cut) -> None:
        self._cell(place, "-- replaced --" if cut.step is None else f"-- back to step {cut.step:,} --")

    def _cell(self, place: int, text: str) -> None:
        short = text[: self._width - 2] if self._live and not self._alone else text
        self._line(" " * (self._width * place) + short)

    def _line(self, line: str) -> None:
        print(line.rstrip(), flush=True)


class _Json:
    def __init__(self, logs: Sequence[TrainingLog]) -> None:
        self._names = [log.name for log in logs]

    def record(self, place: int, record: Record) -> None:
        self._print({"run": self._names[place], **record})

    def cut(self, place: int, cut: Cut) -> None:
        self._print({"run": self._names[place], "kind": "cut", "global_step": cut.step})

    def _print(self, record: Record) -> None:
        from dalsegno.cli.tables import print_json_line

        print_json_line(record)
        sys.stdout.flush()
