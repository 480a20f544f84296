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
    add_server(parser)
    parser.add_argument(
        "--worker-id", metavar="NAME", help="the worker's name in all its legs (default: made from host and output_dir)"
    )
    parser.add_argument("--sync-every", metavar="H", type=int, help="local steps between synchronizations")
    parser.add_argument(
        "--num-fragments", metavar="N", type=int, help="synchronize the model in N parts, one at a time"
    )
    wire = parser.add_mutually_exclusive_group()
    wire.add_argument("--fp32-comm", action="store_true", help="send float32, not bfloat16")
    wire.add_argument("--int8-comm", action="store_true", help="send int8 with scales, half the bytes of bfloat16")
    parser.add_argument("--dylu", action="store_true", help="let the server choose the number of local steps")
    parser.add_argument(
        "--overlap-steps", metavar="N", type=int, help="local steps during which a submission travels (default: 0)"
    )
    parser.add_argument(
        "--mixing-factor",
        metavar="SHARE",
        type=float,
        help="with --overlap-steps: weight of the worker's own parameters beside the result (default: 0.5)",
    )
    parser.add_argument("--heartbeat-interval", metavar="SECONDS", type=float, help="time between two heartbeats")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, help="time to wait for the other workers (default: 600)"
    )
    parser.add_argument(
        "--max-sync-retries", metavar="N", type=int, help="further attempts of a synchronization (default: 3)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help=f"{' or '.join(RUN)} …")


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigurationError for an invalid option, or without a command."""
    from dalsegno import cli
    from dalsegno.diloco.worker.options import WorkerOptions

    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not words or words[0] not in RUN:
        raise ConfigurationError(f"after the options: -- {' … or -- '.join(RUN)} …")
    given = {
        "DILOCO_WORKER_ID": arguments.worker_id,
        "DILOCO_SYNC_EVERY": arguments.sync_every,
        "DILOCO_NUM_FRAGMENTS": arguments.num_fragments,
        "DILOCO_BF16_COMM": "false" if arguments.fp32_comm else None,
        "DILOCO_INT8_COMM": "true" if arguments.int8_comm else None,
        "DILOCO_DYLU": "true" if arguments.dylu else None,
        "DILOCO_OVERLAP_STEPS": arguments.overlap_steps,
        "DILOCO_MIXING_FACTOR": arguments.mixing_factor,
        "DILOCO_HEARTBEAT_INTERVAL": arguments.heartbeat_interval,
        "DILOCO_TIMEOUT": arguments.timeout,
        "DILOCO_MAX_SYNC_RETRIES": arguments.max_sync_retries,
    }
    variables = environment_of(arguments) | {name: str(value) for name, value in given.items() if value is not None}
    if WorkerOptions().with_environment({**os.environ, **variables}).server_addr is None:
        raise ConfigurationError("no server: give --server HOST:PORT, or set DILOCO_SERVER")
    os.environ.update(variables)
    return cli.main(words)
