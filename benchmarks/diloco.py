"""DiLoCo: the loss that its workers reach, the bytes that they send, and what a round costs its server.

The loss is that of a small language model over the bytes of this package's own source, on parts of it that no worker
trains on. One that steps with the gradients of all workers at every step stands for DDP: it is the same computation.
"""

from __future__ import annotations

import io
import itertools
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import dalsegno
from dalsegno.diloco import DiLoCoClient, DiLoCoServer, DiLoCoWorker, Rules, WorkerOptions
from dalsegno.diloco.signature import Specs, TensorSpec, as_sent
from dalsegno.diloco.state import Settings, Submission
from dalsegno.testing.tiny import TinyLanguageModel

from .row import Row, count, duration, three_digits

STEPS = 600
SYNC_EVERY = 50
WORKERS = (2, 4)
BATCH = 4
CONTEXT = 32
LEARNING_RATE = 2e-3
SIZE = 512 << 20
REPEATS = 3

SMALL = {"steps": 4, "sync_every": 2, "workers": (2,), "size": 1 << 20, "repeats": 1}
"""Of ``run``: with these it takes seconds, and measures nothing."""


def run(
    steps: int = STEPS,
    sync_every: int = SYNC_EVERY,
    workers: tuple[int, ...] = WORKERS,
    size: int = SIZE,
    repeats: int = REPEATS,
) -> list[Row]:
    return [*losses(steps, sync_every, workers), *server_rounds(size, repeats)]


def losses(steps: int = STEPS, sync_every: int = SYNC_EVERY, workers: tuple[int, ...] = WORKERS) -> list[Row]:
    """The loss after the same number of tokens, and the bytes that were sent for it."""
    data = _Text()
    alone = data.loss(_every_step(data, steps, 1))
    rows = []
    for number in workers:
        together = data.loss(_every_step(data, steps, number))
        model, sent = _diloco(data, steps, sync_every, number)
        ours = data.loss(model)
        rows.append(
            Row(
                f"loss of {number} workers, H = {sync_every}, after {steps} steps",
                f"{ours:.3f}",
                f"DDP {together:.3f}; one worker alone {alone:.3f}",
                f"{three_digits(ours / together)} ×",
                "≤ 1.03 × DDP, below one alone",
                ours <= 1.03 * together and ours < alone,
            )
        )
        parameters = sum(each.numel() for each in model.parameters())
        all_reduce = 4 * parameters * 2 * (number - 1) / number
        target = 0.5 / sync_every * 4 * parameters / all_reduce * 1.05  # with the heads of requests
        rows.append(
            Row(
                f"bytes that one of {number} workers sends per step, H = {sync_every}, bf16",
                f"{sent / steps:,.0f}",
                f"a ring all-reduce of fp32 gradients, computed: {all_reduce:,.0f}",
                f"1/{all_reduce / (sent / steps):.0f}",
                f"≤ 1/{1 / target:.0f}",
                sent / steps / all_reduce <= target,
            )
        )
    return rows


