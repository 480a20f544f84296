"""A file of ``torch.save``: a model's ``state_dict``, or a dict with it and the optimizer's, as many loops save.

The parts are found by the names that people give them, such as ``model_state_dict`` or ``optimizer``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dalsegno.errors import ConfigurationError

from . import pickles
from .run_state import Place, RunState
from .source import Source

PROGRAM = "torch.save"
HAS_SAFETENSORS = False
_MODEL = ("model", "model_state_dict", "state_dict", "model_state", "module", "net", "weights")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optimizer_state", "optim", "optim_state_dict", "opt")
_SCHEDULER = ("lr_scheduler", "scheduler", "lr_scheduler_state_dict", "scheduler_state_dict", "sched")
_SCALER = ("scaler", "grad_scaler", "scaler_state_dict", "amp_scaler")
_STEP = ("global_step", "step", "iteration", "iter_num", "iter", "steps")
_KNOWN = {*_MODEL, *_OPTIMIZER, *_SCHEDULER, *_SCALER, *_STEP, "epoch"}
NO_RANDOM = {"random generators": "such files have no place for them"}


def is_at(path: Path) -> bool:
    return path.is_file() and path.suffix != ".safetensors"


def read(source: Source) -> RunState:
    return run_of_dict(PROGRAM, pickles.load(source.path), source)


def write(run: RunState, target: Path, prefix: str) -> tuple[list[Path], Mapping[str, str]]:
    """A dict with ``model``, ``optimizer``, ``lr_scheduler``, ``scaler``, ``step``, ``epoch``."""
    parts = {"model": run.state_dict(prefix), **progress_of(run)}
    if run.optimizer is not None:
        parts["optimizer"] = run.optimizer.numbered()
    return [pickles.save(parts, target)], NO_RANDOM | run.further_schedulers()


def progress_of(run: RunState) -> dict[str, Any]:
    """All but model and optimizer."""
    return {
        "step": run.step,
        "epoch": run.place.position,
        **({"lr_scheduler": dict(run.schedulers[0])} if run.schedulers else {}),
        **({} if run.scaler is None else {"scaler": dict(run.scaler)}),
    }


def run_of_dict(program: str, content: Any, source: Source) -> RunState:
    """A run whose parts are the items of one dict."""
    if not isinstance(content, Mapping):
        raise ConfigurationError(f"{source.path}: contains a {type(content).__name__}, not a dict with a model's state")
    key = _found(content, _MODEL)
    tensors = content if key is None else content[key]
    names = {name for name, each in tensors.items() if isinstance(each, torch.Tensor)}
    if not names:
        keys = ", ".join(map(str, content))
        raise ConfigurationError(f"{source.path}: contains no model's state_dict; its keys are {keys}")
    optimizer, scheduler, scaler = (_found(content, keys) for keys in (_OPTIMIZER, _SCHEDULER, _SCALER))
    epoch = _found(content, ("epoch",), int | float)
    return source.run_state(
        program,
        tensors,
        optimizer=(content.get(optimizer), f"{source.path}: {optimizer}"),
        step=content.get(_found(content, _STEP, int | torch.Tensor)),
        place=Place.at(content[epoch]) if epoch else None,
        schedulers=[content[scheduler]] if scheduler else [],
        scaler=content[scaler] if scaler else None,
        unknown=[name for name in content if name not in _KNOWN | names],
    )


def _found(content: Mapping[Any, Any], keys: tuple[str, ...], kind: Any = Mapping) -> str | None:
    return next((key for key in keys if isinstance(content.get(key), kind)), None)
