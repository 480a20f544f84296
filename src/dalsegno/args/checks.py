"""Checks of each setting of TrainingArguments by itself: its type, from the annotation, and its value."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from dalsegno.errors import ConfigurationError, UnknownName, expect_known
from dalsegno.stateful.annotations import Checker, Mismatch, Must, Rules, checker_of, hints_of

Converted = TypeVar("Converted")

SCHEDULES: dict[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": (),
    "cosine_with_min_lr": (),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("power",),
    "constant": (),
    "constant_with_warmup": (),
    "inverse_sqrt": ("timescale",),
    "wsd": ("decay_type", "num_decay_steps"),
    "warmup_stable_decay": ("decay_type", "num_decay_steps"),
}
"""Arguments of each schedule, beyond the settings that all have."""
DECAY_TYPES = ("linear", "cosine", "1-sqrt")
_OTHER_SCHEDULE_ARGUMENTS = {
    **dict.fromkeys(("lr_end", "min_lr", "min_lr_rate", "min_lr_ratio"), "use TrainingArguments(min_lr=…)"),
    "num_warmup_steps": "use TrainingArguments(warmup_steps=…)",
}
_OF_TORCH = ("Adafactor", "SGD", "Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop")
OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adamw_fused"), "torch.optim:AdamW"),
    "muon": "dalsegno.training.muon:MuonWithAdamW",
    **{name.lower(): f"torch.optim:{name}" for name in _OF_TORCH},
    "adamw_8bit": "torchao.optim:AdamW8bit",
    "adamw_4bit": "torchao.optim:AdamW4bit",
    "adamw_fp8": "torchao.optim:AdamWFp8",
}
"""Each optimizer's class, as ``module:class``."""
_OTHER_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw_fused",
    "adamw_torch_8bit": "adamw_8bit",
    "adamw_torch_4bit": "adamw_4bit",
    "adamw_bnb_8bit": "adamw_8bit, or name its class: optim='bitsandbytes.optim:AdamW8bit'",
    "rprop": "name its class: optim='torch.optim:Rprop'",
}
TRACKERS = {"tensorboard": "TBLogger", "wandb": "WandbLogger", "mlflow": "MLflowLogger"}
"""Each tracker's logger, in :mod:`dalsegno.callbacks`."""
_OTHER_TRACKERS = {
    "all": "name those that you want",
    **dict.fromkeys(
        (
            *("azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub"),
            *("dvclive", "flyte", "neptune", "swanlab", "trackio"),
        ),
        "pass transformers' callback for it: callbacks=[…]",
    ),
}
Positive = Annotated[int, Must("an integer of at least 1", lambda value: value >= 1)]
Limit = Annotated[int, Must("an integer of at least -1", lambda value: value >= -1)]
Count = Annotated[int, Must("an integer of at least 0", lambda value: value >= 0)]
NotNegative = Annotated[float, Must("a number of at least 0", lambda value: 0 <= value < math.inf)]
Share = Annotated[NotNegative, Must("a fraction of the run's steps, 0 to 1", lambda value: value <= 1)]
Decay = Annotated[float, Must("a number from 0 to below 1", lambda value: 0 <= value < 1)]
_TYPES: dict[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    str: (str, "a string"),
    Path: (PathLike, "a path"),
    NoneType: (NoneType, "None"),
}
"""By the type in an annotation: the accepted type, and its description. A bool is neither integer nor number here."""


def _scalar(kind: Any) -> Checker:
    """Of a setting, which may be a number of NumPy: it becomes Python's."""
    accepted, words = _TYPES[kind]

    def check(value: Any) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise Mismatch(value, words)
        if isinstance(value, bool | int) or type(value) is float:
            return value
        return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else value

    return check


