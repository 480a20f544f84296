"""ForwardPass: computes the outputs and the loss of a batch, for training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol

import torch
from torch import nn

from dalsegno.distributed.pipeline.runner import PipelineRunner
from dalsegno.errors import ConfigurationError
from dalsegno.events.dispatcher import Dispatcher
from dalsegno.events.table import Event

LossFunction = Callable[[Any, Any], torch.Tensor]
"""``loss_fn(outputs, batch) -> loss``, for models that return no loss."""

Outputs = MutableMapping[str, Any]


class EvaluationForward(Protocol):
    """Computes the loss and the outputs of an evaluation batch."""

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that are in evaluation mode meanwhile."""

    def __call__(self, batch: Any) -> tuple[torch.Tensor, Outputs]:
        """The batch's mean loss, a 0-dim tensor, and the outputs with the loss under ``"loss"``."""


class ForwardPass:
    """Calls ``module(**batch)`` (a mapping), ``module(*batch)`` (a tuple or list) or ``module(batch)``.

    The loss is ``loss_fn(outputs, batch)``; without a ``loss_fn``, the returned tensor, its ``.loss`` or its
    ``["loss"]``.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        module: nn.Module,
        loss_fn: LossFunction | None,
        device: torch.device,
        autocast: torch.dtype | None,
        *,
        is_compiled: bool = False,
    ) -> None:
        self._dispatcher = dispatcher
        self.module = module
        self._loss_fn = loss_fn
        self._device = device
        self._autocast = autocast
        self._is_compiled = is_compiled

    @property
    def modules(self) -> list[nn.Module]:
        """The model, and the loss function if it is a module."""
        return [each for each in (self.module, self._loss_fn) if isinstance(each, nn.Module)]

    def __call__(self, batch: Any) -> tuple[torch.Tensor, Outputs]:
        """The batch's mean loss, a 0-dim tensor, and the outputs with the loss under ``"loss"``.

        Raises:
            ConfigurationError: if the model returned no loss.
        """
        if self._autocast is None:
            return self._call(batch)
        with torch.autocast(self._device.type, dtype=self._autocast):
            return self._call(batch)

    def _call(self, batch: Any) -> tuple[torch.Tensor, Outputs]:
        dispatcher = self._dispatcher
        if self._is_compiled:
            keep_batch_size_static(batch)
        if dispatcher.before_forward:
            args, kwargs = _arguments(batch)
            dispatcher.before_forward.fill(batch, args, kwargs)
            dispatcher.before_forward.fire()
            returned = self.module(*args, **kwargs)
        elif isinstance(batch, (dict, Mapping)):  # dict first: Mapping takes 1 µs
            returned = self.module(**batch)
        else:
            returned = self.module(*_arguments(batch)[0])
        loss, outputs = self._find_loss(returned, batch)
        if dispatcher.after_forward:
            dispatcher.after_forward.fill(outputs, batch)
            dispatcher.after_forward.fire()
            loss = outputs["loss"]
        return loss, outputs

    def _find_loss(self, returned: Any, batch: Any) -> tuple[torch.Tensor, Outputs]:
        if self._loss_fn is not None:
            loss = self._loss_fn(returned, batch)
            return loss, {"loss": loss, "outputs": returned}
        if isinstance(returned, torch.Tensor):
            if returned.ndim == 0:
                return returned, {"loss": returned}
        elif isinstance(returned, (dict, MutableMapping)):
            if isinstance(returned.get("loss"), torch.Tensor):
                return returned["loss"], returned
        elif isinstance(getattr(returned, "loss", None), torch.Tensor):
            return returned.loss, {"loss": returned.loss, "outputs": returned}
        raise ConfigurationError(
            f"the model returned {_describe(returned)} and no loss; return the loss as a 0-dim tensor, as .loss or "
            'as ["loss"], or pass loss_fn(outputs, batch) to the trainer'
        )


def _arguments(batch: Any) -> tuple[list[Any], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return [], dict(batch)
    if isinstance(batch, (tuple, list)):
        if batch and all(isinstance(each, str) for each in batch):
            raise ConfigurationError(
                f"the model was given a batch of {len(batch)} texts ({batch[0][:40]!r}…); convert them to tensors in "
                "the dataset, or pass data_collator=, a function from a list of samples to a batch"
            )
        return list(batch), {}
    return [batch], {}


def keep_batch_size_static(batch: Any) -> None:
    """Make ``torch.compile`` specialize on each batch size, instead of using dynamic shapes from the second size on.

    With dynamic shapes, the kernels that compute a batch, and so the rounding of its sums, depend on the sizes that
    this process has seen before: a process that resumes at an epoch's last, smaller batch sees that size first.
    """
    if isinstance(batch, torch.Tensor):
        if batch.dim():
            torch._dynamo.mark_static(batch, 0)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            keep_batch_size_static(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            keep_batch_size_static(value)


def _describe(returned: Any) -> str:
    if isinstance(returned, torch.Tensor):
        return f"a tensor of shape {tuple(returned.shape)}"
    return f"a {type(returned).__name__}"


class PipelinedForward:
    """Calls a model that is cut into pipeline stages, in evaluation. Collective.

    The loss is on every rank. The outputs are where the last stage is; their tensors are sent to the other ranks if a
    callback handles on_prediction_step.
    """

    def __init__(self, dispatcher: Dispatcher, forward: ForwardPass, runner: PipelineRunner) -> None:
        self._dispatcher = dispatcher
        self._forward = forward
        self._runner = runner

    @property
    def modules(self) -> list[nn.Module]:
        """The model, its stages on this rank, and the loss function if it is a module."""
        return [*self._forward.modules, *self._runner.modules]

    def __call__(self, batch: Any) -> tuple[torch.Tensor, Outputs]:
        loss, outputs = self._runner.evaluate(batch, self._forward)
        if self._dispatcher.listens_anywhere(Event.PREDICTION_STEP):
            known = None if outputs is None else dict(outputs)
            return loss, {**self._runner.share_outputs(known), "loss": loss}
        return loss, {"loss": loss}
