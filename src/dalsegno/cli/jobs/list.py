"""List this user's jobs on this machine, or those of --remote: the newest first.

The state is 'running'; 'dead' if the process has ended without removing its file, which 'dalsegno jobs cleanup' does;
'elsewhere' for a job on another machine that shares the home directory.
"""

from __future__ import annotations

import argparse
from typing import Any

from dalsegno.cli.tables import Column, moment, print_json, print_table, text

from .arguments import add_json, add_remote, remote_client

STYLES = {"running": "green", "dead": "yellow", "unreadable": "red"}


def describe(parser: argparse.ArgumentParser) -> None:
    add_remote(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises NotRunning if nothing answers at --remote."""
    rows = _remote_rows(arguments) if arguments.remote else _rows()
    if arguments.json:
        print_json(rows)
        return 0
    if not rows:
        print("no jobs")
        return 0
    columns = [
        Column("job_id", "job"),
        Column("state", "state", style=lambda state: STYLES.get(state, "")),
        Column("hostname", "host"),
        Column("pid", "pid", text, right=True),
        Column("port", "port", text, right=True),
        Column("started_at", "started", lambda seconds: moment(seconds)[: len("2026-01-31 12:00")]),
        Column("output_dir", "output_dir"),
    ]
    print_table(columns, rows)
    return 0


def _rows() -> list[dict[str, Any]]:
    from dataclasses import asdict

    from dalsegno.control.jobs import list_jobs

    return [
        {**(asdict(job.endpoint) if job.endpoint else {}), "job_id": job.job_id, "state": job.state}
        for job in list_jobs()
    ]


def _remote_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    with remote_client(arguments) as client:
        return client.jobs()
