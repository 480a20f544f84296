"""Runs of an Ignite Engine with a Bridge in it. At the top of a module, so that ranks can import it."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterable
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Average
from torch import nn
from torch.utils.data import DataLoader

import dalsegno as ds
from dalsegno.callbacks import EMA, DivergenceDetector, EarlyStopping, GradHistogram, GradNormLogger, JsonLogger
from dalsegno.checkpoint import Checkpoint as States
from dalsegno.checkpoint import read_tensors, saved_states
from dalsegno.interop.ignite import Bridge, Request
from dalsegno.interop.packed import unpack
from dalsegno.logs import read_records
from dalsegno.logs.wall_clock import drop_wall_clock
from dalsegno.testing import TinyRegression, tiny_regression_data

PER_EPOCH = Events.EPOCH_COMPLETED


def several() -> list[Any]:
    """Callbacks with state of each kind: numbers, positions in logs, tensors."""
    stopping = [DivergenceDetector(patience=100), EarlyStopping(patience=100)]
    return [JsonLogger(run="bridged"), GradNormLogger(), GradHistogram(every=3), EMA(0.9), *stopping]


class Script:
    """A training as Ignite's users write it: five iterations an epoch, evaluated and saved at its end."""

    def __init__(
        self,
        output_dir: Path,
        callbacks: Iterable[Any],
        *,
        model: nn.Module | None = None,
        clips: bool = True,
        saves: Any = PER_EPOCH | Request.SAVE,
        evaluates: Any = PER_EPOCH | Request.EVALUATE,
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        self.output_dir = output_dir
        self.model = TinyRegression() if model is None else model
        for module in self.model.modules():  # Ignite does not restore random numbers
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.clips, self.accumulated = clips, settings.get("gradient_accumulation_steps", 1)
        self.norms: dict[int, dict[str, float]] = {}
        self.trainer, self.evaluator = Engine(self.update), Engine(self.measure)
        Average().attach(self.evaluator, "loss")
        given = {"logging_steps": 2, "evaluators": self.evaluator, "output_dir": output_dir, **settings}
        self.bridge = Bridge(callbacks, self.trainer, model=self.model, optimizer=self.optimizer, **given)
        self.to_save = {"model": self.model, "optimizer": self.optimizer, "trainer": self.trainer, "calls": self.bridge}
        self.valid = DataLoader(tiny_regression_data(8, seed=1), batch_size=4)
        if evaluates is not None:
            self.trainer.add_event_handler(evaluates, lambda: self.evaluator.run(self.valid))
        self.checkpoint = Checkpoint(self.to_save, DiskSaver(output_dir, require_empty=False), n_saved=None)
        if saves is not None:
            self.trainer.add_event_handler(saves, self.checkpoint)

    def update(self, engine: Engine, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.model.train()
        loss = self.model(**batch)
        (loss / self.accumulated).backward()
        if engine.state.iteration % self.accumulated == 0:
            if self.clips:
                self.bridge.clip_grad_norm_(0.5)
            self.norms[engine.state.iteration // self.accumulated] = {
                name.removeprefix("module."): sqrt(float((each.grad.double() ** 2).sum()))
                for name, each in self.model.named_parameters()
                if each.grad is not None
            }
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def measure(self, engine: Engine, batch: dict[str, torch.Tensor]) -> float:
        self.model.eval()
        with torch.no_grad():
            return float(self.model(**batch))

    def load(self, name: str) -> Script:
        Checkpoint.load_objects(self.to_save, checkpoint=self.output_dir / name)
        return self

    def run(self, epochs: int = 4, loader: Any = None) -> Script:
        if loader is None:
            loader = DataLoader(tiny_regression_data(20), batch_size=4)
        self.trainer.run(loader, max_epochs=epochs)
        return self

    def at(self, step: int, act: Callable[[], Any]) -> Script:
        """Do something after an iteration."""
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=step), act)
        return self


def run_until_killed(output_dir: Path, step: int) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    Script(output_dir, several()).at(step, lambda: os.kill(os.getpid(), signal.SIGKILL)).run()


def records(output_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of each log, without times."""
    logs = sorted((output_dir / "logs").glob("*.jsonl"))
    return {log.name: [drop_wall_clock(record) for record in read_records(log)] for log in logs}


def states(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The saved states of callbacks, and their tensors. Read without unpickling any object."""
    content = torch.load(checkpoint, weights_only=True)["calls"]["dalsegno"]
    with tempfile.TemporaryDirectory() as folder:
        unpack(content, Path(folder))
        found = States.open(Path(folder))
        tensors = {key: dict(named) for key, named in read_tensors(found).items()}
        return saved_states(found), tensors


def run_on_a_rank(output_dir: Path, resume: str | None = None) -> dict[str, Any]:
    """What this rank has seen. Rank 1 alone stops the training, at step 7."""
    rank = torch.distributed.get_rank()

    class OnRankOne(ds.Callback):
        def on_step_end(self, ctx: Any) -> None:
            if rank == 1 and ctx.step == 7 and resume is None:
                ctx.control.stop("seen by rank 1")

    model = nn.parallel.DistributedDataParallel(TinyRegression())
    script = Script(output_dir, [*several(), OnRankOne()], model=model)
    if resume is not None:
        script.load(resume)
    dataset = tiny_regression_data(40)
    sampler = torch.utils.data.DistributedSampler(dataset, shuffle=False)
    script.run(2, DataLoader(dataset, batch_size=4, sampler=sampler))
    return {"ended at": script.trainer.state.iteration, "norms": script.norms}
