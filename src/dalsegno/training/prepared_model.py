"""PreparedModel: the model and its loss function on their device, spread over the ranks, with their optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, Optimizer
from torch.utils.checkpoint import checkpoint

from dalsegno.args import TrainingArguments
from dalsegno.checkpoint import unwrapped
from dalsegno.distributed import collectives
from dalsegno.distributed.blocks import outermost_blocks
from dalsegno.distributed.layout import Layout
from dalsegno.distributed.modes import STAGES
from dalsegno.distributed.parallel import Parallel, parallelize
from dalsegno.distributed.stage_places import is_on_other_stage
from dalsegno.errors import ConfigurationError, expect_known

from .optimizers import expect_optimizer, optimizer_from_args
from .train_step import LossFunction


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that is ready to be trained."""

    model: nn.Module
    """The user's own module."""
    device: torch.device
    layout: Layout
    """How the ranks share it and the data."""
    parallel: Parallel
    """How it is spread over the ranks; calls it."""
    loss_fn: LossFunction | None
    """As it is called: on the device and spread, if it is a module."""
    loss_module: nn.Module | None
    """The user's own loss function, if it is a module."""
    optimizer: Optimizer


def prepare_model(
    model: nn.Module,
    loss_fn: LossFunction | None,
    optimizer: Optimizer | None,
    args: TrainingArguments,
    device: torch.device,
    layout: Layout,
) -> PreparedModel:
    """Move ``model`` and ``loss_fn`` to ``device``, compile and spread them as ``args`` say, and rebind ``optimizer``
    to what they are now; None: a default one is built. Collective.
    """
    if STAGES not in layout.dimensions:  # else each rank moves its stages only: the whole model may not fit
        _move(model, device)
    if args.torch_compile:
        backend, mode = args.torch_compile_backend, args.torch_compile_mode
        try:
            model.compile(backend=backend, mode=mode)
        except RuntimeError as error:
            given = f"torch_compile_backend={backend!r}, torch_compile_mode={mode!r}"
            raise ConfigurationError(f"{given}: {error}") from error
    loss_module = unwrapped(loss_fn) if isinstance(loss_fn, nn.Module) else None
    if loss_module is not None:
        _move(loss_module, device)
    parallel = parallelize(model, args.parallel, layout, device, loss_module, bf16=args.bf16)
    if args.gradient_checkpointing:
        enable_gradient_checkpointing(model, args.gradient_checkpointing_kwargs or {}, parallel.entries)
    if optimizer is None:
        optimizer = optimizer_from_args([model] if loss_module is None else [model, loss_module], args)
    else:
        optimizer = expect_optimizer(optimizer)
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigurationError(
                f"optimizer: {type(optimizer).__name__}.step needs a closure, which only a loop of your own can give it"
            )
        parallel.rebind(optimizer)
    collectives.run_on_all_ranks(lambda: _check_sharded(optimizer))  # a rank of a pipeline has only some of the layers
    return PreparedModel(
        model, device, layout, parallel, parallel.loss_fn or loss_module or loss_fn, loss_module, optimizer
    )


def _move(module: nn.Module, device: torch.device) -> None:
    """Move the model or loss function, unless it is there. Raises ConfigurationError if it has DTensor parameters and
    would have to be moved: ``Module.to`` drops their hooks, which may be what reduces their gradients."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    elsewhere = next((name for name, each in tensors if each.device != device), None)
    if elsewhere is None:
        return
    if any(isinstance(each, DTensor) for each in module.parameters()):
        raise ConfigurationError(
            f"{type(module).__name__}: {elsewhere} is not on {device}, where this rank trains, and moving a module "
            f"drops the hooks of its DTensor parameters; call .to({str(device)!r}) before you spread it"
        )
    module.to(device)


def _check_sharded(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        are_sharded = {isinstance(each, DTensor) for each in group["params"] if not is_on_other_stage(each)}
        if group.get("fused") and len(are_sharded) > 1:
            raise ConfigurationError(
                f"optimizer: a fused {type(optimizer).__name__} cannot update the split layers of TensorParallel "
                "together with whole ones; use fused=False (optim='adamw'), or add FSDP(), which shards them all"
            )
        if isinstance(optimizer, Adafactor) and True in are_sharded:
            raise ConfigurationError(
                "optimizer: torch's Adafactor cannot update sharded parameters, whose row and column means would be "
                "over a shard only; use optim='adamw' or 'muon', whose state is sharded too, or parallel='ddp'"
            )


_SWITCHES = ("activation_checkpointing", "gradient_checkpointing")
"""Hugging Face's present name of it, and the former one."""

_OPTIONS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
"""Arguments of torch's ``checkpoint``, which passes any other on to the model."""


def enable_gradient_checkpointing(
    model: nn.Module, options: Mapping[str, Any], apart: Collection[nn.Module] = ()
) -> None:
    """Keep the inputs of a model's blocks, and compute the rest again in the backward pass (Chen et al. 2016, "Training
    Deep Nets with Sublinear Memory Cost", arXiv 1604.06174).

    Uses the model's own ``gradient_checkpointing_enable()``, if it has one, else each of its outermost blocks.

    Args:
        options: arguments of ``torch.utils.checkpoint.checkpoint``. Reentrant only if set here: FSDP2, and inputs that
            need no gradient, require the other kind.
        apart: modules at which another rank continues the forward pass. A block around one is computed in parts, so
            the blocks inside it are taken.
    """
    expect_known("argument in gradient_checkpointing_kwargs=", options, _OPTIONS)
    options = {"use_reentrant": False, **options}
    for name in _SWITCHES:
        enable = getattr(model, f"{name}_enable", None)
        if callable(enable):
            enable(**{f"{name}_kwargs": options})
            return
    blocks = outermost_blocks(model, apart)
    if not blocks:
        raise ConfigurationError(
            f"gradient_checkpointing=True: {type(model).__name__} has neither gradient_checkpointing_enable() nor "
            "blocks in a ModuleList or Sequential; use torch.utils.checkpoint in its forward()"
        )
    for block in blocks:
        # On the instance, so that the names and hooks of modules and the units of FSDP2 stay as they are.
        block.forward = partial(checkpoint, block.forward, **options)
