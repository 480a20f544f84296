"""A round of a DiLoCo server, beside the same bytes through plain sockets, and beside torch.save.

Each of the two workers is a process that sends a submission of bfloat16, waits for the other worker's, and receives as
many bytes of parameters. The first rounds, which touch all memory and write all files for the first time, do not count:
the server overwrites the files of submissions once a checkpoint has them.
"""

from __future__ import annotations

import io
import itertools
import os
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from dalsegno.diloco import DiLoCoClient, DiLoCoServer, Rules
from dalsegno.diloco.server.outer import nesterov
from dalsegno.diloco.wire.messages import Settings, Submission
from dalsegno.diloco.wire.signature import Specs, TensorSpec, as_sent
from dalsegno.testing import start_ranks

from .row import Row, count, duration, three_digits
from .timing import figure

WORKERS = 2
TENSORS = 16
_PIECE = 1 << 20
SAVE_EVERY = 3
"""Rounds between two checkpoints of the server; as many do not count."""


def server_rounds(size: int, repeats: int) -> list[Row]:
    """Rounds of two workers with ``size`` bytes each: sent, applied, and received again."""
    ways: dict[str, Callable[[int, int], list[float]]] = {
        "ours": _ours,
        "sockets": _sockets,
        "parts": lambda size, repeats: _sockets(size, repeats, with_step=True),
        "saved": _saved,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(min(2, repeats)):  # in turns, since the disk's and the machine's speed change
        for name, way in ways.items():
            seconds[name] += way(size, repeats)
    ours, sockets, parts, saved = map(figure, seconds.values())
    return [
        Row(
            f"a round of {WORKERS} workers with {count(size)}B each, both ways",
            duration(ours),
            f"the same bytes both ways through sockets: {duration(sockets)}",
            f"{three_digits(ours / sockets)} ×",
            "≤ 2 ×",
            ours <= 2 * sockets,
            ours.spread,
        ),
        Row(
            "the same",
            duration(ours),
            f"sockets, each submission on disk, then mean and step in memory, without checksums: {duration(parts)}",
            f"{three_digits(ours / parts)} ×",
            f"what these parts take here: {three_digits(parts / sockets)} × sockets",
            None,
            ours.spread,
        ),
        Row(
            "the same",
            duration(ours),
            f"torch.save to a BytesIO, HTTP, torch.load, mean and step: {duration(saved)}",
            f"{three_digits(ours / saved)} ×",
            "≤ 0.33 ×",
            ours <= saved / 3,
            ours.spread,
        ),
    ]


def _seconds_per_round(work: Callable[..., list[float]], repeats: int, *arguments: Any) -> list[float]:
    """Of each round after the first ones, from the end of the round before. ``work``: returns when its rounds ended."""
    running = [start_ranks(work, 1, number, _rounds(repeats), *arguments) for number in range(WORKERS)]
    outcomes = [outcome for ranks in running for outcome in ranks.wait(3600)]
    if failed := [outcome.error for outcome in outcomes if outcome.exit_code]:
        raise RuntimeError(failed[0])
    ends = [max(each) for each in zip(*(outcome.value for outcome in outcomes), strict=True)]
    return [end - before for before, end in itertools.pairwise(ends[SAVE_EVERY:])]


def _rounds(repeats: int) -> int:
    """Number of rounds, with those that do not count."""
    return SAVE_EVERY + 1 + repeats


def _specs(size: int) -> Specs:
    return tuple(TensorSpec(f"p.{each}", torch.bfloat16, (size // TENSORS // 2,)) for each in range(TENSORS))


def _tensors(specs: Specs) -> list[torch.Tensor]:
    return [torch.full(spec.shape, 1e-3, dtype=spec.dtype) for spec in specs]


# -- this package -----------------------------------------------------------------------------------------------------


def _ours(size: int, repeats: int) -> list[float]:
    specs = _specs(size)
    settings = Settings([spec.to_json() for spec in specs], 1)
    rules = Rules(WORKERS, heartbeat_timeout=0.0, save_every=SAVE_EVERY)
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".benchmark-") as folder,
        DiLoCoServer(folder, WORKERS, rules=rules) as server,
        DiLoCoClient(server.address, token=server.token) as client,
    ):
        client.register("w0", settings, count=None, run_id=None, dylu=False)
        client.initialize("w0", specs, _tensors(specs))
        for number in range(WORKERS):
            client.register(f"w{number}", settings, count=None, run_id=None, dylu=False)
        return _seconds_per_round(_submit_and_fetch, repeats, size, server.address, server.token)


def _submit_and_fetch(worker: int, rounds: int, size: int, address: str, token: str) -> list[float]:
    specs, name, ends = _specs(size), f"w{worker}", []
    tensors = _tensors(specs)
    targets = _tensors(specs)
    with DiLoCoClient(address, token=token) as client:
        for number in range(1, rounds + 1):
            submission = Submission(name, number, number - 1, 0, True, 1, 1, 1.0, None, number - 1)
            client.offer(submission)
            client.submit(submission, as_sent(specs, bf16=True), tensors)
            result = client.result(name, number, wait=60)
            assert result is not None, "the round ends"
            client.fetch(result, specs, lambda reader: [reader.tensor(target) for target in targets])
            ends.append(time.monotonic())
    return ends


# -- plain sockets ----------------------------------------------------------------------------------------------------


def _sockets(size: int, repeats: int, *, with_step: bool = False) -> list[float]:
    """``with_step``: each worker's bytes are in a file, written as they arrive and fsynced; then the thread of the last
    worker makes an outer step. No server does less than that."""
    with ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        folder = held.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".benchmark-"))
        memories = [bytearray(size) for _ in range(WORKERS)]
        everyone = threading.Barrier(WORKERS, _outer_step_of(memories) if with_step else None)
        threads = []
        for number, memory in enumerate(memories):
            path = Path(folder) / str(number) if with_step else None
            arguments = listener, everyone, memoryview(memory), _rounds(repeats), path
            threads.append(threading.Thread(target=_serve_socket, args=arguments, daemon=True))
            threads[-1].start()
        seconds = _seconds_per_round(_use_socket, repeats, size, listener.getsockname())
        for thread in threads:
            thread.join()
    return seconds


