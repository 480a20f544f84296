"""Checks of each setting of TrainingArguments by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dalsegno.errors import ConfigurationError, UnknownName

_CHOICES: dict[str, tuple[str, ...]] = {
    "lr_scheduler_type": ("linear", "cosine", "constant", "wsd"),
    "logging_strategy": ("no", "steps", "epoch"),
    "eval_strategy": ("no", "steps", "epoch"),
    "save_strategy": ("no", "steps", "epoch"),
    "save_frozen": ("once", "never"),
}
OPTIMIZERS = ("adamw", "adamw_fused", "adafactor", "sgd", "muon")
_OTHER_OPTIMIZERS = {
    "adam": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw_fused",
    "rmsprop": "name its class: optim='torch.optim:RMSprop'",
}
TRACKERS = ("tensorboard", "wandb", "mlflow", "comet_ml", "trackio")
_OTHER_TRACKERS = {
    "all": "name those that you want",
    "comet": "comet_ml",
    **dict.fromkeys(
        ("azure_ml", "clearml", "codecarbon", "dagshub", "dvclive", "flyte", "neptune", "swanlab"),
        "pass transformers' callback for it: callbacks=[…]",
    ),
}
_AT_LEAST: dict[str, float] = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 0,
    "weight_decay": 0,
    "warmup_steps": 0,
    "warmup_ratio": 0,
    "min_lr": 0,
    "decay_ratio": 0,
    "max_grad_norm": 0,
    "max_steps": -1,
    "num_train_epochs": 0,
    "logging_steps": 0,
    "eval_steps": 0,
    "save_steps": 0,
    "max_failed_saves": 1,
    "dataloader_num_workers": 0,
}


def check_each(args: Any) -> None:
    """Check the settings whose allowed values do not depend on others; ``args``: TrainingArguments.

    Raises:
        UnknownName: for an unknown optimizer; the message suggests the nearest known one.
        ConfigurationError: for a value that cannot work; the message lists the allowed values.
    """
    for name, allowed in _CHOICES.items():
        value = getattr(args, name)
        if value not in allowed:
            raise ConfigurationError(f"{name}={value!r}; allowed are {', '.join(map(repr, allowed))}")
    for name, least in _AT_LEAST.items():
        value, whole = getattr(args, name), isinstance(getattr(type(args), name), int)
        fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not (fits and least <= value < math.inf):
            kind = "whole number" if whole else "number"
            raise ConfigurationError(f"{name}={value!r}; needs a {kind} of at least {least:g}")
    if args.optim not in OPTIMIZERS and ":" not in args.optim:
        raise UnknownName("optimizer in optim=", args.optim, OPTIMIZERS, _OTHER_OPTIMIZERS)
    args.report_to = _trackers(args.report_to)
    for name in ("optim_args", "gradient_checkpointing_kwargs"):
        if not isinstance(getattr(args, name), dict | None):
            raise ConfigurationError(f"{name}={getattr(args, name)!r}; needs a dict of arguments, or None")
    for ratio in ("warmup_ratio", "decay_ratio"):
        if getattr(args, ratio) > 1:
            raise ConfigurationError(f"{ratio}={getattr(args, ratio)!r}; needs a share of the run's steps, 0 to 1")
    if args.save_total_limit is not None and (type(args.save_total_limit) is not int or args.save_total_limit < 1):
        raise ConfigurationError(f"save_total_limit={args.save_total_limit!r}; needs at least 1, or None for all")
    seconds = args.max_seconds
    if seconds is not None and (type(seconds) not in (int, float) or not 0 < seconds < math.inf):
        raise ConfigurationError(f"max_seconds={seconds!r}; needs a number over 0, or None for no limit")


def _trackers(names: Any) -> list[str]:
    """Return ``report_to`` as a list, without ``none``."""
    several = [names] if isinstance(names, str) else names
    if not isinstance(several, Sequence) or not all(isinstance(name, str) for name in several):
        raise ConfigurationError(f"report_to={names!r}; needs a name, several, or 'none'")
    for name in several:
        if name not in (*TRACKERS, "none"):
            raise UnknownName("tracker in report_to=", name, (*TRACKERS, "none"), _OTHER_TRACKERS)
    return [name for name in several if name != "none"]
