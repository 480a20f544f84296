"""Show the last records of runs side by side, and with -f new ones as they are logged.

With -f, a log that is rewound because its run resumed from a checkpoint is followed from there, and one that continues
in another file, in that file; stop with Ctrl-C. With --json: one record per line.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from dalsegno.cli.tables import fitted, print_json_line
from dalsegno.errors import ConfigurationError

from .arguments import add_json, add_metrics, add_runs

if TYPE_CHECKING:
    from dalsegno.analysis import TrainingLog
    from dalsegno.analysis.follow import Cut
    from dalsegno.logs.values import Record

WIDE = 56
"""Width of a run's column in a file or pipe, in characters."""


def describe(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing new records until Ctrl-C")
    parser.add_argument(
        "-n", "--lines", type=int, metavar="N", default=10, help="last records to print; default: %(default)s"
    )
    add_metrics(parser)
    parser.add_argument(
        "--interval",
        type=float,
        default=0.2,
        metavar="SECONDS",
        help="time between two reads with -f; default: %(default)s",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no log.
        ConfigurationError: for a negative number of lines, or an interval that is not positive.
    """
    from dalsegno.analysis import open_logs
    from dalsegno.analysis.follow import Follower

    if arguments.lines < 0:
        raise ConfigurationError(f"-n {arguments.lines}: must be at least 0")
    if not arguments.interval > 0:
        raise ConfigurationError(f"--interval {arguments.interval}: must be a positive number of seconds")
    logs = open_logs(arguments.runs, arguments.step_key)
    show = _Json(logs) if arguments.json else _SideBySide(logs, arguments.metrics)
    followers = [Follower(log.source, log.path if log.path.is_dir() else None) for log in logs]
    show.news([follower.last(arguments.lines) for follower in followers])
    while arguments.follow:
        time.sleep(arguments.interval)
        show.news([follower.new() for follower in followers])
    return 0


class _SideBySide:
    """One column per run; records read at the same time share a line."""

    def __init__(self, logs: Sequence[TrainingLog], metrics: Sequence[str] | None) -> None:
        self._metrics = metrics
        self._live = sys.stdout.isatty()
        self._alone = len(logs) == 1
        columns = shutil.get_terminal_size().columns if self._live else WIDE * len(logs)
        self._width = columns // len(logs)
        if not self._alone:
            self._print([log.name for log in logs])

    def news(self, of_runs: Sequence[Sequence[Record | Cut]]) -> None:
        """Print the news of each run."""
        cells = [[text for news in of_run if (text := self._as_text(news))] for of_run in of_runs]
        for row in zip_longest(*cells, fillvalue=""):
            self._print(row)

    def _as_text(self, news: Record | Cut) -> str:
        """Empty for a record that has none of the metrics."""
        from .records import as_words

        if not isinstance(news, dict):
            return "-- log replaced --" if news.step is None else f"-- back to step {news.step:,} --"
        if self._metrics and not any(name in news for name in self._metrics):
            return ""
        return as_words(news, self._metrics)

    def _print(self, cells: Sequence[str]) -> None:
        room = self._width - 2
        if self._live and not self._alone:
            cells = [fitted(cell, room) for cell in cells]
        elif not self._alone and sum(map(bool, cells)) > 1 and any(len(cell) > room for cell in cells):
            for place, cell in enumerate(cells):  # each on its own line, so that its column still names its run
                self._print([*[""] * place, cell])
            return
        print("  ".join(cell.ljust(room) for cell in cells).rstrip(), flush=True)


class _Json:
    def __init__(self, logs: Sequence[TrainingLog]) -> None:
        self._names = [log.name for log in logs]

    def news(self, of_runs: Sequence[Sequence[Record | Cut]]) -> None:
        for name, of_run in zip(self._names, of_runs, strict=True):
            for news in of_run:
                record = news if isinstance(news, dict) else {"kind": "cut", "global_step": news.step}
                print_json_line({"run": name, **record})
        sys.stdout.flush()
