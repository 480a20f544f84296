"""The bytes that a DiLoCo worker sends per step, beside those of DDP's all-reduce; both counted by the kernel.

Linux counts, for each TCP connection, the bytes that the other side has acknowledged. So all of a process counts: heads
of requests, heartbeats, and whatever gloo adds to the gradients.
"""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dalsegno.diloco import DiLoCoServer, DiLoCoWorker, Rules, WorkerOptions
from dalsegno.testing import run_ranks, start_ranks

from .row import Row, three_digits

WORKERS = 2
WIDTH = 1024
"""Of the model, a square matrix."""
DDP_STEPS = 5

_BYTES_ACKED = struct.Struct("<120xQ")  # its place in the kernel's struct tcp_info


def bytes_per_step(sync_every: int) -> Row:
    """What one of two workers sends in a step."""
    with tempfile.TemporaryDirectory() as folder, _server(folder) as server:
        running = [start_ranks(_work, 1, number, sync_every, server.address, server.token) for number in range(WORKERS)]
        outcomes = [outcome for ranks in running for outcome in ranks.wait(3600)]
    if failed := [outcome.error for outcome in outcomes if outcome.exit_code]:
        raise RuntimeError(failed[0])
    ours = sum(outcome.value for outcome in outcomes) / WORKERS / sync_every
    ddp = sum(run_ranks(_all_reduce, WORKERS)) / WORKERS / DDP_STEPS
    return Row(
        f"bytes that one of {WORKERS} workers sends per step, H = {sync_every}, bf16",
        f"{ours:,.0f}",
        f"DDP's all-reduce of fp32 gradients over gloo, counted likewise: {ddp:,.0f}",
        f"1/{three_digits(ddp / ours)}",
        f"≤ 1/{sync_every} · 0.5, and 1 % for the heads of requests",
        ours <= 1.01 * 0.5 / sync_every * ddp,
    )


def _server(folder: str) -> DiLoCoServer:
    return DiLoCoServer(folder, WORKERS, rules=Rules(WORKERS, heartbeat_timeout=0.0))


def _model() -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH, bias=False)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _work(number: int, sync_every: int, address: str, token: str) -> int:
    """The bytes of one round."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    of_closed = _count_closed()
    options = WorkerOptions(address, sync_every=sync_every, worker_id=f"w{number}", token=token)
    with DiLoCoWorker(model, options, optimizer=optimizer):
        before = of_closed[0] + _of_open()  # one of the workers has sent the first parameters
        for _ in range(sync_every):
            _step(model, optimizer)
        return of_closed[0] + _of_open() - before


def _all_reduce() -> int:
    model = DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    _step(model, optimizer)
    torch.distributed.barrier()
    before = _of_open()
    for _ in range(DDP_STEPS):
        _step(model, optimizer)
    torch.distributed.barrier()
    return _of_open() - before


def _of_open() -> int:
    """Bytes that this process has sent on the TCP connections that it has open."""
    total = 0
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # the listing's own is closed
            if path.is_socket():
                connection = socket.socket(fileno=os.dup(int(path.name)))
                total += _of(connection)
                os.close(connection.detach())
    return total


def _of(connection: socket.socket) -> int:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
    except OSError:  # not TCP
        return 0
    return int(_BYTES_ACKED.unpack(info)[0])


def _count_closed() -> list[int]:
    """From now on, the sum of what was sent on connections that this process has closed."""
    total = [0]
    close: Any = socket.socket._real_close  # type: ignore[attr-defined]

    def counted(self: socket.socket) -> None:
        total[0] += _of(self)
        close(self)

    socket.socket._real_close = counted  # type: ignore[attr-defined]
    return total
