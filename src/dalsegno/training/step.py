"""TrainStep: one optimizer step. Accumulate the micro-batches' gradients, clip, update, schedule.

::

    for each micro-batch:
        forward; backward of its share of the step's loss
    unscale; clip to max_grad_norm
    optimizer.step()         (skipped if the gradient scaler found non-finite values)
    zero_grad(); scheduler.step()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dalsegno.data.step_batch import StepBatch
from dalsegno.distributed.parallel import Parallel
from dalsegno.events.table import Event
from dalsegno.stateful.component import Stateful

from .accumulation import Accumulation
from .hyperparameters import follow_groups
from .parts import RunParts


class StepResult(NamedTuple):
    """Outcome of one step."""

    loss: torch.Tensor
    """This rank's share of the step's loss, which is the sum over all ranks. 0-dim."""
    grad_norm: torch.Tensor | None
    """Total L2 norm before clipping, over all ranks, 0-dim; None if it was not computed."""
    lr: float | torch.Tensor
    """Learning rate that the update used, of the first parameter group."""


class GradNormDemand:
    """Whether the step in progress computes the total norm of its gradients; the same answer on all ranks."""

    def __init__(self, parts: RunParts) -> None:
        self._dispatcher = parts.dispatcher
        self._state = parts.state
        self._clips = bool(parts.args.max_grad_norm)
        self._listens_to_metrics = False

    def begin_leg(self) -> None:
        """Look whether a callback on any rank handles on_train_metrics."""
        self._listens_to_metrics = self._dispatcher.listens_anywhere(Event.TRAIN_METRICS)

    def __call__(self) -> bool:
        return self._clips or self._state.will_log or self._listens_to_metrics


class TrainStep:
    """Runs one step at each call.

    Args:
        parts: of the run. A ``ReduceLROnPlateau`` among the schedulers is not stepped here.
        parallel: of the model; knows how to clip its gradients, and which rank has its loss.
        wants_norm: whether this step needs their total norm.
    """

    def __init__(
        self,
        parts: RunParts,
        accumulate: Accumulation[Parallel],
        parallel: Parallel,
        wants_norm: GradNormDemand,
        *,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._dispatcher = parts.dispatcher
        self._accumulate = accumulate
        self._parallel = parallel
        self._state = parts.state
        self._recoveries = parts.recoveries
        self._optimizer = parts.optimizer
        self._schedulers = [each for each in parts.schedulers if not isinstance(each, ReduceLROnPlateau)]
        self._wants_norm = wants_norm
        self._scaler = scaler
        self._scale = 1.0  # the scaler's, as of the last step
        self._max_grad_norm = parts.args.max_grad_norm
        self._follow_groups()

    @property
    def stateful(self) -> dict[str, Stateful]:
        """Objects of this step that a checkpoint must contain, by key."""
        return {} if self._scaler is None else {"scaler": self._scaler}

    @contextmanager
    def leg(self) -> Iterator[None]:
        """Around the steps of a leg: training mode, and no gradients of an interrupted step."""
        self._parallel.module.train()
        self._optimizer.zero_grad()
        self._wants_norm.begin_leg()
        with self._parallel.training():
            yield

    def restart(self) -> None:
        """Prepare for the first step after a restore."""
        self._scale = 1.0 if self._scaler is None else self._scaler.get_scale()

    def __call__(self, step_batch: StepBatch) -> StepResult:
        dispatcher, optimizer = self._dispatcher, self._optimizer
        own_loss = self._accumulate(step_batch)
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
        if dispatcher.gradients_ready:
            dispatcher.gradients_ready.fire()
        if len(optimizer.param_groups) != self._groups:  # the training has added one, or a load removed it
            self._follow_groups()
        loss, grad_norm = self._totals(own_loss, self._max_grad_norm if self._wants_norm() else None)
        if dispatcher.pre_optimizer_step:
            dispatcher.pre_optimizer_step.fill(grad_norm)
            dispatcher.pre_optimizer_step.fire()
        if self._recoveries:
            with self._recoveries.scaled_rates(self._state.global_step):
                lr, stepped = self._update()
        else:
            lr, stepped = self._update()
        if dispatcher.optimizer_step:
            dispatcher.optimizer_step.fire()
        if not stepped and dispatcher.step_skipped:
            dispatcher.step_skipped.fill("non-finite gradients: the scaler left the weights as they are")
            dispatcher.step_skipped.fire()
        if dispatcher.before_zero_grad:
            dispatcher.before_zero_grad.fire()
        self._clear_gradients()
        if dispatcher.after_zero_grad:
            dispatcher.after_zero_grad.fire()
        if stepped:
            self._schedule()
        return StepResult(loss, grad_norm, lr)

    def _follow_groups(self) -> None:
        """Clip the gradients, and schedule the rates, of the groups that the optimizer has now."""
        groups = self._optimizer.param_groups
        self._groups = len(groups)
        self._totals = self._parallel.totals([parameter for group in groups for parameter in group["params"]])
        follow_groups(self._optimizer, self._schedulers)

    def _update(self) -> tuple[float | torch.Tensor, bool]:
        """Step the optimizer. Returns the learning rate that it used, and whether the weights were changed."""
        lr = self._optimizer.param_groups[0]["lr"]
        lr = lr.clone() if isinstance(lr, torch.Tensor) else lr  # without a call: each step comes here
        if self._scaler is None:
            self._optimizer.step()
            return lr, True
        before = self._scale
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._scale = self._scaler.get_scale()
        return lr, self._scale >= before  # the scale shrinks if and only if a gradient was not finite

    def _clear_gradients(self) -> None:
        if type(self._optimizer).zero_grad is not Optimizer.zero_grad:
            self._optimizer.zero_grad()
            return
        # The effect of zero_grad() without its overhead, which is 40 µs a step (python -m benchmarks loop).
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _schedule(self) -> None:
        dispatcher = self._dispatcher
        for scheduler in self._schedulers:
            if dispatcher.before_scheduler_step:
                dispatcher.before_scheduler_step.fill(scheduler)
                dispatcher.before_scheduler_step.fire()
            scheduler.step()
            if dispatcher.after_scheduler_step:
                dispatcher.after_scheduler_step.fill(scheduler)
                dispatcher.after_scheduler_step.fire()
