"""pytest-xdist's workers, forked from one process that has imported what most tests import.

Executed, each worker would import it anew, which is most of its collection. What xdist executes in a worker's place is
this file: it hands its streams to the worker, and ends when that one does.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

IMPORTED = (
    "dalsegno.testing",
    "dalsegno.training.preloaded",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "torchmetrics.classification",
    "trl",
    "pytorch_lightning",
    "moto.server",
    "s3fs",
    "wandb",
    "fastapi",
    "apprise",
)
"""What takes longest. A worker imports the rest itself."""


def fork_from_one(specs: Iterable[Any], folder: Path) -> subprocess.Popen[bytes]:
    """Start the process that the workers of these ``execnet`` specs are forked from; it ends with its input."""
    place = folder / "workers"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place))
        listening.listen()
        tests = str(Path(__file__).parents[1])
        code = f"import sys; sys.path.insert(0, {tests!r}); from support import workers; workers.serve"
        start = [sys.executable, "-c", f"{code}({listening.fileno()})"]
        process = subprocess.Popen(
            start,
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what libraries say when they are imported
            pass_fds=[listening.fileno()],
        )
    for spec in specs:
        spec.python = f"{sys.executable} -IS {__file__} {place}"
    return process


def serve(listening: int) -> None:
    import gc

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with pytest
    gc.disable()
    for name in IMPORTED:
        with suppress(Exception):  # a worker will raise it, and report it
            import_module(name)
    gc.freeze()
    gc.enable()
    alive: dict[int, socket.socket] = {}
    with socket.socket(fileno=listening) as server:
        while True:
            ready, _, _ = select.select([sys.stdin, server, *alive], [], [])
            if sys.stdin in ready:
                os._exit(0)
            for ended in alive.keys() & {*ready}:
                os.waitid(os.P_PIDFD, ended, os.WEXITED)
                os.close(ended)
                alive.pop(ended).close()
            if server in ready:
                client, _ = server.accept()
                if not (pid := os.fork()):
                    break
                alive[os.pidfd_open(pid)] = client
    for each, other in alive.items():
        os.close(each)
        other.close()
    _be_worker(client)


def _be_worker(client: socket.socket) -> None:
    import numpy as np

    with client:
        _, streams, *_ = socket.recv_fds(client, 1, 3)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    np.random.seed()  # else all workers would draw the same
    exec(eval(sys.stdin.readline()), vars(sys.modules["__main__"]))  # what execnet sends first is the worker's program


def _stand_in(place: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the worker
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(place)
        socket.send_fds(server, [b"."], [0, 1, 2])
        os.close(0)
        os.close(1)
        server.recv(1)


if __name__ == "__main__":
    _stand_in(sys.argv[1])
