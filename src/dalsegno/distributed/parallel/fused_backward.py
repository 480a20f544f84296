"""FusedBackward: updates each parameter in the backward pass once its gradient is complete, and frees the gradient.

So at most one gradient is in memory (with FSDP2, those of one unit). The resulting weights equal those of a joint
update, because an optimizer treats each parameter separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from dalsegno.distributed.clip_grad import StepTotals, totals_of_whole
from dalsegno.distributed.gradients import GradientNorms
from dalsegno.distributed.parallel.base import WithTrainedLoss
from dalsegno.distributed.sharded_tensors import total_norm
from dalsegno.errors import ConfigurationError

from .base import Parallel
from .ddp import DataParallel


class FusedBackward(Parallel):
    """Distributes a model by ``parallel`` and updates it in the backward pass of each step's last micro-batch.

    Each parameter has an optimizer of the same class; hyperparameters and state stay in ``optimizer``, so schedules
    and checkpoints work as in any run. ``optimizer`` itself updates a parameter that the last micro-batch does not
    reach, from the gradient it kept, after the backward pass.

    ``parallel`` must reduce gradients before the hooks on parameters are called. The optimizer's step hooks are called
    for each parameter. ``wants_norm`` is asked before each update whether the step asks for the total norm.
    """

    def __init__(
        self, parallel: Parallel, model: nn.Module, optimizer: Optimizer, wants_norm: Callable[[], bool]
    ) -> None:
        _check(parallel, optimizer)
        self.module = parallel.module
        self._parallel = parallel
        self._optimizer = optimizer
        self._is_last = True
        self._updated: set[int] = set()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._watch = partial(GradientNorms, model, optimizer, wants_norm)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Register the parameters' hooks and remove them on exit: the model may later be trained in another way."""
        with ExitStack() as hooks, self._parallel.training():
            self._norms = self._watch()
            hooks.callback(self._norms.close)
            for number, group in enumerate(self._optimizer.param_groups):
                for parameter in group["params"]:
                    if parameter.requires_grad:
                        update = partial(self._update, _copied(self._optimizer), number)
                        hooks.callback(parameter.register_post_accumulate_grad_hook(update).remove)
            self._is_last = True
            yield

    def synchronize(self, wanted: bool) -> None:
        if self._is_last:  # from the previous step: a new step starts
            self._updated.clear()
            self._norms.forget()
        self._is_last = wanted
        self._parallel.synchronize(wanted)

    def totals(self, parameters: Sequence[nn.Parameter]) -> StepTotals:
        return totals_of_whole(self._take_norm)

    def _take_norm(self, max_norm: float) -> torch.Tensor:
        """Return the total norm of the gradients, which have already been used and cannot be clipped."""
        self._norms.measure(self._optimizer)
        return total_norm(self._norms.take()).float()

    def _update(self, own: Optimizer, number: int, parameter: nn.Parameter) -> None:
        """Handle a complete gradient. ``own``: the parameter's optimizer; ``number``: index of its group."""
        if not self._is_last:
            return
        if id(parameter) in self._updated:
            raise ConfigurationError(
                f"fuse_optim_with_backward=True: {self._names.get(id(parameter), 'a parameter')} gets its gradient in "
                "several parts in one backward pass, as a shared parameter does under reentrant checkpointing; set "
                "use_reentrant=False, or fuse_optim_with_backward=False"
            )
        self._updated.add(id(parameter))
        group = self._optimizer.param_groups[number]
        own.param_groups, own.state = [{**group, "params": [parameter]}], self._optimizer.state
        own.step()
        for name, value in group.items():
            if name != "params" and own.param_groups[0].get(name) is not value:
                raise ConfigurationError(
                    f"fuse_optim_with_backward=True: {type(own).__name__} changes {name} in its step, for all "
                    "parameters together, so they cannot be updated one by one; set it to False"
                )
        parameter.grad = None


def _check(parallel: Parallel, optimizer: Optimizer) -> None:
    if isinstance(parallel, WithTrainedLoss):
        raise ConfigurationError(
            "fuse_optim_with_backward=True: loss_fn has its own parameters, which need a joint optimizer with the "
            "model; set it to False, or compute the loss in the model's forward"
        )
    if isinstance(parallel, DataParallel):
        raise ConfigurationError(
            "fuse_optim_with_backward=True: DDP keeps all gradients in its buckets until they are averaged, so it "
            "would save no memory; use parallel='fsdp'"
        )
    if not {"param_groups", "state"} <= vars(optimizer).keys():
        raise ConfigurationError(
            f"fuse_optim_with_backward=True: {type(optimizer).__name__} wraps another optimizer; pass that one"
        )


def _copied(optimizer: Optimizer) -> Optimizer:
    """Copy ``optimizer`` with its hooks, without calling its constructor, whose arguments are unknown."""
    copied = object.__new__(type(optimizer))
    vars(copied).update(vars(optimizer))
    vars(copied).pop("step", None)  # a schedule's wrapper, which counts the original optimizer's steps
    return copied