@functools.cache
def _checkers(cls: Any) -> dict[str, tuple[Checker, list[Must]]]:
    """By setting, with its further conditions; without those that take objects, which their own conversions check."""
    found = {}
    hints = hints_of(cls.__init__)
    for name in cls.__dataclass_fields__:
        form = hints.get(name, Any)
        kinds = get_args(form) if get_origin(form) in (Union, UnionType) else (form,)
        if get_origin(form) in (Literal, Annotated) or _TYPES.keys() >= {*kinds}:
            musts = [each for each in getattr(form, "__metadata__", ()) if isinstance(each, Must)]
            found[name] = checker_of(form, Rules(_scalar, listing="allowed are ")), musts
    return found


def check_each(args: Any, cls: type) -> None:
    """Check the type of each setting, and the value of those whose allowed values do not depend on others. ``cls``:
    TrainingArguments itself; ``args`` may be of a subclass, whose further settings are not checked."""
    if not isinstance(args.lr_scheduler_type, str) or args.lr_scheduler_type not in SCHEDULES:
        allowed = ", ".join(map(repr, SCHEDULES))
        raise ConfigurationError(f"lr_scheduler_type={args.lr_scheduler_type!r}; allowed are {allowed}")
    for name, (check, musts) in _checkers(cls).items():
        value = getattr(args, name)
        try:
            setattr(args, name, check(value))
        except Mismatch as mismatch:
            more = (must.words for must in musts if must.words.startswith(mismatch.wanted))
            complaint = mismatch.complaint or f"needs {next(more, mismatch.wanted)}"
            raise ConfigurationError(f"{name}={value!r}; {complaint}") from None
    if args.optim not in OPTIMIZERS and ":" not in args.optim:
        raise UnknownName("optimizer in optim=", args.optim, OPTIMIZERS, _OTHER_OPTIMIZERS)
    args.report_to = _trackers(args.report_to)
    for name in ("optim_args", "gradient_checkpointing_kwargs", "lr_scheduler_kwargs"):
        if not isinstance(getattr(args, name), dict | None):
            raise ConfigurationError(f"{name}={getattr(args, name)!r}; needs a dict of arguments, or None")
    _check_schedule(args.lr_scheduler_type, args.lr_scheduler_kwargs or {})
    if args.save_total_limit is not None and args.save_total_limit < 1:
        raise ConfigurationError(f"save_total_limit={args.save_total_limit!r}; needs at least 1, or None for all")
    seconds = args.max_seconds
    if seconds is not None and not 0 < seconds < math.inf:
        raise ConfigurationError(f"max_seconds={seconds!r}; needs a number over 0, or None for no limit")


def _check_schedule(schedule: str, arguments: dict[str, Any]) -> None:
    what = f"argument in lr_scheduler_kwargs= of {schedule!r}:"
    expect_known(what, arguments, SCHEDULES[schedule], _OTHER_SCHEDULE_ARGUMENTS)
    for name, value in arguments.items():
        if name == "decay_type":
            fits, words = value in DECAY_TYPES, f"one of {', '.join(DECAY_TYPES)}"
        else:
            fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
            words = "a number over 0"
        if not fits:
            raise ConfigurationError(f"lr_scheduler_kwargs={{{name!r}: {value!r}}}; needs {words}")


def _trackers(names: Any) -> list[str]:
    """Return ``report_to`` as a list, without ``none``."""
    several = [names] if isinstance(names, str) else names
    if not isinstance(several, Sequence) or not all(isinstance(name, str) for name in several):
        raise ConfigurationError(f"report_to={names!r}; needs a name, several, or 'none'")
    expect_known("tracker in report_to=", several, (*TRACKERS, "none"), _OTHER_TRACKERS)
    return [name for name in several if name != "none"]


def convert_named(name: str, given: Any, convert: Callable[[Any], Converted]) -> Converted:
    """Convert the value of a setting. An error names the setting, but for that of an unknown name."""
    try:
        return convert(given)
    except UnknownName:
        raise
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}={given!r}: {error}") from error
