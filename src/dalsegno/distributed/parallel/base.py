"""Parallel: interface between the training step and a parallel mode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from dalsegno.distributed import collectives
from dalsegno.distributed.clip_grad import GradientClipping, StepTotals, totals_of_whole
from dalsegno.distributed.modes import DDP, FSDP, Mode
from dalsegno.distributed.sharded_tensors import unexpanded
from dalsegno.errors import ConfigurationError


class Parallel:
    """A model, which this class leaves as it is: whole in one process, or as the user has spread it; the others
    distribute it.

    The backward pass of the last micro-batch averages gradients over the ranks.
    """

    module: nn.Module
    """The module to call with a batch."""
    loss_fn: nn.Module | None = None
    """Computes the loss from the output, if it is trained too."""
    complete_gradients: Callable[[], None] | None = None
    """To be called after the last backward pass of a step, if that leaves gradients that are not reduced."""
    entries: Collection[nn.Module] = ()
    """Modules at which another rank continues the forward pass: the first of each pipeline stage but the first."""

    def __init__(self, model: nn.Module, distribute: Callable[[], object] = lambda: None) -> None:
        """``distribute``: distributes the model, which may replace its parameters."""
        self.module = model
        self._before = {id(parameter): name for name, parameter in model.named_parameters()}
        distribute()
        self._sharded = [part for part in model.modules() if isinstance(part, FSDPModule)]

    @contextmanager
    def training(self) -> Iterator[None]:
        """Enclose a leg; exits on every path."""
        yield

    def synchronize(self, wanted: bool) -> None:
        """Set whether the next backward pass reduces gradients over the ranks (only a step's last needs to)."""
        for part in self._sharded:
            part.set_requires_gradient_sync(wanted, recurse=False)

    def rebind(self, optimizer: Optimizer) -> None:
        """Substitute the new parameters in an optimizer that was built before the model was distributed, and has not
        stepped."""
        now = dict(self.module.named_parameters())
        known = {id(parameter) for parameter in now.values()}
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if id(parameter) in known or id(parameter) not in self._before:
                    continue
                if optimizer.state:
                    raise ConfigurationError(
                        "optimizer: it has stepped before the model was sharded; build a new one on the model that you "
                        "pass to the trainer"
                    )
                group["params"][index] = now[self._before[id(parameter)]]

    def totals(self, parameters: Sequence[nn.Parameter]) -> StepTotals:
        """Return what clips the gradients of these parameters. To be called once the optimizer has them."""
        return totals_of_whole(GradientClipping(parameters))


def make_copies_equal(model: nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers: each rank is about to keep a part of its own copy. Collective."""
    collectives.broadcast_tensors([*model.parameters(), *map(unexpanded, model.buffers())])


def tied_parameters(model: nn.Module) -> dict[nn.Parameter, dict[str, tuple[nn.Module, str]]]:
    """Of each parameter that has several places, these, a module and a key, by its names there."""
    places: dict[nn.Parameter, dict[str, tuple[nn.Module, str]]] = defaultdict(dict)
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places[parameter][f"{name}.{key}" if name else key] = module, key
    return {parameter: its for parameter, its in places.items() if len(its) > 1}


# --- a model and a loss function with its own parameters, trained together ------------------------------------------


class WithTrainedLoss(Parallel):
    """Distributes both in the same mode, as separate units, so that the gradients of both are averaged."""

    def __init__(self, model: Parallel, loss_fn: Parallel) -> None:
        self.module, self.loss_fn = model.module, loss_fn.module
        self._parts = [model, loss_fn]
        if any(part.complete_gradients for part in self._parts):
            self.complete_gradients = self._complete_gradients

    @contextmanager
    def training(self) -> Iterator[None]:
        model, loss_fn = self._parts
        with model.training(), loss_fn.training():
            yield

    def synchronize(self, wanted: bool) -> None:
        for part in self._parts:
            part.synchronize(wanted)

    def _complete_gradients(self) -> None:
        for part in self._parts:
            if part.complete_gradients is not None:
                part.complete_gradients()

    def rebind(self, optimizer: Optimizer) -> None:
        for part in self._parts:
            part.rebind(optimizer)


def has_own_parameters(loss_fn: nn.Module, model: nn.Module, modes: Sequence[Mode]) -> bool:
    """Whether ``loss_fn`` has trainable parameters that the model does not have. Call before distributing either.
    Raises ConfigurationError if they share a parameter whose gradient these modes could not average."""
    of_model = {id(parameter) for parameter in model.parameters()}
    own = [each for each in loss_fn.parameters() if id(each) not in of_model and each.requires_grad]
    shared = next((name for name, each in loss_fn.named_parameters() if id(each) in of_model), None)
    are_replaced = any(not isinstance(mode, DDP) for mode in modes)
    if shared is not None and (are_replaced or (own and modes)):
        raise ConfigurationError(
            f"loss_fn: {type(loss_fn).__name__} shares {shared} with the model, and over several ranks "
            f"(parallel={', '.join(map(str, modes))}) its gradient would be wrong; compute the loss in the "
            "model's forward"
        )
    return bool(own)


# --- dtypes of forward passes, and of the parameters that FSDP gathers for them -------------------------------------


def autocast_dtype(*, bf16: bool, fp16: bool) -> torch.dtype | None:
    """The dtype that the forward pass is cast to; None: that of the model's weights."""
    return torch.bfloat16 if bf16 else torch.float16 if fp16 else None


def gathered_dtype(model: nn.Module, modes: Sequence[Mode], *, bf16: bool) -> torch.dtype | None:
    """Return the dtype in which FSDP gathers parameters, if the user gave no ``mp_policy``; None: their own.

    bfloat16 under ``bf16``, since autocast would cast them after they were gathered in float32, in twice the traffic
    and memory. Not for a model with batch normalization: its running statistics are float32, and the kernels do not mix
    dtypes.
    """
    gathers = any(isinstance(mode, FSDP) and mode.mp_policy is None for mode in modes)
    has_statistics = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    return torch.bfloat16 if bf16 and gathers and not has_statistics else None
