"""DiLoCo: the loss that its workers reach, the bytes that they send, and what a round costs its server.

The loss is that of a small language model over the bytes of this package's own source, on parts of it that no worker
trains on. One that steps with the gradients of all workers at every step stands for DDP: it is the same computation.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import dalsegno
from dalsegno.diloco import DiLoCoServer, DiLoCoWorker, Rules, WorkerOptions
from dalsegno.diloco.server.outer import nesterov
from dalsegno.diloco.server.rounds import Applied, Joined
from dalsegno.diloco.server.run import OuterRun
from dalsegno.diloco.wire.messages import Submission
from dalsegno.diloco.wire.signature import TensorSpec
from dalsegno.testing import start_ranks
from dalsegno.testing.tiny import TinyLanguageModel

from .diloco_bytes import bytes_per_step
from .diloco_crowd import crowd
from .diloco_rounds import server_rounds
from .row import Row, count, duration, three_digits
from .timing import Figure, figure

STEPS = 3000
WARM_UP = 600
"""Steps that all make together before the workers part, as in the paper."""
SYNC_EVERY = 50
WORKERS = (2, 4)
WIRES = ("bf16", "int8")
BATCH = 8
CONTEXT = 32
LEARNING_RATE = 8e-3
LOOKS = 10
"""Points of a curve."""
SELDOM = 500
"""Steps between two synchronizations where bytes are counted."""
SIZE = 512 << 20
REPEATS = 5
CROWDS = ((64, 60.0, 0.1),)
"""Asynchronous workers, seconds, and deaths of each per minute."""

SMALL = {
    "steps": 6,
    "warm_up": 2,
    "sync_every": 2,
    "workers": (2,),
    "wires": ("int8",),
    "size": 1 << 20,
    "repeats": 1,
    "seldom": 2,
    "crowds": ((3, 1.0, 60.0),),
}
"""Of ``run``: with these it takes seconds, and measures nothing."""

Curve = list[tuple[int, float]]
"""Steps, and the loss after them."""


def run(
    steps: int = STEPS,
    warm_up: int = WARM_UP,
    sync_every: int = SYNC_EVERY,
    workers: tuple[int, ...] = WORKERS,
    wires: tuple[str, ...] = WIRES,
    size: int = SIZE,
    repeats: int = REPEATS,
    seldom: int = SELDOM,
    crowds: tuple[tuple[int, float, float], ...] = CROWDS,
) -> list[Row]:
    return [
        *losses(steps, warm_up, sync_every, workers, wires),
        bytes_per_step(seldom),
        *server_rounds(size, repeats),
        server_memory(size),
        overlapped_steps(size // 8, repeats),
        *(crowd(*each) for each in crowds),
    ]


def losses(
    steps: int = STEPS,
    warm_up: int = WARM_UP,
    sync_every: int = SYNC_EVERY,
    workers: tuple[int, ...] = WORKERS,
    wires: tuple[str, ...] = WIRES,
    curves: dict[str, Curve] | None = None,
) -> list[Row]:
    """The loss after the same number of tokens, and the bytes that were sent for it.

    Args:
        curves: is filled with all of them.
    """
    curves = {} if curves is None else curves
    curves["one worker alone"] = _Training(steps).alone(1)
    alone = curves["one worker alone"][-1][1]
    rows = []
    for number in workers:
        curves[f"DDP, {number}"] = _Training(steps).alone(number)
        together = curves[f"DDP, {number}"][-1][1]
        for wire in wires:
            curve, sent, parameters = _diloco(steps, warm_up, sync_every, number, wire)
            curves[f"DiLoCo, {number}, {wire}"] = curve
            ours = curve[-1][1]
            rows.append(
                Row(
                    f"loss of {number} workers, H = {sync_every}, {wire}, after {steps} steps",
                    f"{ours:.3f}",
                    f"DDP {together:.3f}; one worker alone {alone:.3f}",
                    f"{three_digits(ours / together)} ×",
                    "≤ 1.03 × DDP, below one alone",
                    ours <= 1.03 * together and ours < alone,
                )
            )
            all_reduce = 4 * parameters * 2 * (number - 1) / number
            per_step = sent / (steps - warm_up)
            width = {"bf16": 2, "int8": 1 + 4 / 256}[wire]
            target = width / sync_every * parameters / all_reduce * 1.05  # with the heads of requests
            rows.append(
                Row(
                    f"bytes that one of {number} workers sends per step, H = {sync_every}, {wire}",
                    f"{per_step:,.0f}",
                    f"a ring all-reduce of fp32 gradients, computed: {all_reduce:,.0f}",
                    f"1/{all_reduce / per_step:.0f}",
                    f"≤ 1/{1 / target:.0f}",
                    per_step / all_reduce <= target,
                )
            )
    return rows


def server_memory(size: int = SIZE) -> Row:
    """What rounds of two workers take beside the global parameters and their momentum."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".benchmark-") as folder:
        (end,) = start_ranks(_memory_of_a_round, 1, Path(folder), size).wait(3600)
    if end.exit_code:
        raise RuntimeError(end.error)
    return Row(
        f"peak memory of a server's rounds, 2 workers with {count(size)}B each in fp32",
        f"{count(end.value)}B",
        f"one submission: {count(size)}B",
        f"{three_digits(end.value / size)} ×",
        "≤ 1 × and a tensor",
        end.value <= 1.15 * size,
    )


