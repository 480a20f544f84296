"""TrainStep: one optimizer step. Forward and backward passes of the micro-batches, clip, update, schedule.

::

    for each micro-batch:                                           Accumulation
        forward; backward of its share of the step's loss
    unscale; clip to max_grad_norm                                  AgreedGradScaler, under fp16
    optimizer.step()         (skipped if the gradient scaler found non-finite values)
    zero_grad(); scheduler.step()
"""

from __future__ import annotations

import inspect
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dalsegno.data import to_device
from dalsegno.data.loader import tensors_in
from dalsegno.data.step_batch import StepBatch
from dalsegno.distributed import collectives
from dalsegno.distributed.parallel import Parallel
from dalsegno.distributed.parallel.pipeline import Pipelined
from dalsegno.distributed.pipeline.runner import PipelineRunner
from dalsegno.distributed.sharded_tensors import dense
from dalsegno.errors import ConfigurationError
from dalsegno.events.dispatcher import Dispatcher
from dalsegno.events.table import Event
from dalsegno.stateful.component import Stateful

from .learning_rate import follow_groups
from .run_parts import RunParts

logger = logging.getLogger("dalsegno")


class StepResult(NamedTuple):
    loss: torch.Tensor
    """This rank's share of the step's loss, which is the sum over all ranks. 0-dim."""
    grad_norm: torch.Tensor | None
    """Total L2 norm before clipping, over all ranks, 0-dim; None if it was not computed."""
    lr: float | torch.Tensor
    """Learning rate that the update used, of the first parameter group."""


