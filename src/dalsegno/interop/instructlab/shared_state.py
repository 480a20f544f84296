"""Company: what is known of the step that is going on, the same for all of InstructLab's callbacks in one run."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import (
    Context,
    EpochContext,
    EvaluateContext,
    ExceptionContext,
    LogContext,
    SaveContext,
    StepEndContext,
    TrainBeginContext,
)

from .context import TrainingContext

_BY_CLOCK = ("_runtime", "_per_second")
"""Metrics that each rank measures by its own clock."""


class SharedState(Callback):
    """Called before InstructLab's callbacks, so that these find here what has just become known."""

    name = "instructlab"
    makes_wishes = False

    def __init__(self, context: Context) -> None:
        args, model = context.args, context.model
        self._state = context.state
        self._alone = collectives.world_size() == 1
        self._device = device_of(model)
        self._always: dict[str, Any] = {
            "output_dir": str(args.directory),
            "model_name_or_path": str(getattr(getattr(model, "config", None), "name_or_path", None) or ""),
            "max_epochs": math.ceil(args.num_train_epochs),
            "world_size": collectives.world_size(),
            "is_local_process_zero": context.state.is_local_process_zero,
            "is_world_process_zero": context.state.is_world_process_zero,
        }
        self._accumulation = args.gradient_accumulation_steps
        self._epoch = 0
        self.in_update = False
        """From a step's begin to its update: what goes forward now is trained on."""
        self.step: object = None
        """Another object for each step; None before the first one of a leg."""
        self._tokens_agreed = False
        self._of_step: dict[str, Any] = {}
        self._of_record: dict[str, Any] = {}
        self._batch_metrics: dict[str, Any] = {}
        self._val_metrics: dict[str, Any] = {}
        self._checkpoint: str | None = None
        self._began = 0.0
        self._samples_before = 0

    def context(self, hook_name: str) -> TrainingContext:
        """All that is known, as it is now."""
        state = self._state
        return TrainingContext(
            hook_name=hook_name,
            step=state.global_step + self.in_update,
            epoch=self._epoch,
            total_samples=state.samples_seen,
            total_tokens=state.num_input_tokens_seen if self._alone or self._tokens_agreed else None,
            **(self._of_step | self._of_record if hook_name == "on_log" else self._of_record | self._of_step),
            batch_metrics=dict(self._batch_metrics),
            val_metrics=dict(self._val_metrics),
            checkpoint_path=self._checkpoint,
            cuda_mem_allocated=self._cuda_memory(),
            **self._always,
        )

    def learn(self, metrics: dict[str, Any]) -> None:
        """Take over the metrics of this very step, which all ranks have agreed on."""
        self._of_step |= _numbers(metrics)

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        self._epoch = int(ctx.state.epoch)
        self.step = None
        self._forget()

    def on_epoch_begin(self, ctx: EpochContext) -> None:
        self._epoch = ctx.epoch
        self._forget()

    def on_step_begin(self, ctx: Context) -> None:
        self._forget()
        self.in_update, self.step = True, object()
        self._began, self._samples_before = time.monotonic(), ctx.state.samples_seen

    def on_step_end(self, ctx: StepEndContext) -> None:
        self.in_update = False
        if self._alone:
            self._of_step["elapsed_time"] = time.monotonic() - self._began
        self._batch_metrics = {
            "total_samples": ctx.samples_seen - self._samples_before,
            "grad_accum_steps": self._accumulation,
        }

    def on_log(self, ctx: LogContext) -> None:
        if ctx.kind == "train":
            self._of_record = _numbers(ctx.logs)
            self._tokens_agreed = True

    def on_evaluate(self, ctx: EvaluateContext) -> None:
        metrics = {name: value for name, value in ctx.metrics.items() if self._alone or not name.endswith(_BY_CLOCK)}
        losses = [value for name, value in metrics.items() if name.endswith("_loss")]
        self._val_metrics |= {**metrics, **({"val_loss": losses[0]} if losses else {})}

    def on_save(self, ctx: SaveContext) -> None:
        self._checkpoint = str(ctx.path)

    def on_epoch_end(self, ctx: EpochContext) -> None:
        self._epoch = ctx.epoch

    def on_exception(self, ctx: ExceptionContext) -> None:
        self._forget()

    def _forget(self) -> None:
        self.in_update = self._tokens_agreed = False
        self._of_step, self._of_record, self._batch_metrics, self._val_metrics = {}, {}, {}, {}
        self._checkpoint = None

    def _cuda_memory(self) -> float | None:
        if self._alone and self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device) / 2**30
        return None


_NAMES = {
    "loss": "loss",
    "learning_rate": "learning_rate",
    "grad_norm": "grad_norm",
    "tok_per_sec": "overall_throughput",
}


def _numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """What is in the metrics, under the context's names."""
    return {ours: float(metrics[name]) for name, ours in _NAMES.items() if name in metrics}
