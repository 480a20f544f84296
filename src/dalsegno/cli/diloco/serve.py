"""Serve the global parameters of a DiLoCo run until SIGTERM or Ctrl-C.

    dalsegno diloco serve -o runs/outer -n 2 --host 0.0.0.0 --certfile cert.pem --keyfile key.pem

The first worker sends the parameters. Everything that the server has acknowledged is in FOLDER: a server that is
started again, also after a kill, continues from there. Workers need the token in FOLDER/auth_token.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

DEFAULT_PORT = 8512


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output-dir", metavar="FOLDER", type=Path, required=True, help="folder of the run")
    parser.add_argument(
        "-n", "--num-workers", metavar="N", type=int, required=True, help="workers that the first round waits for"
    )
    parser.add_argument(
        "--async", dest="asynchronous", action="store_true", help="apply each submission when it arrives; no rounds"
    )
    parser.add_argument(
        "--dn-buffer-size",
        metavar="N",
        type=int,
        default=0,
        help="with --async: change the momentum at every N-th submission only (delayed Nesterov); 0: at each",
    )
    parser.add_argument("--dylu", action="store_true", help="adapt each worker's local steps to its speed (DyLU)")
    parser.add_argument(
        "--dylu-base-sync-every",
        metavar="H",
        type=int,
        default=500,
        help="with --dylu: local steps of the fastest worker (default: 500)",
    )
    parser.add_argument(
        "--heartbeat-timeout",
        metavar="SECONDS",
        type=float,
        default=120.0,
        help="rounds do not wait for a worker silent for this long; 0: they always wait (default: 120)",
    )
    parser.add_argument(
        "--min-workers", metavar="N", type=int, default=1, help="submissions that a round needs (default: 1)"
    )
    parser.add_argument(
        "--save-every", metavar="N", type=int, default=10, help="outer steps between checkpoints (default: 10)"
    )
    parser.add_argument("--outer-lr", metavar="LR", type=float, default=0.7, help="outer learning rate (default: 0.7)")
    parser.add_argument("--outer-momentum", metavar="M", type=float, default=0.9, help="default: 0.9")
    parser.add_argument("--no-nesterov", action="store_true", help="momentum without Nesterov")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"default: {DEFAULT_PORT}; 0: a free one")
    parser.add_argument("--disable-auth", action="store_true", help="no token; only on addresses of this machine")
    parser.add_argument("--certfile", metavar="FILE", type=Path, help="TLS certificate in PEM")
    parser.add_argument("--keyfile", metavar="FILE", type=Path, help="private key of --certfile, in PEM")


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        ConfigurationError: for an invalid option.
        Locked: if another server, or a training, uses the folder.
        NotRunning: if the server cannot continue.
    """
    import logging

    from dalsegno.diloco import DiLoCoServer, Rules, delayed_nesterov, nesterov
    from dalsegno.errors import ConfigurationError

    if not arguments.asynchronous and arguments.dn_buffer_size:
        raise ConfigurationError("--dn-buffer-size needs --async: rounds change the momentum once each")
    if arguments.dn_buffer_size < 0:
        raise ConfigurationError(f"--dn-buffer-size {arguments.dn_buffer_size}: needs 0 or more")
    if arguments.dn_buffer_size and arguments.no_nesterov:
        raise ConfigurationError("--dn-buffer-size and --no-nesterov exclude each other; remove one of the two")
    if arguments.outer_lr <= 0 or not 0 <= arguments.outer_momentum < 1:
        raise ConfigurationError("--outer-lr must be over 0, and --outer-momentum from 0 to below 1")
    if arguments.dn_buffer_size:
        optimizer = delayed_nesterov(arguments.outer_lr, arguments.outer_momentum, buffer_size=arguments.dn_buffer_size)
    else:
        optimizer = nesterov(arguments.outer_lr, arguments.outer_momentum, is_nesterov=not arguments.no_nesterov)
    rules = Rules(
        num_workers=arguments.num_workers,
        asynchronous=arguments.asynchronous,
        min_workers=arguments.min_workers,
        heartbeat_timeout=arguments.heartbeat_timeout,
        save_every=arguments.save_every,
        dylu=arguments.dylu,
        dylu_base_sync_every=arguments.dylu_base_sync_every,
    )
    server = DiLoCoServer(
        arguments.output_dir,
        arguments.num_workers,
        optimizer,
        rules,
        host=arguments.host,
        port=arguments.port,
        disable_auth=arguments.disable_auth,
        certfile=arguments.certfile,
        keyfile=arguments.keyfile,
    )
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arrived = _signals_arrive()
    with server:
        print(f"serving  {server.address}")
        print(f"token    {'none' if server.token is None else server.token_file}", flush=True)
        threading.Thread(target=_end_at, args=(arrived, server.end), daemon=True).start()
        server.wait()
    print("saved; the same command continues the run")
    return 0


def _signals_arrive() -> int:
    """Let SIGTERM and Ctrl-C write to a pipe, instead of ending the process. Returns the end to read.

    They are not blocked and awaited: a library's thread, started when it was imported, would still get them.
    """
    arrived, wake = os.pipe()
    os.set_blocking(wake, False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake)
    return arrived


def _end_at(arrived: int, end: Callable[[], None]) -> None:
    os.read(arrived, 1)
    end()