class TrainStep:
    """Runs one step at each call. A ``ReduceLROnPlateau`` among the schedulers is not stepped here.

    ``wants_norm`` tells whether the step in progress needs the total norm of its gradients, alike on all ranks.
    """

    def __init__(
        self,
        parts: RunParts,
        accumulate: Accumulation,
        parallel: Parallel,
        wants_norm: Callable[[], bool],
        *,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._dispatcher = parts.dispatcher
        self._accumulate = accumulate
        self._parallel = parallel
        self._state = parts.state
        self._rollback_effects = parts.rollback_effects
        self._optimizer = parts.optimizer
        self._schedulers = [each for each in parts.schedulers if not isinstance(each, ReduceLROnPlateau)]
        self._wants_norm = wants_norm
        self._scaler = scaler
        self._scale = 1.0  # the scaler's, as of the last step
        self._max_grad_norm = parts.args.max_grad_norm
        self._follow_groups()

    @property
    def stateful(self) -> dict[str, Stateful]:
        return {} if self._scaler is None else {"scaler": self._scaler}

    @contextmanager
    def leg(self) -> Iterator[None]:
        """Around the steps of a leg: training mode, and no gradients of an interrupted step."""
        self._parallel.module.train()
        self._optimizer.zero_grad()
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
        if self._rollback_effects.rollbacks:
            with self._rollback_effects.scaled_rates(self._state.global_step):
                lr, stepped = self._update()
        else:
            lr, stepped = self._update()
        if dispatcher.optimizer_step:
            dispatcher.optimizer_step.fire()
        if not stepped:
            dispatcher.step_skipped.fire_with("non-finite gradients: the scaler left the weights as they are")
        if dispatcher.before_zero_grad:
            dispatcher.before_zero_grad.fire()
        self._clear_gradients()
        if dispatcher.after_zero_grad:
            dispatcher.after_zero_grad.fire()
        if stepped:
            self._schedule()
        return StepResult(loss, grad_norm, lr)

    def _follow_groups(self) -> None:
        groups = self._optimizer.param_groups
        self._groups = len(groups)
        self._totals = self._parallel.totals([parameter for group in groups for parameter in group["params"]])
        follow_groups(self._optimizer, self._schedulers)

    def _update(self) -> tuple[float | torch.Tensor, bool]:
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


@dataclass(frozen=True, slots=True)
class MicrobatchAccumulation:
    """Adds the gradients of a step's micro-batches, in one forward and backward pass after the other.

    Gradients are averaged over the ``data_size`` ranks with different data; shares are to be summed.
    """

    forward: ForwardPass
    parallel: Parallel
    data_size: int
    scaler: torch.amp.GradScaler | None

    def __call__(self, step_batch: StepBatch) -> torch.Tensor:
        """This rank's share of the step's loss, detached, 0-dim."""
        dispatcher, device = self.forward.dispatcher, self.forward.device
        last = len(step_batch.microbatches) - 1
        total: torch.Tensor | None = None
        for index, microbatch in enumerate(step_batch.microbatches):
            self.parallel.synchronize(index == last)
            batch = to_device(microbatch.batch, device)
            if dispatcher.microbatch_begin:
                dispatcher.microbatch_begin.fill(batch, index, microbatch.samples)
                dispatcher.microbatch_begin.fire()
            loss, outputs = self.forward(batch)
            loss = self._backward(loss, outputs, step_batch.share(index))
            total = loss if total is None else total + loss
            if dispatcher.microbatch_end:
                dispatcher.microbatch_end.fill(
                    outputs["loss"].detach(), outputs, batch, index, microbatch.samples, index == last
                )
                dispatcher.microbatch_end.fire()
        if self.parallel.complete_gradients is not None:
            self.parallel.complete_gradients()
        assert total is not None, "a step is never empty"
        return total

    def _backward(self, loss: torch.Tensor, outputs: Outputs, share: float) -> torch.Tensor:
        dispatcher = self.forward.dispatcher
        if dispatcher.before_backward:
            dispatcher.before_backward.fill(loss.detach(), outputs)
            dispatcher.before_backward.fire()
            loss = outputs["loss"]
        counted = loss.detach()
        if share != 1.0:  # padding does not count, not even a NaN
            counted = counted * share if share else torch.zeros_like(counted)
        factor = share * self.data_size
        scaled = loss if factor == 1.0 else loss * factor
        if self.scaler is not None:
            scaled = self.scaler.scale(scaled)
        try:
            scaled.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if scaled.requires_grad:
                raise
            raise ConfigurationError(
                "the loss has no gradient: it depends on no trained parameter, or was computed without gradients "
                "(.detach(), torch.no_grad())"
            ) from error
        if dispatcher.after_backward:
            dispatcher.after_backward.fill(loss.detach(), outputs)
            dispatcher.after_backward.fire()
        return counted


@dataclass(frozen=True, slots=True)
class PipelinedAccumulation:
    """The same, with all micro-batches through all stages, in the order of the pipeline's schedule.

    Their events fire on every rank: ``on_microbatch_begin`` of all of them before the first forward pass,
    ``on_microbatch_end`` of all of them, with the loss, after the last backward pass.
    """

    forward: ForwardPass
    parallel: Pipelined
    data_size: int
    scaler: torch.amp.GradScaler | None

    def __call__(self, step_batch: StepBatch) -> torch.Tensor:
        """This rank's share of the step's loss, detached, 0-dim; zero if it does not have the last stage."""
        dispatcher, microbatches = self.forward.dispatcher, step_batch.microbatches
        batches = [to_device(microbatch.batch, self.forward.device) for microbatch in microbatches]
        for index, (batch, microbatch) in enumerate(zip(batches, microbatches, strict=True)):
            dispatcher.microbatch_begin.fire_with(batch, index, microbatch.samples)
        shares = [step_batch.share(index) for index in range(len(microbatches))]
        runner = self.parallel.runner
        losses = runner.train(batches, [self._factor(share) for share in shares], self.forward)
        self.parallel.finish_backward()
        if dispatcher.listens_anywhere(Event.MICROBATCH_END):  # the loss of the step reaches all ranks with the norm
            shared, event, last = runner.share(losses).unbind(), dispatcher.microbatch_end, len(batches) - 1
            for index, (batch, microbatch, loss) in enumerate(zip(batches, microbatches, shared, strict=True)):
                event.fire_with(loss, {"loss": loss}, batch, index, microbatch.samples, index == last)
        counted = [loss * share for loss, share in zip(losses.unbind(), shares, strict=True) if share]
        return torch.stack(counted).sum() if counted else losses.new_zeros(())

    def _factor(self, share: float) -> float | torch.Tensor:
        factor = share * self.data_size
        return factor if self.scaler is None else self.scaler.scale(torch.full((), factor, device=self.forward.device))


Accumulation = MicrobatchAccumulation | PipelinedAccumulation

LossFunction = Callable[[Any, Any], torch.Tensor]
"""``loss_fn(outputs, batch) -> loss``, for models that return no loss; ``loss_fn(outputs, y)`` for batches ``(x, y)``
whose last part the model does not take."""

Outputs = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Calls ``module(**batch)`` (a mapping), ``module(*batch)`` (a tuple or list) or ``module(batch)``, as far as
    ``signature`` takes the batch.

    The loss is ``loss_fn(outputs, batch)``; without a ``loss_fn``, the returned tensor, its ``.loss`` or its
    ``["loss"]``.
    """

    dispatcher: Dispatcher
    module: nn.Module
    loss_fn: LossFunction | None
    device: torch.device
    autocast: torch.dtype | None
    is_compiled: bool
    signature: BatchSignature

    @property
    def modules(self) -> list[nn.Module]:
        """The model, and the loss function if it is a module."""
        return [each for each in (self.module, self.loss_fn) if isinstance(each, nn.Module)]

    def __call__(self, batch: Any) -> tuple[torch.Tensor, Outputs]:
        if self.autocast is None:
            return self._call(batch)
        with torch.autocast(self.device.type, dtype=self.autocast):
            return self._call(batch)

    def _call(self, batch: Any) -> tuple[torch.Tensor, Outputs]:
        dispatcher = self.dispatcher
        if self.is_compiled:
            keep_batch_size_static(batch)
        if dispatcher.before_forward:
            args, kwargs = self.signature.arguments(batch)
            dispatcher.before_forward.fill(batch, args, kwargs)
            dispatcher.before_forward.fire()
            returned = self.module(*args, **self.signature.taken(kwargs))
        elif isinstance(batch, (dict, Mapping)):  # dict first: Mapping takes 1 µs
            returned = self.module(**self.signature.taken(batch))
        else:
            returned = self.module(*self.signature.arguments(batch)[0])
        loss, outputs = self._find_loss(returned, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigurationError(f"the loss is {_described(loss)}; needs one number: a 0-dim tensor, the mean loss")
        if dispatcher.after_forward:
            dispatcher.after_forward.fill(outputs, batch)
            dispatcher.after_forward.fire()
            loss = outputs["loss"]
        return loss, outputs

    def _find_loss(self, returned: Any, batch: Any) -> tuple[torch.Tensor, Outputs]:
        if self.loss_fn is not None:
            loss = self.loss_fn(returned, self.signature.loss_argument(batch))
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
            f"the model returned {_described(returned)} and no loss; return the loss as a 0-dim tensor, as .loss or "
            f'as ["loss"], or pass loss_fn(outputs, batch) to the trainer{self.signature.advice(batch)}'
        )


def _described(returned: Any) -> str:
    if isinstance(returned, Tensor):
        return f"a tensor of shape {tuple(returned.shape)}"
    return "None" if returned is None else f"a {type(returned).__name__}"


class BatchSignature:
    """Which parts of a batch the model takes, and which one the loss function does.

    A mapping's columns that are no parameters of ``model.forward`` are not passed to it. Of ``(x, y)``, the last part
    is the loss function's if that has a ``target``, as torch's do, or the model takes one argument less.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None) -> None:
        base = getattr(model, "get_base_model", None)  # peft's wrapper passes any column on
        try:
            parameters = [*inspect.signature((base() if callable(base) else model).forward).parameters.values()]
        except ValueError:  # a traced model has no signature: it may take anything
            parameters = [*inspect.signature(lambda *args, **kwargs: None).parameters.values()]
        kinds = {each.kind for each in parameters}
        self._named = {each.name for each in parameters if each.kind is not inspect.Parameter.POSITIONAL_ONLY}
        self._takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds
        positional = [each for each in parameters if each.kind in _POSITIONAL]
        self._most = math.inf if inspect.Parameter.VAR_POSITIONAL in kinds else len(positional)
        self._has_loss_fn = loss_fn is not None
        self._loss_name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        self._takes_target = _second_parameter(loss_fn) == "target"
        self._is_of_torch = str(getattr(loss_fn, "__module__", "")).startswith("torch.nn.")
        self._model = type(model).__name__
        self._warned = set[str]()

    def taken(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """The columns that the model takes. Warns once of each other one."""
        if self._takes_any_name or columns.keys() <= self._named:
            return columns
        others = [name for name in columns if name not in self._named]
        if new := [name for name in others if name not in self._warned]:
            self._warned |= {*new}
            if collectives.rank() == 0:
                text = "%s.forward() does not take %s: not passed to the model; loss_fn= and callbacks get all columns"
                logger.warning(text, self._model, ", ".join(map(repr, new)))
        if len(others) == len(columns):
            raise ConfigurationError(
                f"{self._model}.forward({', '.join(self._named)}) takes none of the batch's columns: "
                f"{', '.join(map(repr, others))}; rename them, or pass data_collator="
            )
        return {name: value for name, value in columns.items() if name in self._named}

    def arguments(self, batch: Any) -> tuple[list[Any], dict[str, Any]]:
        """The model's arguments; of a mapping, all columns."""
        if isinstance(batch, Mapping):
            return [], dict(batch)
        if not isinstance(batch, (tuple, list)):
            return [batch], {}
        if batch and all(isinstance(each, str) for each in batch):
            raise ConfigurationError(
                f"the model was given a batch of {len(batch)} texts ({batch[0][:40]!r}…); convert them to tensors in "
                "the dataset, or pass data_collator=, a function from a list of samples to a batch"
            )
        if len(batch) > self._most and not self._has_loss_fn:
            raise ConfigurationError(
                f"the batch has {len(batch)} parts, and {self._model}.forward() takes {self._most}; pass loss_fn=, "
                "which is called with the outputs and the last part: CrossEntropyLoss(), or a function (outputs, y)"
            )
        return [*(batch[:-1] if self._has_target(batch) else batch)], {}

    def loss_argument(self, batch: Any) -> Any:
        """What the loss function gets besides the outputs."""
        if self._takes_target and self._is_of_torch and isinstance(batch, Mapping):
            raise ConfigurationError(
                f"loss_fn: {self._loss_name} takes (outputs, target), and the batch is a mapping of "
                f"{', '.join(map(repr, batch))}; pass a function (outputs, batch) that picks both, such as lambda "
                "outputs, batch: loss(outputs, batch['labels']), or let the dataset yield (x, y)"
            )
        return batch[-1] if self._has_target(batch) else batch

    def advice(self, batch: Any) -> str:
        """For a model that returned no loss."""
        others = [name for name in batch if name not in self._named] if isinstance(batch, Mapping) else []
        return f" (it does not take {', '.join(map(repr, others))})" if others and not self._takes_any_name else ""

    def _has_target(self, batch: Any) -> bool:
        is_pair = isinstance(batch, (tuple, list)) and len(batch) > 1
        return is_pair and (self._takes_target or (self._has_loss_fn and len(batch) == self._most + 1))


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _second_parameter(loss_fn: object) -> str | None:
    try:
        names = [*inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn).parameters]  # type: ignore[arg-type]
    except (TypeError, ValueError):  # None, or a builtin without a signature
        return None
    return names[1] if len(names) > 1 else None


