"""Run a training as a worker of a DiLoCo server.

    dalsegno diloco worker --server outer.example:8512 --token-file auth_token -- train run.toml
    dalsegno diloco worker --server outer.example:8512 --token-file auth_token -- launch --nproc 8 run.toml

Sets the environment variables that DiLoCoCallback reads, and runs the command after '--'. The training's callbacks must
include DiLoCoCallback. Options that are not given are taken from the environment, or from its arguments.
"""

from __future__ import annotations

import argparse
import os

from dalsegno.cli.exit_statuses import OF_TRAINING
from dalsegno.errors import ConfigurationError

from .arguments import add_server, environment_of

EXIT_STATUSES = OF_TRAINING

RUN = ("train", "launch")
"""Commands that may follow."""


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_server(parser)
    parser.add_argument("--worker-id", metavar="NAME", help="the same in all its legs (default: made from output_dir)")
    parser.add_argument("--sync-every", metavar="H", type=int, help="local steps between synchronizations")
    parser.add_argument(
        "--num-fragments", metavar="N", type=int, help="synchronize the model in N parts, one at a time"
    )
    parser.add_argument("--fp32-comm", action="store_true", help="send float32, not bfloat16")
    parser.add_argument("--dylu", action="store_true", help="let the server choose the number of local steps")
    parser.add_argument("--heartbeat-interval", metavar="SECONDS", type=float, help="time between two heartbeats")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help=f"{' or '.join(RUN)} …")


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        ConfigurationError: for an invalid option, or without a command.
    """
    from dalsegno import cli
    from dalsegno.diloco.options import WorkerOptions

    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not words or words[0] not in RUN:
        raise ConfigurationError(f"after the options: -- {' … or -- '.join(RUN)} …")
    given = {
        "DILOCO_WORKER_ID": arguments.worker_id,
        "DILOCO_SYNC_EVERY": arguments.sync_every,
        "DILOCO_NUM_FRAGMENTS": arguments.num_fragments,
        "DILOCO_BF16_COMM": "false" if arguments.fp32_comm else None,
        "DILOCO_DYLU": "true" if arguments.dylu else None,
        "DILOCO_HEARTBEAT_INTERVAL": arguments.heartbeat_interval,
    }
    os.environ.update(environment_of(arguments))
    os.environ.update({name: str(value) for name, value in given.items() if value is not None})
    if WorkerOptions().with_environment().server_addr is None:
        raise ConfigurationError("no server: give --server HOST:PORT, or set DILOCO_SERVER")
    return cli.main(words)