def _memory_of_a_round(folder: Path, size: int) -> int:
    """Bytes."""
    specs = tuple(TensorSpec(f"p.{each}", torch.float32, (size // 16 // 4,)) for each in range(16))
    run = OuterRun(folder, nesterov(), 1000)
    with run.spooled(specs, _Constant()) as arrived:
        run.begin(arrived)
    names = ["w0", "w1"]
    for name in names:
        run.record(Joined(name, 0, 0, False))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _own_memory("VmRSS") + size  # the momentum, which the first round makes
    for number in (1, 2):
        for name in names:
            submission = Submission(name, number, number - 1, 0, False, 1, 1, 1.0, None, 0)
            with run.spooled(specs, _Constant()) as arrived:
                run.accept(submission, arrived)
                run.commit()
        run.record(Applied(names, {}))
    peak = _own_memory("VmHWM") - before
    run.close(save=False)
    return peak


class _Constant:
    """Tensors with one value, as from the network."""

    def fill(self, memory: memoryview) -> None:
        torch.frombuffer(memory, dtype=torch.float32).fill_(1e-3)

    def end(self) -> None: ...


def _own_memory(line: str) -> int:
    """Bytes, from ``/proc/self/status``."""
    lines = dict(each.split(":", 1) for each in Path("/proc/self/status").read_text().splitlines())
    return int(lines[line].split()[0]) << 10


def overlapped_steps(size: int = SIZE // 8, repeats: int = REPEATS) -> Row:
    """Local steps while a submission of so many bytes travels, beside steps while none does. The server is another
    process."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".benchmark-") as folder:
        server = start_ranks(_serve, 1, Path(folder))
        try:
            quiet, busy = _steps(Path(folder), size, repeats)
        finally:
            server.kill()
            server.wait()
    return Row(
        f"a local step while {count(size)}B travel",
        duration(busy),
        f"a quiet step: {duration(quiet)}",
        f"{three_digits(busy / quiet)} ×",
        "≤ 1.10 ×",
        busy <= 1.1 * quiet,
        busy.spread,
    )


def _serve(folder: Path) -> None:
    os.nice(19)  # it stands for another machine, and shall not take this one's processors
    with DiLoCoServer(folder, 1, rules=_rules(1)) as server:
        (folder / "address.part").write_text(f"{server.address} {server.token}")
        (folder / "address.part").rename(folder / "address")
        server.wait()


def _steps(folder: Path, size: int, repeats: int) -> tuple[Figure, Figure]:
    while not (folder / "address").exists():
        time.sleep(0.05)
    address, token = (folder / "address").read_text().split()
    torch.set_num_threads(1)
    width = max(16, int((size / 2) ** 0.5))  # one square matrix, sent as bfloat16
    model = torch.nn.Linear(width, width, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.ones(64, width)
    options = WorkerOptions(address, sync_every=1000, overlap_steps=999, worker_id="w", token=token)
    worker = DiLoCoWorker(model, options)
    worker.join()
    times: dict[bool, list[float]] = {False: [], True: []}
    while min(len(times[False]), len(times[True])) < 10 * repeats:
        travels = worker._flight is not None and worker._flight._thread.is_alive()
        began = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times[travels].append(time.perf_counter() - began)
        if worker.count_step(1) or (len(times[False]) % 10 == 9 and not travels):
            worker._progress.steps = 1000  # the next submission begins here, and the last one ends
            worker.synchronize()
    worker.leave()
    return figure(times[False]), figure(times[True])


class _Training:
    """A model, its optimizer and the batches of all workers, up to a step."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        self.steps = steps
        self.step = 0
        self.model = TinyLanguageModel(width=32, context=CONTEXT, dropout=0.0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.curve: Curve = []
        files = sorted(Path(dalsegno.__file__).parent.rglob("*.py"))
        text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()
        cut = len(text) * 9 // 10
        self._train, self._held_out = text[:cut], text[cut:]
        self._windows = min(1000, 10 * steps)  # from which the loss is measured

    def alone(self, workers: int, until: int | None = None) -> Curve:
        """Step with the gradients of so many workers, as DDP does."""
        while self.step < (self.steps if until is None else until):
            self.advance(range(workers))
            self.look()
        return self.curve

    def advance(self, workers: Sequence[int]) -> None:
        """One step, on the batches of these workers. The rate rises for 100 steps, then falls to a tenth."""
        done = self.step / self.steps
        rate = LEARNING_RATE * min(1.0, (self.step + 1) / 100) * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        for worker in workers:
            generator = torch.Generator().manual_seed(self.step * max(WORKERS) + worker)
            begins = torch.randint(len(self._train) - CONTEXT - 1, (BATCH,), generator=generator)
            (self.model(**_batch(self._train, begins)) / len(workers)).backward()
        self.step += 1
        self.optimizer.step()

    @torch.no_grad()
    def look(self) -> None:
        """Add a point to the curve, if one is due."""
        if self.step % max(1, self.steps // LOOKS) == 0:
            begins = torch.arange(0, len(self._held_out) - CONTEXT - 1, len(self._held_out) // self._windows)
            self.curve.append((self.step, float(self.model(**_batch(self._held_out, begins)))))


def _batch(text: torch.Tensor, begins: torch.Tensor) -> dict[str, torch.Tensor]:
    places = begins[:, None] + torch.arange(CONTEXT + 1)
    return {"input_ids": text[places[:, :-1]], "labels": text[places[:, 1:]]}


def _diloco(steps: int, warm_up: int, sync_every: int, workers: int, wire: str) -> tuple[Curve, float, int]:
    """The curve, the bytes that each worker has sent, and the number of parameters. Each worker is a process."""
    start = _Training(steps)
    start.alone(workers, warm_up)
    with tempfile.TemporaryDirectory() as folder, DiLoCoServer(folder, workers, rules=_rules(workers)) as server:
        warm = Path(folder) / "warm.pt"
        torch.save([start.model.state_dict(), start.optimizer.state_dict()], warm)
        arguments = (steps, warm_up, sync_every, wire, warm, server.address, server.token)
        running = [start_ranks(_work, 1, number, *arguments) for number in range(workers)]
        ends = [end for ranks in running for end in ranks.wait(3600)]
    if failed := [end.error for end in ends if end.exit_code]:
        raise RuntimeError(failed[0])
    values: list[tuple[Curve, int]] = [end.value for end in ends]
    parameters = sum(each.numel() for each in start.model.parameters())
    return start.curve + values[0][0], sum(sent for _, sent in values) / workers, parameters


def _work(
    number: int, steps: int, warm_up: int, sync_every: int, wire: str, warm: Path, address: str, token: str | None
) -> tuple[Curve, int]:
    torch.set_num_threads(1)
    training = _Training(steps)
    model, optimizer = torch.load(warm, weights_only=True)
    training.model.load_state_dict(model)
    training.optimizer.load_state_dict(optimizer)
    training.step = warm_up
    options = WorkerOptions(
        address,
        sync_every=sync_every,
        worker_id=f"w{number}",
        token=token,
        bf16_comm=wire == "bf16",
        int8_comm=wire == "int8",
    )
    with DiLoCoWorker(training.model, options, optimizer=training.optimizer, samples_per_step=BATCH) as joined:
        client = joined._exchange.client
        before = client.bytes_sent  # one of them has sent the first parameters
        while training.step < steps:
            training.advance([number])
            training.look()  # after a synchronization: at the global parameters
        return training.curve, client.bytes_sent - before


def _rules(workers: int) -> Rules:
    return Rules(workers, heartbeat_timeout=0.0, save_every=1000)