def server_rounds(size: int = SIZE, repeats: int = REPEATS) -> list[Row]:
    """A round of two workers with so many bytes each: sent, applied, and fetched again."""
    specs = tuple(TensorSpec(f"p.{each}", torch.bfloat16, (size // 16 // 2,)) for each in range(16))
    tensors = [torch.full(spec.shape, 1e-3, dtype=spec.dtype) for spec in specs]
    ours = statistics.median(_round(specs, tensors) for _ in range(repeats))
    plain = statistics.median(_through_sockets(4 * size) for _ in range(repeats))
    pickled = statistics.median(_pickled(tensors) for _ in range(repeats)) + plain
    return [
        Row(
            f"a round of 2 workers with {count(size)}B each, both ways",
            duration(ours),
            f"the same bytes through a socket: {duration(plain)}",
            f"{three_digits(ours / plain)} ×",
            "≤ 2 ×",
            ours <= 2 * plain,
        ),
        Row(
            "the same",
            duration(ours),
            f"with torch.save to a BytesIO and torch.load: {duration(pickled)}",
            f"{three_digits(ours / pickled)} ×",
            "≤ 0.33 ×",
            ours <= pickled / 3,
        ),
    ]


class _Text:
    def __init__(self) -> None:
        files = sorted(Path(dalsegno.__file__).parent.rglob("*.py"))
        text = b"".join(path.read_bytes() for path in files)
        whole = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        cut = len(whole) * 9 // 10
        self._train, self._held_out = whole[:cut], whole[cut:]

    def batches(self, worker: int) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(worker)
        while True:
            begins = torch.randint(len(self._train) - CONTEXT - 1, (BATCH,), generator=generator)
            yield _batch(self._train, begins)

    @torch.no_grad()
    def loss(self, model: TinyLanguageModel) -> float:
        begins = torch.arange(0, len(self._held_out) - CONTEXT - 1, len(self._held_out) // 500)
        return float(model.eval()(**_batch(self._held_out, begins)))


def _batch(text: torch.Tensor, begins: torch.Tensor) -> dict[str, torch.Tensor]:
    places = begins[:, None] + torch.arange(CONTEXT + 1)
    return {"input_ids": text[places[:, :-1]], "labels": text[places[:, 1:]]}


def _model() -> tuple[TinyLanguageModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = TinyLanguageModel(width=32, context=CONTEXT, dropout=0.0)
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def _every_step(data: _Text, steps: int, workers: int) -> TinyLanguageModel:
    """What DDP computes."""
    model, optimizer = _model()
    streams = [data.batches(worker) for worker in range(workers)]
    for _ in range(steps):
        for stream in streams:
            (model(**next(stream)) / workers).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _diloco(data: _Text, steps: int, sync_every: int, workers: int) -> tuple[TinyLanguageModel, float]:
    """The model, and the bytes that each worker has sent."""
    models = [_model() for _ in range(workers)]
    sent = [0] * workers

    def train(worker: int, address: str, token: str | None) -> None:
        model, optimizer = models[worker]
        options = WorkerOptions(address, sync_every=sync_every, worker_id=f"w{worker}", token=token)
        with DiLoCoWorker(model, options, optimizer=optimizer, samples_per_step=BATCH) as joined:
            before = joined._joined_link().client.bytes_sent  # one of them has sent the first parameters
            for batch in itertools.islice(data.batches(worker), steps):
                model(**batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            sent[worker] = joined._joined_link().client.bytes_sent - before

    with tempfile.TemporaryDirectory() as folder, DiLoCoServer(folder, workers, rules=_rules(workers)) as server:
        _together([lambda number=each: train(number, server.address, server.token) for each in range(workers)])
    return models[0][0], sum(sent) / workers


def _rules(workers: int) -> Rules:
    return Rules(workers, heartbeat_timeout=0.0, save_every=1000)


def _together(jobs: list[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _round(specs: Specs, tensors: list[torch.Tensor]) -> float:
    settings = Settings([spec.to_json() for spec in specs], 1)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, DiLoCoServer(folder, 2, rules=_rules(2)) as server:
        clients = [DiLoCoClient(server.address, token=server.token) for _ in range(2)]
        clients[0].register("w0", settings, count=None, run_id=None, dylu=False)
        clients[0].initialize("w0", specs, tensors)
        for number, client in enumerate(clients):
            client.register(f"w{number}", settings, count=None, run_id=None, dylu=False)

        def work(number: int) -> None:
            client, name = clients[number], f"w{number}"
            submission = Submission(name, 1, 0, 0, True, 1, 1, 1.0, None, 0)
            client.offer(submission)
            client.submit(submission, as_sent(specs, bf16=True), tensors)
            result = client.result(name, 1, wait=60)
            assert result is not None, "the round ends"
            target = torch.empty(specs[0].shape, dtype=specs[0].dtype)
            client.fetch(result, specs, lambda reader: [reader.tensor(target) for _ in reader.order])

        began = time.perf_counter()
        _together([lambda each=number: work(each) for number in range(2)])
        return time.perf_counter() - began


def _through_sockets(size: int) -> float:
    """Seconds for so many bytes through a socket on loopback."""
    listener = socket.create_server(("127.0.0.1", 0))
    piece, target = bytes(1 << 20), bytearray(1 << 20)

    def send() -> None:
        with socket.create_connection(listener.getsockname()) as connection:
            for _ in range(size >> 20):
                connection.sendall(piece)

    thread = threading.Thread(target=send)
    began = time.perf_counter()
    thread.start()
    with listener, listener.accept()[0] as connection:
        while connection.recv_into(target):
            pass
    thread.join()
    return time.perf_counter() - began


def _pickled(tensors: list[torch.Tensor]) -> float:
    """Seconds to pack and unpack what two workers send and receive, as with torch.save."""
    began = time.perf_counter()
    for _ in range(4):
        buffer = io.BytesIO()
        torch.save(dict(enumerate(tensors)), buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    return time.perf_counter() - began
