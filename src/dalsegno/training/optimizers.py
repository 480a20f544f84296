"""The optimizer that TrainingArguments describe: chosen by name, with weight decay on matrices only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from dalsegno.args import TrainingArguments
from dalsegno.config.names import find_named
from dalsegno.errors import ConfigurationError

_NAMED: dict[str, Callable[..., Optimizer]] = {
    "adamw": AdamW,
    "adamw_fused": partial(AdamW, fused=True),
    "adafactor": Adafactor,
    "sgd": SGD,
}


def optimizer_from_args(modules: Iterable[nn.Module], args: TrainingArguments) -> Optimizer:
    """``args.optim`` on all trained parameters of ``modules``, with weight decay on matrices, not on vectors (norms,
    biases).

    Raises:
        ConfigurationError: if it cannot be imported, is not an optimizer, or refuses its arguments.
    """
    parameters = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": args.weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    build = _NAMED.get(args.optim) or find_named(args.optim, "optimizer", "torch.optim:RMSprop")
    settings = _settings(build, args)
    try:
        optimizer = build([group for group in groups if group["params"]], **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"optim={args.optim!r} with {settings}: {error}") from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(f"optim={args.optim!r} builds a {type(optimizer).__name__}, not an optimizer of torch")
    return optimizer


def _settings(build: Callable[..., Optimizer], args: TrainingArguments) -> dict[str, Any]:
    """Arguments of the optimizer: Adam's own only if it takes them."""
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    takes = inspect.signature(build).parameters if args.optim.startswith("adamw") else {}
    return {
        "lr": args.learning_rate,
        **{name: value for name, value in adam.items() if name in takes},
        **(args.optim_args or {}),
    }
