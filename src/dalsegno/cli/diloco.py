"""Train one model on machines that communicate rarely: a server for the global parameters, and its workers.

docs/guides/diloco.md describes how.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from pathlib import Path

from dalsegno import diloco
from dalsegno.cli.command import (
    JSON,
    OF_TRAINING,
    Arguments,
    argument,
    command,
    flag,
    one_of,
    option,
    settings_of,
    several,
)
from dalsegno.cli.console import Column, number, numbers, print_facts, print_json, print_table, size, text, visible
from dalsegno.errors import ConfigurationError


def _variable(name: str, metavar: str, help: str) -> Arguments:
    """An option that stands for an environment variable of a worker: ``--sync-every`` for ``DILOCO_SYNC_EVERY``."""
    return option(name, metavar=metavar, help=help, dest=f"DILOCO_{name[2:].replace('-', '_').upper()}")


def _switch(name: str, variable: str, value: str, help: str) -> Arguments:
    """An option without a value, which gives ``value`` to an environment variable of a worker."""
    return argument(name, dest=variable, action="store_const", const=value, help=help)


SERVER = several(
    _variable("--server", "HOST:PORT", "or https://HOST:PORT (default: $DILOCO_SERVER)"),
    _variable("--token-file", "FILE", "the server's FOLDER/auth_token (default: $DILOCO_TOKEN)"),
    _variable("--certificate", "FILE", "the server's certificate (default: $DILOCO_CERTIFICATE)"),
)
"""How to reach the server; what is not given is taken from the environment."""


def _variables(arguments: argparse.Namespace) -> dict[str, str]:
    given = vars(arguments).items()
    return {name: str(value) for name, value in given if name.startswith("DILOCO_") and value is not None}


def _options(arguments: argparse.Namespace) -> diloco.WorkerOptions:
    """The options in the environment and of the command."""
    options = diloco.WorkerOptions().with_environment({**os.environ, **_variables(arguments)})
    if options.server_addr is None:
        raise ConfigurationError("no server: give --server HOST:PORT, or set DILOCO_SERVER")
    return options


DEFAULT_PORT = 8512


@command(
    argument("-o", "--output-dir", metavar="FOLDER", type=Path, required=True, help="folder of the run"),
    argument(
        "-n", "--num-workers", metavar="N", type=int, required=True, help="workers that the first round waits for"
    ),
    flag("--async", help="apply each submission when it arrives; no rounds", dest="asynchronous"),
    argument(
        "--dn-buffer-size",
        metavar="N",
        type=int,
        default=0,
        help="with --async: change the momentum at every N-th submission only (delayed Nesterov); 0: at each",
    ),
    flag("--dylu", help="adapt each worker's local steps to its speed (DyLU)"),
    option(
        "--dylu-base-sync-every",
        metavar="H",
        default=500,
        help="with --dylu: local steps of the fastest worker (default: 500)",
    ),
    option(
        "--heartbeat-timeout",
        metavar="SECONDS",
        default=120.0,
        help="rounds do not wait for a worker silent for this long; 0: they always wait (default: 120)",
    ),
    option("--min-workers", metavar="N", default=1, help="submissions that a round needs (default: 1)"),
    option(
        "--from-checkpoint",
        metavar="PATH",
        help="begin with the weights of a checkpoint, a run (its newest), or safetensors (default: the first worker's)",
    ),
    option("--save-every", metavar="N", default=10, help="outer steps between checkpoints (default: 10)"),
    option("--outer-lr", metavar="LR", default=0.7, help="outer learning rate (default: 0.7)"),
    option("--outer-momentum", metavar="M", default=0.9, help="default: 0.9"),
    flag("--no-nesterov", help="momentum without Nesterov"),
    argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)"),
    argument("--port", type=int, default=DEFAULT_PORT, help=f"default: {DEFAULT_PORT}; 0: a free one"),
    flag("--disable-auth", help="no token; only on addresses of this machine"),
    option("--certfile", metavar="FILE", help="TLS certificate in PEM"),
    option("--keyfile", metavar="FILE", help="private key of --certfile, in PEM"),
)
def _serve(arguments: argparse.Namespace) -> int:
    """Serve the global parameters of a DiLoCo run until SIGTERM or Ctrl-C.

        dalsegno diloco serve -o runs/outer -n 2 --host 0.0.0.0 --certfile cert.pem --keyfile key.pem

    The first worker sends the parameters, unless --from-checkpoint has them. Everything that the server has
    acknowledged is in FOLDER: a server that is started again, also after a kill, continues from there. Workers need the
    token in FOLDER/auth_token.
    """
    import logging

    if not arguments.asynchronous and arguments.dn_buffer_size:
        raise ConfigurationError("--dn-buffer-size needs --async: rounds change the momentum once each")
    if arguments.dn_buffer_size < 0:
        raise ConfigurationError(f"--dn-buffer-size {arguments.dn_buffer_size}: needs 0 or more")
    if arguments.dn_buffer_size and arguments.no_nesterov:
        raise ConfigurationError("--dn-buffer-size and --no-nesterov exclude each other; remove one of the two")
    if arguments.outer_lr <= 0 or not 0 <= arguments.outer_momentum < 1:
        raise ConfigurationError("--outer-lr must be over 0, and --outer-momentum from 0 to below 1")
    rate, momentum = arguments.outer_lr, arguments.outer_momentum
    if arguments.dn_buffer_size:
        optimizer = diloco.delayed_nesterov(rate, momentum, buffer_size=arguments.dn_buffer_size)
    else:
        optimizer = diloco.nesterov(rate, momentum, is_nesterov=not arguments.no_nesterov)
    rules = settings_of(diloco.Rules, arguments)
    server = diloco.DiLoCoServer(
        arguments.output_dir,
        arguments.num_workers,
        optimizer,
        rules,
        host=arguments.host,
        port=arguments.port,
        disable_auth=arguments.disable_auth,
        certfile=arguments.certfile,
        keyfile=arguments.keyfile,
        from_checkpoint=arguments.from_checkpoint,
    )
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arrived = _signals_arrive()

    def end_at_signal() -> None:
        os.read(arrived, 1)
        server.end()

    with server:
        print(f"serving  {server.address}")
        print(f"token    {'none' if server.token is None else server.token_file}", flush=True)
        threading.Thread(target=end_at_signal, daemon=True).start()
        server.wait()
    print("saved; the same command continues the run")
    return 0


def _signals_arrive() -> int:
    """Let SIGTERM and Ctrl-C write to a pipe, instead of ending the process. Returns the end to read.

    They are not blocked and awaited: a library's thread, started when it was imported, would still get them.
    """
    arrived, wake = os.pipe()
    os.set_blocking(wake, False)
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: None)
    signal.set_wakeup_fd(wake)
    return arrived


RUN = ("train", "launch")
"""Commands that may follow."""


@command(
    SERVER,
    _variable("--worker-id", "NAME", "the worker's name in all its legs (default: made from host and output_dir)"),
    _variable("--sync-every", "H", "local steps between synchronizations"),
    _variable("--num-fragments", "N", "synchronize the model in N parts, one at a time"),
    one_of(
        _switch("--fp32-comm", "DILOCO_BF16_COMM", "false", "send float32, not bfloat16"),
        _switch("--int8-comm", "DILOCO_INT8_COMM", "true", "send int8 with scales, half the bytes of bfloat16"),
    ),
    _switch("--dylu", "DILOCO_DYLU", "true", "let the server choose the number of local steps"),
    _variable("--overlap-steps", "N", "local steps during which a submission travels (default: 0)"),
    _variable(
        "--mixing-factor",
        "SHARE",
        "with --overlap-steps: weight of the worker's own parameters beside the result (default: 0.5)",
    ),
    _variable("--heartbeat-interval", "SECONDS", "time between two heartbeats"),
    _variable("--timeout", "SECONDS", "time to wait for the other workers (default: 600)"),
    _variable("--max-sync-retries", "N", "further attempts of a synchronization (default: 3)"),
    argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help=f"{' or '.join(RUN)} …"),
    statuses=OF_TRAINING,
)
def _worker(arguments: argparse.Namespace) -> int:
    """Run a training as a worker of a DiLoCo server.

        dalsegno diloco worker --server https://outer.example:8512 --token-file auth_token -- train run.toml
        dalsegno diloco worker --server https://outer.example:8512 --token-file auth_token -- launch --nproc 8 run.toml

    Sets the environment variables that DiLoCoCallback reads, and runs the command after '--'. The training's callbacks
    must include DiLoCoCallback. Options that are not given are taken from the environment, or from its arguments.
    """
    from dalsegno import cli

    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not words or words[0] not in RUN:
        raise ConfigurationError(f"after the options: -- {' … or -- '.join(RUN)} …")
    _options(arguments)
    os.environ.update(_variables(arguments))
    return cli.main(words)


@command(SERVER, JSON)
def _status(arguments: argparse.Namespace) -> int:
    """Show a DiLoCo server's version and workers."""
    from dalsegno.diloco.worker.client import connect

    with connect(_options(arguments)) as client:
        status = client.status()
    if arguments.json:
        print_json(status)
        return 0
    newest = status["newest"] or {}
    facts = [
        ("mode", text(status["mode"])),
        ("version", text(status["version"])),
        ("parameters", number(status["parameters"])),
        ("received", size(status["bytes_received"])),
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
            *numbers(steps_per_second="steps/s", seen_seconds_ago="seen s ago"),
        ]
        print_table(columns, status["workers"])
    return 0


COMMANDS = {"serve": _serve, "worker": _worker, "status": _status}
"""In the order of the help."""
