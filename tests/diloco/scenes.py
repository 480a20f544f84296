"""What the tests of DiLoCo run, in this process and in others."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dalsegno as ds
from dalsegno.callbacks import DiLoCoCallback, JsonLogger
from dalsegno.diloco import DiLoCoServer, DiLoCoWorker, Rules, WorkerOptions, nesterov
from dalsegno.diloco.server.outer import MakeOptimizer
from dalsegno.diloco.server.rounds import Applied, Joined
from dalsegno.diloco.server.run import OuterRun
from dalsegno.diloco.wire.messages import Submission, in_file_order
from dalsegno.diloco.wire.signature import Specs, TensorSpec
from dalsegno.system import filesystem
from dalsegno.testing.tiny import TinyRegression, tiny_regression_data
from support import layouts

SPECS = (TensorSpec("layer.weight", torch.float32, (4, 3)), TensorSpec("layer.bias", torch.float32, (3,)))


def values(specs: Specs, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator).to(spec.dtype) for spec in specs}


class Given:
    """Tensors that arrive, from memory."""

    def __init__(self, specs: Specs, tensors: Mapping[str, torch.Tensor]) -> None:
        data = [tensors[spec.name].reshape(-1).view(torch.uint8) for spec in in_file_order(specs)]
        self._left = memoryview(torch.cat(data).numpy().data)

    def fill(self, memory: memoryview) -> None:
        memory[:], self._left = self._left[: len(memory)], self._left[len(memory) :]

    def end(self) -> None:
        assert not self._left


def submission_of(worker_id: str, number: int, base: int, **other: Any) -> Submission:
    given = {"fragment": 0, "bf16": False, "samples": 3, "steps": 5, "seconds": 1.0, "loss": float(number), "saved": 0}
    return Submission(worker_id, number, base, **{**given, **other})


def play(folder: Path, versions: int = 5, *, save_every: int = 2, save: bool = True) -> dict[str, Any]:
    """A run of two workers without network, from wherever it is to so many versions. Returns all that it led to."""
    run = OuterRun(folder, nesterov(), save_every)
    if not run.has_begun:
        with run.spooled(SPECS, Given(SPECS, values(SPECS, 0))) as arrived:
            run.begin(arrived)
    for worker_id in ("w0", "w1"):
        if worker_id not in run.state.members:
            run.record(Joined(worker_id, 0, 0, False))
    while run.state.version < versions:
        for seed, (worker_id, member) in enumerate(sorted(run.state.members.items())):
            if member.pending is None:
                submission = submission_of(worker_id, member.number + 1, run.state.version, samples=2 + seed)
                given = Given(SPECS, values(SPECS, 10 * submission.number + seed))
                with run.spooled(SPECS, given) as arrived:
                    run.accept(submission, arrived)
                    run.commit()
        run.record(Applied(["w0", "w1"], {}))
        run.commit()
        run.keep_versions()
        run.release_versions(run.state.members)
        if (to_save := run.state_to_save()) is not None and run.save(to_save):
            run.release_submissions()
    tensors = {name: each.detach().clone() for name, each in run._model.by_name.items()}
    momentum = [each["momentum_buffer"].clone() for each in run._optimizer.state.values()]
    state = {**dataclasses.asdict(run.state), "run_id": None}
    run.close(save=save)
    return {"tensors": tensors, "momentum": momentum, "state": state}


def play_and_die(folder: Path, operation: int) -> None:
    """Die before this operation on files, counted from 0."""
    left = [operation]

    def watch(what: str, path: Path) -> None:
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)

    filesystem.watcher = watch
    play(folder)


class Line(nn.Module):
    """Predicts a line's height; without randomness."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(6, 5, generator=generator))
        self.second = nn.Parameter(torch.randn(5, 2, generator=generator))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ self.first) @ self.second * self.frozen).square().mean()


def same(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.state_dict().values(), right.state_dict().values(), strict=True))


