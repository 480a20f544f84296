"""Inference: call a model for its outputs, in evaluation mode, whatever the parallel mode.

A model that is cut into pipeline stages is a shell on each rank: a plain call would meet modules of other stages.
:func:`inference` makes such a call run all stages, so that text generation and the like need not know of pipelines.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dalsegno.distributed.pipeline.runner import PipelineRunner
from dalsegno.distributed.sharded_tensors import device_of


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients; on exit, restore each submodule's mode and reshard FSDP modules."""
    # Restored one by one: a frozen submodule may have been in evaluation mode before.
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training
            if isinstance(part, FSDPModule):
                part.reshard()  # FSDP2 leaves the root unsharded if no backward pass follows


_runners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[PipelineRunner]] = weakref.WeakKeyDictionary()
"""What runs the stages of each model that is cut. Weak on both sides, since the runner refers to the model."""


def run_stages_of(model: nn.Module, runner: PipelineRunner) -> None:
    """Register what runs the stages of ``model``, as long as ``runner`` exists."""
    _runners[model] = weakref.ref(runner)


@contextmanager
def inference(model: nn.Module, called: nn.Module | None = None) -> Iterator[None]:
    """Switch to evaluation mode without gradients, and make the model callable. To be entered on all ranks.

    Within the block, each call of a model that is cut into pipeline stages is collective: every rank calls it with the
    same arguments, and receives the outputs of the last stage. ``called``: the module that is called; None: the model.
    """
    reference = _runners.get(model)
    runner = None if reference is None else reference()
    if runner is None:
        with evaluating(model):
            yield
        return
    target = model if called is None else called
    before = vars(target).get("forward")
    with evaluating(model, *runner.modules):
        target.forward = _through_stages(target, runner, device_of(model))
        try:
            yield
        finally:
            del target.forward  # the class's own is found again
            if before is not None:
                target.forward = before


def _through_stages(module: nn.Module, runner: PipelineRunner, device: torch.device) -> Any:
    own = module.forward

    def call_stage(call: tuple[Any, Any]) -> tuple[Tensor, Any]:
        args, kwargs = call
        return torch.zeros((), device=device), own(*args, **kwargs)

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        _, outputs = runner.evaluate((args, kwargs), call_stage)
        return runner.share_outputs(outputs)

    return forward