def keep_batch_size_static(batch: Any) -> None:
    """Make ``torch.compile`` specialize on each batch size, instead of using dynamic shapes from the second size on.

    With dynamic shapes, the kernels that compute a batch, and so the rounding of its sums, depend on the sizes that
    this process has seen before: a process that resumes at an epoch's last, smaller batch sees that size first.
    """
    for tensor in tensors_in(batch):
        if tensor.dim():
            torch._dynamo.mark_static(tensor, 0)


@dataclass(frozen=True, slots=True)
class PipelinedForward:
    """Calls a model that is cut into pipeline stages, in evaluation. Collective.

    The loss is on every rank. The outputs are where the last stage is; their tensors are sent to the other ranks if a
    callback handles on_prediction_step.
    """

    forward: ForwardPass
    runner: PipelineRunner

    @property
    def modules(self) -> list[nn.Module]:
        """The model, its stages on this rank, and the loss function if it is a module."""
        return [*self.forward.modules, *self.runner.modules]

    def __call__(self, batch: Any) -> tuple[torch.Tensor, Outputs]:
        loss, outputs = self.runner.evaluate(batch, self.forward)
        if self.forward.dispatcher.listens_anywhere(Event.PREDICTION_STEP):
            known = None if outputs is None else dict(outputs)
            return loss, {**self.runner.share_outputs(known), "loss": loss}
        return loss, {"loss": loss}


EvaluationForward = ForwardPass | PipelinedForward
"""Computes a batch's mean loss, a 0-dim tensor, and the outputs with the loss under ``"loss"``; ``modules`` are to be
in evaluation mode meanwhile."""


class AgreedGradScaler(torch.amp.GradScaler):
    """Unscales this rank's shards; an update is skipped if any rank finds NaN or infinity."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        kinds: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kinds[parameter.grad.dtype].append(dense(parameter.grad))
        found = found_inf.clone()
        with torch.no_grad():
            for gradients in kinds.values():
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inv_scale.to(found.device))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return {found.device: found}
