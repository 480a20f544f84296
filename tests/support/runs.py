"""Whole training runs, small enough to be killed many times. At the top of a module, so that ranks can import them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import dalsegno as ds
from dalsegno.callbacks import DivergenceDetector, GradNormLogger, JsonLogger
from dalsegno.events.table import Event
from dalsegno.testing import DataOrder, FaultPlan, TinyRegression, tiny_regression_data

ONCE_PER_LEG = {
    Event.INIT_END,
    Event.BEFORE_LOAD,
    Event.LOAD,
    Event.TRAIN_BEGIN,
    Event.SAVE,  # comes after the capture of what it saves, as does the next
    Event.STEP_DONE,
    Event.ROLLBACK,
    Event.EXCEPTION,
    Event.TRAIN_END,
}


class Counts(ds.Callback):
    """How often each event has fired in this run, except for those on which no state may hang."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def state_dict(self) -> dict[str, int]:
        return dict(sorted(self.counts.items()))

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.counts = dict(state)


def _counting(handler: str) -> Callable[[Counts, Any], None]:
    def count(self: Counts, ctx: Any) -> None:
        self.counts[handler] = self.counts.get(handler, 0) + 1

    return count


for event in set(Event) - ONCE_PER_LEG:
    setattr(Counts, event.handler, _counting(event.handler))


class RunningLoss(ds.Callback):
    """A user's own callback with state: sums that depend on every step, and a note of the events it has seen."""

    def __init__(self) -> None:
        self.average = torch.zeros(())
        self.epochs_seen: list[int] = []
        self.logged: dict[str, list[int]] = {}

    def on_train_metrics(self, ctx: Any) -> None:
        self.average = 0.9 * self.average + 0.1 * ctx.metrics["loss"]

    def on_epoch_end(self, ctx: Any) -> None:
        self.epochs_seen.append(ctx.epoch)

    def on_log(self, ctx: Any) -> None:
        self.logged.setdefault(ctx.kind, []).append(ctx.state.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "epochs_seen": list(self.epochs_seen), "logged": self.logged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.epochs_seen, self.logged = state["average"], state["epochs_seen"], state["logged"]


class ForgetfulLoss(RunningLoss):
    """One with a mistake in it: it does not take its average back."""

    name = "RunningLoss"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs_seen, self.logged = state["epochs_seen"], state["logged"]


def busy_trainer(
    output_dir: Path,
    parallel: str = "none",
    max_steps: int = 100,
    own: type[RunningLoss] = RunningLoss,
    frozen: Sequence[str] = (),
    **changes: Any,
) -> ds.Trainer:
    """Everything at once: dropout, accumulation with a smaller last step, evaluation, two logs, pruned checkpoints.

    Six steps an epoch; a checkpoint every two, a record every three, an evaluation every four. ``frozen``: modules of
    the model that are not trained; ``changes``: of these settings.
    """
    torch.manual_seed(0)
    model = TinyRegression()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    settings: dict[str, Any] = {
        "max_steps": max_steps,
        "per_device_train_batch_size": 4 if parallel == "none" else 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "logging_steps": 3,
        "eval_steps": 4,
        "save_steps": 2,
        "save_total_limit": 3,
        "parallel": parallel,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    if parallel == "fsdp":  # an operation for all shards, rather than nine for each, which every process plans anew
        settings["optim"] = "adamw_fused"
    args = ds.TrainingArguments(output_dir, **settings | changes)
    return ds.Trainer(
        model,
        args,
        train_dataset=tiny_regression_data(44),
        eval_dataset=tiny_regression_data(10, seed=1),
        callbacks=[JsonLogger(run="busy"), GradNormLogger(), DivergenceDetector(), DataOrder(), Counts(), own()],
    )


def forgetful_trainer(output_dir: Path) -> ds.Trainer:
    return busy_trainer(output_dir, max_steps=8, own=ForgetfulLoss)


def frozen_trainer(output_dir: Path) -> ds.Trainer:
    return busy_trainer(output_dir, max_steps=24, frozen=["layers.0"])


def busy_fsdp(output_dir: Path) -> ds.Trainer:
    return busy_trainer(output_dir, "fsdp", 36)


def busy_ddp(output_dir: Path) -> ds.Trainer:
    return busy_trainer(output_dir, "ddp", 20)


def train_with_a_victim(output_dir: Path, plan: FaultPlan | None, victim: int) -> None:
    """A leg of the DDP run in which one rank, not always the first, is killed."""
    from dalsegno.distributed import collectives

    if plan is not None and collectives.rank() == victim:
        plan.arm()
    busy_ddp(output_dir).train()
