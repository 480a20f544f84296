"""Show a DiLoCo server's version and workers."""

from __future__ import annotations

import argparse
import os

from dalsegno.cli.arguments import add_json
from dalsegno.cli.tables import Column, number, print_facts, print_json, print_table, text, visible
from dalsegno.errors import ConfigurationError

from .arguments import add_server, environment_of


def describe(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotRunning: if nothing answers there.
        ConfigurationError: if the token is refused, or no server is named.
    """
    from dalsegno.diloco.worker.client import connect
    from dalsegno.diloco.worker.options import WorkerOptions
    from dalsegno.system.byte_sizes import format_bytes

    options = WorkerOptions().with_environment(dict(os.environ) | environment_of(arguments))
    if options.server_addr is None:
        raise ConfigurationError("no server: give --server HOST:PORT, or set DILOCO_SERVER")
    with connect(options) as client:
        status = client.status()
    if arguments.json:
        print_json(status)
        return 0
    newest = status["newest"] or {}
    facts = [
        ("mode", text(status["mode"])),
        ("version", text(status["version"])),
        ("parameters", number(status["parameters"])),
        ("received", format_bytes(status["bytes_received"])),
        *([("outer loss", number(newest["loss"]))] if "loss" in newest else []),
        *((name, visible(str(status[name]))) for name in ("failure", "obstacle") if status[name]),
    ]
    print_facts(client.address, facts)
    if status["workers"]:
        columns = [
            Column("worker_id", "worker"),
            Column("state", "state", style=lambda state: "yellow" if state == "dead" else ""),
            Column("submissions", "submissions", text, right=True),
            Column("base", "version", text, right=True),
            Column("staleness", "staleness", text, right=True),
            Column("steps_per_second", "steps/s", number, right=True),
            Column("seen_seconds_ago", "seen s ago", number, right=True),
        ]
        print_table(columns, status["workers"])
    return 0
