"""CheckLoss: stops a run whose loss is NaN or infinite, or rolls it back, and reports where that began."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor

from dalsegno.distributed import accelerator, collectives
from dalsegno.events.contexts import BeforeSaveContext, Context, LogContext, MicrobatchEndContext
from dalsegno.events.table import Event

from .argument_checks import one_of
from .divergence_callback import DivergenceCallback


class CheckLoss(DivergenceCallback):
    """Stops training, without a checkpoint, once a micro-batch's loss is NaN or infinite.

    The stop reason names the first such micro-batch, its step and its rank. Each loss is checked on its device; the
    result is read at steps with a record and before each save only. So no other step waits for the device, and no
    checkpoint contains weights that such a loss has changed. Padding is not checked.

    Args:
        action: ``"abort"`` stops training; ``"rollback"`` goes back to a checkpoint, chosen by the run's
            ``RecoveryPolicy``.

    Raises:
        ConfigurationError: for another action.
    """

    background_safe = False

    def __init__(self, action: Literal["abort", "rollback"] = "abort") -> None:
        super().__init__(one_of("CheckLoss", "action", action, ("abort", "rollback")))
        self._first: tuple[Tensor, Tensor, Tensor] | None = None
        """Step (0: none so far), micro-batch and value of the first non-finite loss; 0-dim, on the device."""

    def requesting_events(self) -> Collection[Event]:
        return Event.LOG_STEP, Event.BEFORE_SAVE

    def on_train_begin(self, ctx: Context) -> None:
        self._first = None

    on_rollback = on_train_begin

    def on_microbatch_end(self, ctx: MicrobatchEndContext) -> None:
        if not ctx.samples:
            return
        loss: Tensor = ctx.outputs["loss"].detach().float()
        if self._first is None:
            nothing = torch.zeros((), dtype=torch.long, device=loss.device)
            self._first = nothing, nothing, loss
        step, index, value = self._first
        is_first = (step == 0) & ~loss.isfinite()
        self._first = (
            torch.where(is_first, ctx.state.global_step + 1, step),
            torch.where(is_first, ctx.index, index),
            torch.where(is_first, loss, value),
        )

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind == "train":
            self._judge(ctx)

    def on_before_save(self, ctx: BeforeSaveContext) -> None:
        self._judge(ctx)

    def _read(self) -> list[float]:
        """Read step, micro-batch and value of this rank's first non-finite loss; the step is 0 if there is none."""
        if self._first is None:
            return [0.0, 0.0, 0.0]
        return [float(number) for number in torch.stack([accelerator.wide(each) for each in self._first]).tolist()]

    def _judge(self, ctx: Context) -> None:
        """Stop if any rank has a non-finite loss. Collective."""
        found = enumerate(collectives.gather_floats(self._read(), "CheckLoss"))
        broken = sorted((step, rank, index, value) for rank, (step, index, value) in found if step)
        if broken:
            step, rank, index, value = broken[0]
            where = f"micro-batch {index:.0f} (from 0) of step {step:.0f} on rank {rank}"
            self.end_or_roll_back(ctx, f"the loss is {value} in {where}")
