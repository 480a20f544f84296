"""SharedState: what is known of the current step, shared by all of InstructLab's callbacks in one run."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from dalsegno.distributed import accelerator, collectives
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import (
    BeforeSaveContext,
    Context,
    EpochContext,
    EvaluateBeginContext,
    EvaluateContext,
    ExceptionContext,
    LogContext,
    MicrobatchBeginContext,
    PredictionStepContext,
    SaveContext,
    StepEndContext,
    TrainBeginContext,
)

from .context import BatchMetrics, TrainingContext

IGNORED_LABEL = -100
"""Index that torch's cross entropy leaves out."""

_BY_CLOCK = ("_runtime", "_per_second")
"""Endings of metrics that each rank measures by its own clock."""


class SharedState(Callback):
    """Handles each event before InstructLab's callbacks do, so that their contexts contain its values."""

    name = "instructlab"
    sets_control_flags = False

    def __init__(self, context: Context) -> None:
        args, model = context.args, context.model
        self.args = args
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
        self._epoch = 0
        self.in_update = False
        """Whether the run is between a step's begin and its update, where forward passes are for training."""
        """A new object for each step; None before the first step of a leg."""
        self._tokens_agreed = False
        self._of_step: dict[str, Any] = {}
        self._of_record: dict[str, Any] = {}
        self._batch_metrics: dict[str, Any] = {}
        self._val_metrics: dict[str, Any] = {}
        self._checkpoint: str | None = None
        self._captured = TrainingContext()
        self._began = 0.0
        self._samples_before = 0
        self._logged = 0, 0  # nanoseconds and samples at the last record
        self._throughput = 0.0
        self._minibatches = 0
        self._length: int | None = None
        self._counted_tokens: torch.Tensor | None = None
        self._evaluated_tokens: torch.Tensor | None = None  # of the evaluation, on this rank
        self._val_num_tokens: int | None = None  # of the newest evaluation, on all ranks

    def context(self, hook_name: str) -> TrainingContext:
        """Return a snapshot of all that is known."""
        state = self._state
        self._of_step, self._batch_metrics = _read(self._of_step), _read(self._batch_metrics)
        return TrainingContext(
            hook_name=hook_name,
            step=state.global_step + self.in_update,
            epoch=self._epoch,
            total_samples=state.samples_seen,
            total_tokens=state.num_input_tokens_seen if self._alone or self._tokens_agreed else None,
            **(self._of_step | self._of_record if hook_name == "on_log" else self._of_record | self._of_step),
            batch_metrics=BatchMetrics(self._batch_metrics),
            val_metrics=dict(self._val_metrics),
            checkpoint_path=self._checkpoint,
            cuda_mem_allocated=self._cuda_memory(),
            **self._always,
        )

    def learn(self, metrics: dict[str, Any]) -> None:
        """Store the metrics of this step, already reduced over all ranks."""
        self._of_step |= _with_a_field(metrics)
        batch = self._batch_metrics
        batch["total_length"] = metrics.get("tokens")
        if batch["num_loss_counted_tokens"] is not None:
            batch["accumulated_loss"] = metrics["loss"] * int(batch["num_loss_counted_tokens"])

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        self._epoch = int(ctx.state.epoch)
        self._logged = time.monotonic_ns(), ctx.state.samples_seen
        self._reset()
        self._captured = self.context("on_save")  # of the checkpoint that the leg resumes from

    def on_epoch_begin(self, ctx: EpochContext) -> None:
        self._epoch = ctx.epoch
        self._reset()

    def on_step_begin(self, ctx: Context) -> None:
        self._reset()
        self._minibatches, self._length, self._counted_tokens = 0, None, None
        self.in_update = True
        self._began, self._samples_before = time.monotonic(), ctx.state.samples_seen

    def on_microbatch_begin(self, ctx: MicrobatchBeginContext) -> None:
        self._minibatches += 1
        if not ctx.samples or not isinstance(ctx.batch, Mapping):
            return
        if isinstance(tokens := ctx.batch.get("input_ids"), torch.Tensor):
            self._length = (self._length or 0) + tokens.numel()
        if self._alone:
            self._counted_tokens = _with_labels(self._counted_tokens, ctx.batch, ctx.samples)

    def on_step_end(self, ctx: StepEndContext) -> None:
        self.in_update = False
        samples = ctx.samples_seen - self._samples_before
        lr = ctx.optimizer.param_groups[0]["lr"]
        self._of_step["learning_rate"] = lr.clone() if isinstance(lr, torch.Tensor) else lr
        if self._alone:
            seconds = time.monotonic() - self._began
            self._of_step |= {"elapsed_time": seconds, "overall_throughput": samples / seconds}
        self._batch_metrics = {
            "total_samples": samples,
            "total_length": self._length if self._alone else None,
            "num_loss_counted_tokens": self._counted_tokens,
            "accumulated_loss": None,
            "accumulated_aux_loss": None,
            "grad_accum_steps": self._minibatches,
            "num_minibatches": self._minibatches,
        }

    def on_evaluate_begin(self, ctx: EvaluateBeginContext) -> None:
        self._evaluated_tokens = None

    def on_prediction_step(self, ctx: PredictionStepContext) -> None:
        self._evaluated_tokens = _with_labels(self._evaluated_tokens, ctx.batch, ctx.samples)

    def on_log_step(self, ctx: LogContext) -> None:
        """On several ranks, measure the throughput by the slowest rank's clock, and sum up the tokens of an evaluation.
        Collective."""
        if ctx.kind == "eval":
            here = -1.0 if self._evaluated_tokens is None else float(self._evaluated_tokens)
            by_rank = [count for (count,) in collectives.gather_floats([here], "val_num_tokens") if count >= 0]
            self._val_num_tokens = int(sum(by_rank)) if by_rank else None
        if ctx.kind != "train" or self._alone:
            return
        now, samples = time.monotonic_ns(), ctx.state.samples_seen
        (nanoseconds,) = collectives.all_reduce_max([now - self._logged[0]], "overall_throughput")
        self._throughput = (samples - self._logged[1]) * 1e9 / nanoseconds
        self._logged = now, samples

    def on_log(self, ctx: LogContext) -> None:
        if ctx.kind == "train":
            self._of_record = _with_a_field(ctx.logs)
            if not self._alone:
                self._of_record["overall_throughput"] = self._throughput
            self._tokens_agreed = True

    def on_evaluate(self, ctx: EvaluateContext) -> None:
        metrics = {name: value for name, value in ctx.metrics.items() if self._alone or not name.endswith(_BY_CLOCK)}
        losses = [value for name, value in metrics.items() if name.endswith("_loss")]
        self._val_metrics |= {**metrics, **({"val_loss": losses[0]} if losses else {})}
        if self._val_num_tokens is not None:
            self._val_metrics["val_num_tokens"] = self._val_num_tokens

    def on_before_save(self, ctx: BeforeSaveContext) -> None:
        self._captured = self.context("on_save")

    def on_save(self, ctx: SaveContext) -> None:
        if ctx.state is self._state:  # the checkpoint of this step
            self._checkpoint = str(ctx.path)

    def saved_context(self, ctx: SaveContext) -> TrainingContext:
        """Return a snapshot as of the checkpoint: further steps may have finished since."""
        return copy.deepcopy(replace(self._captured, checkpoint_path=str(ctx.path)))

    def on_epoch_end(self, ctx: EpochContext) -> None:
        self._epoch = ctx.epoch

    def on_exception(self, ctx: ExceptionContext) -> None:
        self._reset()

    def _reset(self) -> None:
        self.in_update = self._tokens_agreed = False
        self._of_step, self._of_record, self._batch_metrics, self._val_metrics = {}, {}, {}, {}
        self._checkpoint = None

    def _cuda_memory(self) -> float | None:
        if self._alone and (allocated := accelerator.memory_allocated(self._device)) is not None:
            return allocated / 2**30
        return None


def _with_a_field(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics that the context has a field for."""
    return {name: float(metrics[name]) for name in ("loss", "grad_norm") if name in metrics}


def _read(values: dict[str, Any]) -> dict[str, Any]:
    """Return tensors as numbers: they wait on their device until a callback is called."""
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def _with_labels(count: torch.Tensor | None, batch: Any, samples: int) -> torch.Tensor | None:
    """Add the labels of a batch's true samples that the loss counts; None where no batch has had labels."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor):
        return count
    counted = (labels[:samples] != IGNORED_LABEL).sum()
    return counted if count is None else count + counted
