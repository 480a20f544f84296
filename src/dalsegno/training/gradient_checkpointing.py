"""Gradient checkpointing: keep the inputs of a model's blocks, and compute the rest again in the backward pass.

Idea: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from dalsegno.distributed.blocks import outermost_blocks
from dalsegno.errors import ConfigurationError, UnknownName

_SWITCHES = ("activation_checkpointing", "gradient_checkpointing")
"""Hugging Face's present name of it, and the former one."""

_OPTIONS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
"""Arguments of torch's ``checkpoint``, which passes any other on to the model."""


def enable_gradient_checkpointing(
    model: nn.Module, options: Mapping[str, Any], apart: Collection[nn.Module] = ()
) -> None:
    """By the model's own ``gradient_checkpointing_enable()``, if it has one, else for each of its outermost blocks.

    Args:
        model: parameter names and modules stay as they are.
        options: arguments of ``torch.utils.checkpoint.checkpoint``. Reentrant only if set here: FSDP2, and inputs that
            need no gradient, require the other kind.
        apart: modules at which another rank continues the forward pass. A block around one is computed in parts, so
            the blocks inside it are taken.

    Raises:
        UnknownName: for an option that torch does not have.
        ConfigurationError: if the model has neither.
    """
    for name in options:
        if name not in _OPTIONS:
            raise UnknownName("argument in gradient_checkpointing_kwargs=", name, _OPTIONS)
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
