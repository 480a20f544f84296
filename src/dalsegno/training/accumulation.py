"""Accumulation: the gradients of one step, from its micro-batches. One way each for a model that each rank runs whole,
and for one that is cut into pipeline stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch

from dalsegno.data import to_device
from dalsegno.data.loader import Microbatch
from dalsegno.data.step_batch import StepBatch
from dalsegno.distributed.parallel import Parallel
from dalsegno.distributed.parallel.pipeline import Pipelined
from dalsegno.events.dispatcher import Dispatcher
from dalsegno.events.table import Event

from .forward import ForwardPass, Outputs

P_co = TypeVar("P_co", bound=Parallel, covariant=True)


class Accumulation(ABC, Generic[P_co]):
    """Adds the gradients of a step's micro-batches.

    Args:
        data_size: number of ranks with different data. Gradients are averaged over them; shares are to be summed.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        forward: ForwardPass,
        parallel: P_co,
        data_size: int,
        scaler: torch.amp.GradScaler | None,
        device: torch.device,
    ) -> None:
        self._dispatcher = dispatcher
        self._forward = forward
        self._parallel = parallel
        self._data_size = data_size
        self._scaler = scaler
        self._device = device

    @abstractmethod
    def __call__(self, step_batch: StepBatch) -> torch.Tensor:
        """This rank's share of the step's loss, detached, 0-dim; zero if it does not have the last pipeline stage."""


class MicrobatchAccumulation(Accumulation[Parallel]):
    """One forward and backward pass after the other."""

    def __call__(self, step_batch: StepBatch) -> torch.Tensor:
        dispatcher = self._dispatcher
        last = len(step_batch.microbatches) - 1
        total: torch.Tensor | None = None
        for index, microbatch in enumerate(step_batch.microbatches):
            self._parallel.synchronize(index == last)
            batch = to_device(microbatch.batch, self._device)
            if dispatcher.microbatch_begin:
                dispatcher.microbatch_begin.fill(batch, index, microbatch.samples)
                dispatcher.microbatch_begin.fire()
            loss, outputs = self._forward(batch)
            loss = self._backward(loss, outputs, step_batch.share(index))
            total = loss if total is None else total + loss
            if dispatcher.microbatch_end:
                dispatcher.microbatch_end.fill(
                    outputs["loss"].detach(), outputs, batch, index, microbatch.samples, index == last
                )
                dispatcher.microbatch_end.fire()
        if self._parallel.complete_gradients is not None:
            self._parallel.complete_gradients()
        assert total is not None, "a step is never empty"
        return total

    def _backward(self, loss: torch.Tensor, outputs: Outputs, share: float) -> torch.Tensor:
        """Add this micro-batch's gradients; its share of the step's loss, detached."""
        dispatcher = self._dispatcher
        if dispatcher.before_backward:
            dispatcher.before_backward.fill(outputs, loss.detach())
            dispatcher.before_backward.fire()
            loss = outputs["loss"]
        counted = loss.detach()
        if share != 1.0:  # padding does not count, not even a NaN
            counted = counted * share if share else torch.zeros_like(counted)
        factor = share * self._data_size
        scaled = loss if factor == 1.0 else loss * factor
        if self._scaler is not None:
            scaled = self._scaler.scale(scaled)
        scaled.backward()  # type: ignore[no-untyped-call]
        if dispatcher.after_backward:
            dispatcher.after_backward.fill(outputs, loss.detach())
            dispatcher.after_backward.fire()
        return counted


class PipelinedAccumulation(Accumulation[Pipelined]):
    """All micro-batches through all stages, in the order of the pipeline's schedule.

    Their events fire on every rank: ``on_microbatch_begin`` of all of them before the first forward pass,
    ``on_microbatch_end`` of all of them, with the loss, after the last backward pass.
    """

    def __call__(self, step_batch: StepBatch) -> torch.Tensor:
        dispatcher, microbatches = self._dispatcher, step_batch.microbatches
        batches = [to_device(microbatch.batch, self._device) for microbatch in microbatches]
        for index, (batch, microbatch) in enumerate(zip(batches, microbatches, strict=True)):
            if dispatcher.microbatch_begin:
                dispatcher.microbatch_begin.fill(batch, index, microbatch.samples)
                dispatcher.microbatch_begin.fire()
        shares = [step_batch.share(index) for index in range(len(microbatches))]
        runner = self._parallel.runner
        losses = runner.train(batches, [self._factor(share) for share in shares], self._forward)
        self._parallel.finish_backward()
        if dispatcher.listens_anywhere(Event.MICROBATCH_END):  # the loss of the step reaches all ranks with the norm
            self._end_microbatches(batches, microbatches, runner.share(losses))
        counted = [loss * share for loss, share in zip(losses.unbind(), shares, strict=True) if share]
        return torch.stack(counted).sum() if counted else losses.new_zeros(())

    def _end_microbatches(
        self, batches: Sequence[Any], microbatches: Sequence[Microbatch], losses: torch.Tensor
    ) -> None:
        event, last = self._dispatcher.microbatch_end, len(batches) - 1
        for index, (batch, microbatch, loss) in enumerate(zip(batches, microbatches, losses.unbind(), strict=True)):
            if event:
                event.fill(loss, {"loss": loss}, batch, index, microbatch.samples, index == last)
                event.fire()

    def _factor(self, share: float) -> float | torch.Tensor:
        factor = share * self._data_size
        return factor if self._scaler is None else self._scaler.scale(torch.full((), factor, device=self._device))
