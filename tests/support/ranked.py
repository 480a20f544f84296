"""Runs on several ranks, and what each rank returns of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import dalsegno as ds
from dalsegno.distributed import collectives
from dalsegno.testing import tiny_regression_data
from support.listeners import Listener, Trace
from support.models import Deep
from support.small import arguments


class Numbered(Dataset[dict[str, Tensor]]):
    """Samples that know their number."""

    def __init__(self, length: int) -> None:
        self._data = tiny_regression_data(length)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**self._data[index], "number": torch.tensor(index)}


class Numbers(ds.Callback):
    """The samples that this rank was trained on, by epoch. A change of ranks gives the first what all have seen."""

    state_scope = "per_rank"

    def __init__(self) -> None:
        self.seen: dict[int, list[int]] = {}

    def on_microbatch_begin(self, ctx: Any) -> None:
        epoch = ctx.train_dataloader.epoch
        self.seen.setdefault(epoch, []).extend(ctx.batch["number"].tolist())

    def state_dict(self) -> dict[int, list[int]]:
        return self.seen

    def load_state_dict(self, state: dict[int, list[int]]) -> None:
        self.seen = {epoch: list(numbers) for epoch, numbers in state.items()}

    @classmethod
    def reshard(cls, states: Sequence[dict[int, list[int]]], world_size: int) -> list[dict[int, list[int]]]:
        merged: dict[int, list[int]] = {}
        for state in states:
            for epoch, numbers in state.items():
                merged.setdefault(epoch, []).extend(numbers)
        return [merged, *({} for _ in range(world_size - 1))]


def train_part(
    output_dir: Path, parallel: Any, stop_at: int | None, batch_size: int, accumulation: int, length: int = 48
) -> dict[str, Any]:
    """Train up to ``stop_at``, or to the end of step 14, and tell what this rank knows then."""
    torch.manual_seed(collectives.rank())  # ranks begin with different weights: rank 0's are meant to count
    args = arguments(
        output_dir,
        max_steps=14,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        logging_steps=1,
        save_steps=100,
        parallel=parallel,
        disable_tqdm=True,
    )
    losses: dict[int, float] = {}
    norms: dict[int, float] = {}
    notes: list[str] = []

    def note_record(ctx: Any) -> None:
        if ctx.kind == "train":
            losses[ctx.state.global_step], norms[ctx.state.global_step] = ctx.logs["loss"], ctx.logs["grad_norm"]
            if ctx.state.global_step == stop_at:
                ctx.control.stop("this part is over")

    handlers = {"on_log": note_record, "on_load": lambda ctx: notes.extend(ctx.report.notes)}
    numbers, trace = Numbers(), Trace()
    trainer = ds.Trainer(Deep(), args, train_dataset=Numbered(length), callbacks=[numbers, trace, Listener(handlers)])
    result = trainer.train()
    return {
        "step": result.global_step,
        "losses": losses,
        "norms": norms,
        "seen": numbers.seen,
        "steps counted": trace.steps,
        "notes": notes,
        "samples": trainer.state.samples_seen,
        "draw": torch.rand(1).item(),
    }


def train_and_listen(output_dir: Path, parallel: str, batch_size: int, accumulation: int, weigh: bool) -> Any:
    """Five steps of eight samples, with evaluations. The records of all kinds, and the metrics of each step.

    The fourth step has only six samples, unless they are weighed: a weight is that of a whole micro-batch.
    """
    torch.manual_seed(0)
    args = arguments(
        output_dir,
        max_steps=5,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=accumulation,
        logging_steps=2,
        eval_steps=2,
        max_grad_norm=0.5,
        parallel=parallel,
        disable_tqdm=True,
    )
    records: list[tuple[str, dict[str, float]]] = []
    metrics: list[dict[str, float]] = []
    handlers = {
        "on_log": lambda ctx: records.append((ctx.kind, dict(ctx.logs))),
        "on_train_metrics": lambda ctx: metrics.append(dict(ctx.metrics)),
    }
    ds.Trainer(
        Deep(),
        args,
        train_dataset=Numbered(32 if weigh else 30),
        eval_dataset={"odd": Numbered(7), "one": Numbered(1)},
        loss_weight=(lambda batch: float((batch["number"] + 1).sum())) if weigh else None,
        callbacks=[Listener(handlers)],
    ).train()
    return records, metrics


def train_with_a_request(output_dir: Path, parallel: str, requested: str, at: str) -> Any:
    """Rank 1 alone requests something at step 3. How and where each rank ends, and what it has seen happen."""
    args = arguments(output_dir, max_steps=3000, save_steps=5000, logging_steps=3, eval_steps=5000, parallel=parallel)
    seen: dict[str, list[int]] = {"evaluate": [], "save": [], "epoch": []}

    def request(ctx: Any) -> None:
        if collectives.rank() == 1 and ctx.state.global_step == 3:
            if requested in ("stop", "abort"):
                ctx.control.stop("rank 1 has had enough", save=requested == "stop")
            else:
                setattr(ctx.control, f"should_{requested}", True)

    def end_soon(ctx: Any) -> None:
        if any(seen.values()):
            ctx.control.stop("seen")

    handlers = {
        "on_evaluate": lambda ctx: seen["evaluate"].append(ctx.state.global_step),
        "on_save": lambda ctx: seen["save"].append(ctx.step),
        "on_epoch_end": lambda ctx: seen["epoch"].append(ctx.state.global_step),
        "on_step_begin": end_soon,
    }
    trainer = ds.Trainer(
        Deep(),
        args,
        train_dataset=Numbered(100_000),
        eval_dataset=Numbered(2),
        callbacks=[Listener({at: request}, name="tired"), Listener(handlers, name="watch")],
    )
    result = trainer.train()
    return result.global_step, result.reason, result.why, result.stopped_by, seen


def train_on_unequal_loaders(output_dir: Path) -> Any:
    """Rank 0 has two batches of its own, rank 1 has four."""
    data = Numbered(24)
    own = range(8) if collectives.rank() == 0 else range(8, 24)
    batches = [torch.utils.data.default_collate([data[own[i + j]] for j in range(4)]) for i in range(0, len(own), 4)]
    torch.manual_seed(0)
    losses: list[float] = []
    handlers = {"on_train_metrics": lambda ctx: losses.append(ctx.metrics["loss"])}
    args = arguments(output_dir, num_train_epochs=1, lr_scheduler_type="constant", learning_rate=0.0)
    trainer = ds.Trainer(Deep(), args, train_dataloader=batches, callbacks=[Listener(handlers)])
    trainer.train()
    with torch.no_grad():
        alone = [float(trainer.model(**batch)) for batch in batches]
    return losses, alone, trainer.state.samples_seen


def overflow_on_one_rank(output_dir: Path, parallel: str, where: str) -> Any:
    """In step 12, only rank 1 has something infinite. Which steps were skipped, and this rank's weights after each."""
    torch.manual_seed(0)
    skipped: list[int] = []
    weights: list[list[float]] = []

    def is_the_moment(ctx: Any) -> bool:
        return collectives.rank() == 1 and ctx.state.global_step == 11

    def spoil_loss(ctx: Any) -> None:
        if where == "loss" and is_the_moment(ctx):
            ctx.outputs["loss"] = ctx.outputs["loss"] * float("inf")

    def spoil_shard(ctx: Any) -> None:
        if where == "shard" and is_the_moment(ctx):
            ctx.model.blocks[1].weight.grad.to_local().fill_(float("inf"))

    def note_weights(ctx: Any) -> None:
        weight = ctx.model.blocks[0].weight
        weights.append(getattr(weight, "_local_tensor", weight).flatten().tolist())

    handlers = {
        "on_before_backward": spoil_loss,
        "on_microbatch_end": spoil_shard,
        "on_step_skipped": lambda ctx: skipped.append(ctx.state.global_step + 1),
        "on_step_end": note_weights,
    }
    args = arguments(output_dir, max_steps=14, fp16=True, parallel=parallel, per_device_train_batch_size=2)
    ds.Trainer(Deep(), args, train_dataset=Numbered(20), callbacks=[Listener(handlers)]).train()
    return skipped, weights
