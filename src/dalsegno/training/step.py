"""Update: one step of the weights. Accumulate the micro-batches' gradients, clip, step, schedule.

::

    for each micro-batch:
        forward, backward of its share of the step's loss
    unscale; clip to the largest allowed norm
    optimizer.step()         (or skipped, if the gradient scaler found non-finite values)
    zero_grad(); scheduler.step()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from dalsegno.data import to_device
from dalsegno.data.step_batch import StepBatch
from dalsegno.distributed import collectives
from dalsegno.distributed.parallel import Parallel
from dalsegno.events.dispatcher import Dispatcher
from dalsegno.events.table import Event
from dalsegno.state import TrainerState

from .forward import ForwardPass, Outputs


class StepResult(NamedTuple):
    """What one update was like."""

    loss: torch.Tensor
    """This rank's share of the step's loss (the shares of all ranks sum to it). 0-dim."""
    grad_norm: torch.Tensor | None
    """Total L2 norm before clipping, on all ranks; None where nobody needs it. 0-dim."""
    lr: float | torch.Tensor
    """The learning rate that was used, of the first parameter group."""


class TrainStep:
    """Carries out one step at each call."""

    def __init__(
        self,
        on: Dispatcher,
        state: TrainerState,
        forward: ForwardPass,
        parallel: Parallel,
        optimizer: Optimizer,
        schedulers: Sequence[Any],
        *,
        scaler: torch.amp.GradScaler | None,
        max_grad_norm: float,
        device: torch.device,
    ) -> None:
        self._on = on
        self._state = state
        self._forward = forward
        self._parallel = parallel
        self._optimizer = optimizer
        self._schedulers = schedulers
        self._scaler = scaler
        self._scale = 1.0  # the scaler's, as of the last step
        self._max_grad_norm = max_grad_norm
        self._listens_to_metrics = False
        self._device = device
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # DDP and FSDP average gradients over the ranks; shares are to be summed.
        self._world_size = collectives.world_size()

    @contextmanager
    def leg(self) -> Iterator[None]:
        """Around the steps of a leg: training mode, and no gradients that an earlier leg broke off with."""
        self._forward.module.train()
        self._optimizer.zero_grad()
        self._listens_to_metrics = self._on.listens_anywhere(Event.TRAIN_METRICS)  # to ask for a norm is collective
        self._scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        with self._parallel.training():
            yield

    def __call__(self, draw: StepBatch) -> StepResult:
        on, optimizer = self._on, self._optimizer
        loss = self._accumulate(draw)
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
        if on.gradients_ready:
            on.gradients_ready.fire()
        grad_norm = self._clip()
        if on.pre_optimizer_step:
            on.pre_optimizer_step.fill(grad_norm)
            on.pre_optimizer_step.fire()
        lr = optimizer.param_groups[0]["lr"]
        lr = lr.clone() if isinstance(lr, torch.Tensor) else lr
        stepped = self._step()
        if on.optimizer_step:
            on.optimizer_step.fire()
        if not stepped and on.step_skipped:
            on.step_skipped.fill("non-finite gradients: the scaler left the weights as they are")
            on.step_skipped.fire()
        if on.before_zero_grad:
            on.before_zero_grad.fire()
        self._clear_gradients()
        if on.after_zero_grad:
            on.after_zero_grad.fire()
        if stepped:
            self._schedule()
        return StepResult(loss, grad_norm, lr)

    def _accumulate(self, draw: StepBatch) -> torch.Tensor:
        on = self._on
        last = len(draw.microbatches) - 1
        total: torch.Tensor | None = None
        for index, microbatch in enumerate(draw.microbatches):
            self._parallel.synchronize(index == last)
            batch = to_device(microbatch.batch, self._device)
            if on.microbatch_begin:
                on.microbatch_begin.fill(batch, index, microbatch.samples)
                on.microbatch_begin.fire()
            loss, outputs = self._forward(batch)
            loss = self._backward(loss, outputs, draw.share(index))
            total = loss if total is None else total + loss
            if on.microbatch_end:
                on.microbatch_end.fill(
                    outputs["loss"].detach(), outputs, batch, index, microbatch.samples, index == last
                )
                on.microbatch_end.fire()
        assert total is not None, "a draw is never empty"
        return total

    def _backward(self, loss: torch.Tensor, outputs: Outputs, share: float) -> torch.Tensor:
        """Add this micro-batch's gradients. Returns its part of the step's loss, detached."""
        on = self._on
        if on.before_backward:
            on.before_backward.fill(outputs, loss.detach())
            on.before_backward.fire()
            loss = outputs["loss"]
        counted = loss.detach()
        if share != 1.0:  # of padding nothing counts, not even a NaN
            counted = counted * share if share else torch.zeros_like(counted)
        factor = share * self._world_size
        scaled = loss if factor == 1.0 else loss * factor
        if self._scaler is not None:
            scaled = self._scaler.scale(scaled)
        scaled.backward()  # type: ignore[no-untyped-call]
        if on.after_backward:
            on.after_backward.fill(outputs, loss.detach())
            on.after_backward.fire()
        return counted

    def wants_norm(self) -> bool:
        """Whether this step asks for the total norm of the gradients; the same answer on all ranks."""
        return bool(self._max_grad_norm) or self._state.will_log or self._listens_to_metrics

    def _clip(self) -> torch.Tensor | None:
        return self._parallel.clip(self._parameters, self._max_grad_norm) if self.wants_norm() else None

    def _step(self) -> bool:
        """Whether the weights were changed."""
        if self._scaler is None:
            self._optimizer.step()
            return True
        before = self._scale
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._scale = self._scaler.get_scale()
        return self._scale >= before  # it shrinks if, and only if, it met a non-finite gradient

    def _clear_gradients(self) -> None:
        if type(self._optimizer).zero_grad is not Optimizer.zero_grad:
            self._optimizer.zero_grad()
            return
        # What it comes down to, without what torch does around it: 40 µs a step (python -m benchmarks loop).
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _schedule(self) -> None:
        on = self._on
        for scheduler in self._schedulers:
            if on.before_scheduler_step:
                on.before_scheduler_step.fill(scheduler)
                on.before_scheduler_step.fire()
            scheduler.step()
            if on.after_scheduler_step:
                on.after_scheduler_step.fill(scheduler)
                on.after_scheduler_step.fire()
