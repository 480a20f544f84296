"""Watch all jobs of this user on this machine, in a table that is redrawn every second, until Ctrl-C.

Into a file or a pipe, a table is printed each time; with --json, one line.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from dalsegno.cli.tables import Column, number, print_json_line, print_table, rich_table
from dalsegno.errors import ConfigurationError, DalsegnoError

from .arguments import add_json
from .status import shown, step_of

if TYPE_CHECKING:
    from dalsegno.control.client import JobClient
    from dalsegno.control.jobs import Job

AT_ONCE = 8
"""Jobs that are asked at the same time: one that does not answer must not hold up the others."""


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="time between two updates; default: %(default)g",
    )
    parser.add_argument("--updates", type=int, metavar="N", help="end after N updates")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigurationError if the interval is not positive."""
    if not arguments.interval > 0:
        raise ConfigurationError(f"--interval {arguments.interval}: must be a positive number of seconds")
    updates = _updates(arguments.interval, arguments.updates)
    if arguments.json:
        for rows in updates:
            print_json_line(rows)
            sys.stdout.flush()
    elif not sys.stdout.isatty():
        for rows in updates:
            print_table(_columns(), rows)
            sys.stdout.flush()
    else:
        _draw(updates)
    return 0


def _draw(updates: Iterator[list[dict[str, Any]]]) -> None:
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        for rows in updates:
            live.update(rich_table(_columns(), rows) if rows else "no jobs", refresh=True)


def _columns() -> list[Column]:
    return [
        Column("job_id", "job"),
        Column("state", "state", style=lambda state: "green" if state == "running" else "yellow"),
        Column("step", "step", right=True),
        Column("epoch", "epoch", number, right=True),
        Column("loss", "loss", shown, right=True),
        Column("eval_loss", "eval", shown, right=True),
        Column("learning_rate", "lr", shown, right=True),
        Column("steps_per_second", "steps/s", number, right=True),
        Column("output_dir", "output_dir"),
    ]


def _updates(interval: float, count: int | None) -> Iterator[list[dict[str, Any]]]:
    """A row for each job, again and again."""
    from dalsegno.control.jobs import list_jobs

    watched: dict[str, _Watched] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        number = 0
        while count is None or number < count:
            if number:
                time.sleep(interval)
            jobs = list_jobs()
            watched = {job.job_id: watched.get(job.job_id) or _Watched() for job in jobs}
            yield list(pool.map(lambda job: watched[job.job_id].row(job), jobs))  # noqa: B023  (used at once)
            number += 1


class _Watched:
    """A job, from one update to the next."""

    def __init__(self) -> None:
        self._client: JobClient | None = None
        self._last: tuple[float, int] | None = None  # time and step

    def row(self, job: Job) -> dict[str, Any]:
        row: dict[str, Any] = {"job_id": job.job_id, "state": job.state}
        if job.endpoint is None:
            return row
        row["output_dir"] = job.endpoint.output_dir
        if job.state != "running" or job.endpoint.port is None:
            return row if job.endpoint.port or job.state != "running" else {**row, "state": "running, no server"}
        try:
            status = self._status(job)
        except (DalsegnoError, OSError):
            self._client = None
            return {**row, "state": "no answer"}
        return {**status, **row, "step": step_of(status), "steps_per_second": self._speed(status)}

    def _status(self, job: Job) -> dict[str, Any]:
        from dalsegno.control.client import JobClient

        if self._client is None:
            self._client = JobClient.of(job)
        return self._client.status()

    def _speed(self, status: dict[str, Any]) -> float | None:
        now, before = (float(status["timestamp"]), int(status["global_step"])), self._last
        self._last = now
        return (now[1] - before[1]) / (now[0] - before[0]) if before and now[0] > before[0] else None
