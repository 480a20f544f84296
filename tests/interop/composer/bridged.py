"""Runs of Composer's Trainer with a Bridge in it. At the top of a module, so that ranks can import it."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterable
from math import sqrt
from pathlib import Path
from typing import Any

import composer
import torch
from composer.algorithms import GradientClipping
from composer.models import ComposerModel
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanSquaredError

import dalsegno as ds
from dalsegno.callbacks import EMA, DivergenceDetector, EarlyStopping, GradHistogram, GradNormLogger, JsonLogger
from dalsegno.checkpoint import Checkpoint, read_tensors, saved_states
from dalsegno.interop.composer import Bridge
from dalsegno.interop.packed import unpack
from dalsegno.logs import read_records
from dalsegno.logs.wall_clock import drop_wall_clock
from dalsegno.testing import tiny_regression_data


class Model(ComposerModel):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(batch["x"])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, batch["y"])

    def eval_forward(self, batch: Any, outputs: Any = None) -> torch.Tensor:
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        return {} if is_train else {"loss": MeanSquaredError()}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(outputs, batch["y"])


def several() -> list[Any]:
    """Callbacks with state of each kind: numbers, positions in logs, tensors."""
    stopping = [DivergenceDetector(patience=100), EarlyStopping(patience=100)]
    return [JsonLogger(run="bridged"), GradNormLogger(), GradHistogram(every=3), EMA(0.9), *stopping]


class At(composer.Callback):  # type: ignore[misc]
    """Does something after a step."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        self.step, self.act = step, act

    def batch_end(self, state: Any, logger: Any) -> None:
        if state.timestamp.batch.value == self.step:
            self.act()


class Norms(composer.Callback):  # type: ignore[misc]
    """The norms of the clipped gradients, computed in a plain way."""

    def __init__(self) -> None:
        self.of_step: dict[int, dict[str, float]] = {}

    def after_train_batch(self, state: Any, logger: Any) -> None:
        named = {name.removeprefix("module."): each for name, each in state.model.named_parameters()}
        norms = {name: sqrt(float((each.grad.double() ** 2).sum())) for name, each in named.items()}
        self.of_step[state.timestamp.batch.value + 1] = norms


def trainer(
    output_dir: Path,
    callbacks: Iterable[Any],
    *others: Any,
    model: Any = None,
    logging_steps: int = 2,
    rows: int = 20,
    lr: float = 0.01,
    **settings: Any,
) -> Any:
    """Five steps an epoch, each epoch is evaluated and saved at its end."""
    model = Model() if model is None else model
    data, valid = tiny_regression_data(rows), tiny_regression_data(8, seed=1)
    sharded = {"sampler": DistributedSampler(data, shuffle=False)} if torch.distributed.is_initialized() else {}
    sharded_valid = {"sampler": DistributedSampler(valid, shuffle=False)} if sharded else {}
    given = {"max_duration": "4ep", "eval_interval": "1ep", "save_interval": "1ep", **settings}
    return composer.Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=lr),
        train_dataloader=DataLoader(data, batch_size=4, **sharded),
        eval_dataloader=DataLoader(valid, batch_size=4, **sharded_valid),
        callbacks=[*others, Bridge(callbacks, output_dir=output_dir, logging_steps=logging_steps)],
        algorithms=[GradientClipping(clipping_type="norm", clipping_threshold=0.5)],
        device="cpu",
        progress_bar=False,
        run_name="bridged",
        save_folder=str(output_dir / "checkpoints"),
        save_filename="ba{batch}.pt",
        save_overwrite=True,
        **given,
    )


def fit(output_dir: Path, callbacks: Iterable[Any], *others: Any, **settings: Any) -> Any:
    one = trainer(output_dir, callbacks, *others, **settings)
    try:
        one.fit()
    finally:
        one.close()
    return one


def fit_until_killed(output_dir: Path, step: int) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    fit(output_dir, several(), At(step, lambda: os.kill(os.getpid(), signal.SIGKILL)))


def fit_on_a_rank(output_dir: Path) -> dict[str, Any]:
    """What this rank has seen. Rank 1 alone stops the training, at step 7."""
    os.environ.update(LOCAL_WORLD_SIZE="2", NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    rank, norms = int(os.environ["RANK"]), Norms()

    class OnRankOne(ds.Callback):
        def on_step_end(self, ctx: Any) -> None:
            if rank == 1 and ctx.step == 7:
                ctx.control.stop("seen by rank 1")

    one = fit(output_dir, [*several(), OnRankOne()], norms, rows=40)
    return {"ended at": one.state.timestamp.batch.value, "norms": norms.of_step}


def records(output_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of each log, without times."""
    logs = sorted((output_dir / "logs").glob("*.jsonl"))
    return {log.name: [drop_wall_clock(record) for record in read_records(log)] for log in logs}


def states(checkpoint: Path) -> dict[str, Any]:
    """The saved states of callbacks that have no times in them."""
    content = torch.load(checkpoint, weights_only=False)["state"]["callbacks"]["Bridge"]["dalsegno"]
    with tempfile.TemporaryDirectory() as folder:
        unpack(content, Path(folder))
        found = Checkpoint.open(Path(folder))
        tensors = {name: each.tolist() for name, each in read_tensors(found)["callbacks.EMA"].items()}
        saved = saved_states(found)
    keys = ("callbacks.DivergenceDetector", "callbacks.EarlyStopping", "callbacks.EMA")
    return {key: saved[key] for key in keys} | tensors