def batch(worker: int, step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * worker + step))


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int) -> float:
    loss = model(batch(worker, step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def train_by_hand(server: DiLoCoServer, worker: int, steps: int, **options: Any) -> Line:
    """A loop of one's own as a worker; returns its model."""
    model = Line(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    chosen = WorkerOptions(server.address, token=server.token, worker_id=f"w{worker}", **options)
    with DiLoCoWorker(model, chosen, optimizer=optimizer, samples_per_step=8 + worker):
        for step in range(steps):
            local_step(model, optimizer, worker, step)
    return model


def all_together(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run jobs on threads; returns their results, or raises the first one's error."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = jobs[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def plain_rounds(
    workers: int, rounds: int, sync_every: int, make: MakeOptimizer, wire: torch.dtype = torch.float32
) -> Line:
    """The same rounds in one process, without any of dalsegno. Returns the global model.

    Args:
        wire: dtype of pseudo-gradients; int8: with a scale and error feedback.
    """
    models = [Line(seed=0) for _ in range(workers)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    whole = Line(seed=0)
    trained = [(name, each) for name, each in whole.named_parameters() if each.requires_grad]
    outer = make([each for _, each in trained])
    samples = [(8 + worker) * sync_every for worker in range(workers)]
    errors = [{name: torch.zeros_like(each) for name, each in trained} for _ in range(workers)]
    for number in range(rounds):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for step in range(number * sync_every, (number + 1) * sync_every):
                local_step(model, optimizer, worker, step)
        for name, parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
            for worker, model in enumerate(models):
                change = parameter.detach() - model.get_parameter(name).detach()
                if wire == torch.int8:  # these parameters have fewer elements than share a scale
                    change += errors[worker][name]
                    scale = change.abs().max() / 127
                    exact = change
                    change = (exact / scale).round() * scale
                    errors[worker][name] = exact - change
                else:
                    change = change.to(wire).float()
                parameter.grad += change * (samples[worker] / sum(samples))
        outer.step()
        outer.zero_grad()
        with torch.no_grad():
            for model in models:
                for name, parameter in trained:
                    model.get_parameter(name).copy_(parameter)
    return whole


def plain_overlap(*, workers: int, steps: int, every: int, overlap: int, fragments: int) -> list[Line]:
    """Streaming rounds in one process, without any of dalsegno. Returns each worker's model."""
    models = [Line(seed=0) for _ in range(workers)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    whole = Line(seed=0)
    names = ["first", "second"]
    parts = [names] if fragments == 1 else [[name] for name in names]
    outer = torch.optim.SGD(whole.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    counts = [0] * workers
    sent: list[dict[str, torch.Tensor]] = []
    weights: list[int] = []
    began, turn = -steps, 0
    for step in range(steps):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            local_step(model, optimizer, worker, step)
            counts[worker] += 8 + worker
        if began == step - overlap:
            for name in parts[turn % fragments]:
                parameter = whole.get_parameter(name)
                parameter.grad = torch.zeros_like(parameter)
                for each, weight in zip(sent, weights, strict=True):
                    parameter.grad += each[name] * (weight / sum(weights))
            outer.step()
            outer.zero_grad()
            with torch.no_grad():
                for model in models:
                    for name in parts[turn % fragments]:
                        own = model.get_parameter(name)
                        own.copy_(torch.lerp(own, whole.get_parameter(name), 0.5))
            counts = [count - weight for count, weight in zip(counts, weights, strict=True)]
            turn += 1
        if (step - began) % every == 0 if began >= 0 else step == every - 1:
            began, weights = step, list(counts)
            sent = [
                {name: (whole.get_parameter(name) - model.get_parameter(name)).detach() for name in names}
                for model in models
            ]
    return models


def rules(workers: int, **other: Any) -> Rules:
    return Rules(workers, **{"heartbeat_timeout": 0.0, **other})


class KillAt(ds.Callback):
    """Kill the process after a step, the first time that it gets there."""

    def __init__(self, step: int, folder: Path) -> None:
        self._step = step
        self._mark = folder / "killed"

    def on_step_done(self, ctx: ds.StepDoneContext) -> None:
        if ctx.step == self._step and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train_as_worker(
    folder: Path,
    address: str,
    token: str,
    number: int,
    kill_at: int | None = None,
    max_sync_retries: int = 3,
    **settings: Any,
) -> dict[str, list[Any]]:
    """A Trainer as a worker: 24 steps, a synchronization every 4, a checkpoint every 6."""
    os.environ["DILOCO_TOKEN"] = token
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = TinyRegression()
    own = [] if kill_at is None else [KillAt(kill_at, folder.parent)]
    arguments = ds.TrainingArguments(
        folder,
        max_steps=24,
        save_steps=6,
        logging_steps=4,
        seed=number,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        **settings,
    )
    callback = DiLoCoCallback(
        address, sync_every=4, worker_id=f"w{number}", bf16_comm=False, max_sync_retries=max_sync_retries
    )
    trainer = ds.Trainer(
        model, arguments, train_dataset=tiny_regression_data(96, seed=number), callbacks=[JsonLogger(), callback, *own]
    )
    trainer.train()
    return {name: each.tolist() for name, each in model.state_dict().items()}


def train_as_ranks(
    folder: Path, address: str, token: str, layout: str, stops: tuple[int, ...] = (6,), **options: Any
) -> dict[str, list[Any]]:
    """A Trainer on these ranks as one worker, with the same samples in each step whatever their number. Returns the
    full parameters that this rank has.

    Args:
        stops: steps at which it ends and is resumed.
    """
    os.environ["DILOCO_TOKEN"] = token
    torch.set_num_threads(1)
    for stop in stops:
        callback = DiLoCoCallback(address, sync_every=3, worker_id="w", **{"bf16_comm": False, **options})
        worker = layouts.trainer(folder, layout, callback, max_steps=stop, save_steps=100)
        worker.train()
    return {name: each.tolist() for name, each in layouts.weights(worker.model).items()}
