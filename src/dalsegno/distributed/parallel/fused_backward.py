"""Each parameter updated in the backward pass, as soon as its gradient is there, which is then freed at once.

So never more than one gradient is in memory (under FSDP2, those of one unit). The weights come out as they do when all
are updated together: an optimizer treats each parameter by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dalsegno.distributed.gradients import GradientNorms
from dalsegno.distributed.sharded_tensors import total_norm
from dalsegno.errors import ConfigurationError

from .base import Parallel
from .ddp import DataParallel
from .trained_loss import WithTrainedLoss


class FusedBackward(Parallel):
    """Spreads a model as ``parallel`` does, and updates it in the backward pass of each step's last micro-batch.

    There is an optimizer of the same class for each parameter; ``optimizer`` stays the one place where hyperparameters
    and state lie. So schedules act on it, and checkpoints save it, as in any run. A parameter that the last micro-batch
    does not reach keeps its gradient, and gets its update from ``optimizer`` itself, after the backward pass.

    Args:
        parallel: how the model is spread. Gradients must have been reduced when the hooks on parameters are called.
        model: for the names of its parameters.
        optimizer: whose step hooks are called for each parameter, too.
        wants_norm: asked before each update; whether :meth:`clip` is going to be asked for the total norm.

    Raises:
        ConfigurationError: if that cannot work with this optimizer, or with this way to spread a model.
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
        """Only meanwhile are there hooks on the parameters: the model may go on to be trained otherwise."""
        with ExitStack() as hooks, self._parallel.training():
            self._norms = self._watch()
            hooks.callback(self._norms.close)
            for number, group in enumerate(self._optimizer.param_groups):
                for parameter in group["params"]:
                    if parameter.requires_grad:
                        update = partial(self._update, _alike(self._optimizer), number)
                        hooks.callback(parameter.register_post_accumulate_grad_hook(update).remove)
            self._is_last = True
            yield

    def synchronize(self, wanted: bool) -> None:
        if self._is_last:  # until now: a step begins
            self._updated.clear()
            self._norms.forget()
        self._is_last = wanted
        self._parallel.synchronize(wanted)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """The total norm of the gradients as they were; there is nothing left to be clipped."""
        self._norms.look_at(self._optimizer)
        return total_norm(self._norms.take()).float()

    def _update(self, own: Optimizer, number: int, parameter: nn.Parameter) -> None:
        """A gradient is there. ``own`` is the parameter's optimizer, ``number`` that of its group."""
        if not self._is_last:
            return
        if id(parameter) in self._updated:
            raise ConfigurationError(
                f"fuse_optim_with_backward=True: {self._names.get(id(parameter), 'a parameter')} gets its gradient in "
                "several parts in one backward pass, as a shared one does under reentrant checkpointing; "
                "use_reentrant=False, or do without"
            )
        self._updated.add(id(parameter))
        group = self._optimizer.param_groups[number]
        own.param_groups, own.state = [{**group, "params": [parameter]}], self._optimizer.state
        own.step()
        for name, value in group.items():
            if name != "params" and own.param_groups[0].get(name) is not value:
                raise ConfigurationError(
                    f"fuse_optim_with_backward=True: {type(own).__name__} changes {name} in its step, for all "
                    "parameters together, so they cannot be updated one by one"
                )
        parameter.grad = None


def _check(parallel: Parallel, optimizer: Optimizer) -> None:
    if isinstance(parallel, WithTrainedLoss):
        raise ConfigurationError(
            "fuse_optim_with_backward=True: loss_fn has parameters of its own, which only an optimizer of all can "
            "train with the model; do without one of the two, or let the model compute the loss, in its forward"
        )
    if isinstance(parallel, DataParallel):
        raise ConfigurationError(
            "fuse_optim_with_backward=True: DDP keeps all gradients, in its buckets, until it has averaged them, so "
            "nothing would be gained; use parallel='fsdp'"
        )
    if not {"param_groups", "state"} <= vars(optimizer).keys():
        raise ConfigurationError(
            f"fuse_optim_with_backward=True: {type(optimizer).__name__} has another optimizer inside; give that one"
        )


def _alike(optimizer: Optimizer) -> Optimizer:
    """One like it, with its hooks. Built without its constructor, whose arguments nobody knows any more."""
    alike: Any = object.__new__(type(optimizer))
    vars(alike).update(vars(optimizer))
    vars(alike).pop("step", None)  # a schedule's, which counts the steps of the one it was built on
    made: Optimizer = alike
    return made