def _outer_step_of(memories: list[bytearray]) -> Callable[[], None]:
    """An outer step that takes submissions from these memories, and leaves the parameters in all of them."""
    received = [torch.frombuffer(memory, dtype=torch.bfloat16) for memory in memories]
    parameters = torch.nn.Parameter(torch.zeros(len(received[0])))
    optimizer = nesterov()([parameters])
    mean, share = (torch.zeros(len(parameters)) for _ in range(2))

    @torch.no_grad()
    def step() -> None:
        mean.copy_(received[0]).mul_(1 / len(received))
        for each in received[1:]:
            mean.add_(share.copy_(each).mul_(1 / len(received)))
        parameters.grad = mean
        optimizer.step()
        for each in received:
            each.copy_(parameters)

    return step


def _serve_socket(
    listener: socket.socket, everyone: threading.Barrier, memory: memoryview, rounds: int, path: Path | None
) -> None:
    with listener.accept()[0] as connection:
        for _ in range(rounds):
            if path is None:
                _receive(connection, memory)
            else:
                _receive_on_disk(connection, memory, path)
            everyone.wait()
            connection.sendall(memory)


def _receive_on_disk(connection: socket.socket, memory: memoryview, path: Path) -> None:
    """The file is overwritten: the fastest way on this disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for begin in range(0, len(memory), _PIECE):
        piece = memory[begin : begin + _PIECE]
        _receive(connection, piece)
        os.write(descriptor, piece)
    os.fsync(descriptor)
    os.close(descriptor)


def _use_socket(worker: int, rounds: int, size: int, address: tuple[str, int]) -> list[float]:
    sent, received, ends = memoryview(bytearray(b"\1" * size)), memoryview(bytearray(b"\1" * size)), []
    with socket.create_connection(address) as connection:
        for _ in range(rounds):
            connection.sendall(sent)
            _receive(connection, received)
            ends.append(time.monotonic())
    return ends


def _receive(connection: socket.socket, memory: memoryview) -> None:
    while memory:
        memory = memory[connection.recv_into(memory) :]


# -- torch.save -------------------------------------------------------------------------------------------------------


def _saved(size: int, repeats: int) -> list[float]:
    """As Forgather's server does it: bodies in memory, pickled; a thread for each worker; the last one to arrive makes
    the outer step."""
    specs = _specs(size)
    parameters = {spec.name: torch.nn.Parameter(torch.zeros(spec.shape)) for spec in specs}
    optimizer = nesterov()(parameters.values())
    arrived: list[dict[str, torch.Tensor]] = []

    def step() -> None:
        for name, parameter in parameters.items():
            parameter.grad = torch.stack([each[name].float() for each in arrived]).mean(0)
        optimizer.step()
        arrived.clear()

    everyone = threading.Barrier(WORKERS, action=step)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            arrived.append(torch.load(io.BytesIO(body), weights_only=True))
            everyone.wait()
            answer = _packed({spec.name: parameters[spec.name].detach().to(spec.dtype) for spec in specs})
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    with ExitStack() as held:
        server = held.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        held.callback(thread.join)
        held.callback(server.shutdown)
        return _seconds_per_round(_post, repeats, size, f"http://127.0.0.1:{server.server_port}/")


def _post(worker: int, rounds: int, size: int, address: str) -> list[float]:
    ends = []
    specs = _specs(size)
    named = {spec.name: tensor for spec, tensor in zip(specs, _tensors(specs), strict=True)}
    for _ in range(rounds):
        with urllib.request.urlopen(address, _packed(named), timeout=600) as answer:
            torch.load(io.BytesIO(answer.read()), weights_only=True)
        ends.append(time.monotonic())
    return ends


def _packed(tensors: dict[str, torch.Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return buffer.getvalue()
