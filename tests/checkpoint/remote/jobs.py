"""Functions that the processes of these tests run. In a module that the fork server can import."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dalsegno as ds
from checkpoint.remote.there import steps_at
from dalsegno.callbacks import JsonLogger
from dalsegno.checkpoint.remote.store import Store
from dalsegno.system import lease
from golden.run import Average, Model, Waves, weights_of
from support.hosts import as_process_one, name_host
from support.listeners import Listener


class Resumed(ds.Callback):
    """Step that the leg resumes from."""

    step = 0

    def on_load(self, ctx: Any) -> None:
        self.step = ctx.step


def trainer(
    output_dir: str | Path, local_dir: Path | None, max_steps: int, *more: ds.Callback, **settings: Any
) -> ds.Trainer:
    torch.manual_seed(0)
    args = ds.TrainingArguments(
        output_dir,
        local_dir=local_dir,
        max_steps=max_steps,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        use_cpu=True,
        disable_tqdm=True,
        **{"logging_steps": 1, "save_steps": 2, "per_device_train_batch_size": 2, **settings},
    )
    callbacks = [JsonLogger(), JsonLogger(path="logs/array.json", name="ArrayLogger"), Average(), *more]
    return ds.Trainer(Model(), args, train_dataset=Waves(), callbacks=callbacks)


def train(output_dir: str | Path, local_dir: Path | None, max_steps: int, **settings: Any) -> dict[str, Any]:
    """The first step of the leg, and the result."""
    resumed = Resumed()
    mine = trainer(output_dir, local_dir, max_steps, resumed, **settings)
    result = mine.train()
    return {"from": resumed.step, "step": result.global_step, "weights": weights_of(mine.model)}


def train_fsdp(output_dir: str | Path, local_dir: Path | None, max_steps: int) -> dict[str, Any]:
    return train(output_dir, local_dir, max_steps, parallel="fsdp")


class Large(nn.Module):
    """A model of 40 MB, which is uploaded in several parts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(10_000_000, dtype=torch.float32))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.table[:6] * x - y).square().mean()


def train_large(output_dir: str, local_dir: Path, max_steps: int) -> dict[str, Any]:
    """A checkpoint each step. That of step 2 waits until the first one is sent, which it would otherwise replace."""

    def wait(ctx: Any) -> None:
        if ctx.step == 2:
            until(lambda: 1 in steps_at(Store(output_dir)))

    torch.manual_seed(0)
    model, resumed, waiting = Large(), Resumed(), Listener({"on_step_end": wait}, name="waiting")
    args = ds.TrainingArguments(
        output_dir, local_dir=local_dir, max_steps=max_steps, save_steps=1, use_cpu=True, disable_tqdm=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ds.Trainer(model, args, train_dataset=Waves(), optimizer=optimizer, callbacks=[resumed, waiting]).train()
    return {"from": resumed.step, "table": model.table[:6].tolist()}


def until(condition: Callable[[], bool]) -> None:
    """Wait for another process or thread."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def train_on_host(host: str, url: str, local_dir: Path, max_steps: int | None, ttl: float = 60.0) -> str:
    """Train on a host of that name; returns the outcome or the error.

    Args:
        max_steps: None: four steps, at the end of which it waits for a file ``stop`` in the directory.
        ttl: seconds of its lease, to other hosts. Its own clock stands still, so it is never late.
    """
    name_host(host)
    lease.TTL_S, lease.RENEW_S = ttl, 0.05
    if ttl < 60:
        lease._clock = lambda: 1.0

    def wait_at_the_end(ctx: Any) -> None:
        if max_steps is None and ctx.step == 4:
            until((local_dir / "stop").exists)
            ctx.control.stop("there is a file")

    listener = Listener({"on_step_end": wait_at_the_end}, name="waiting")
    try:
        return trainer(url, local_dir, max_steps or 8, listener, save_total_limit=2, logging_steps=500).train().reason
    except ds.Locked as error:
        return f"{type(error).__name__}: {error}"


def train_in_container(host: str, url: str, local_dir: Path, max_steps: int | None, ttl: float = 60.0) -> str:
    """:func:`train_on_host`, as process 1 of a pid namespace."""
    return as_process_one(train_on_host, host, url, local_dir, max_steps, ttl)
