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
from .pickles import Unpickled, tied_in
from .reading import NOT_THERE, ReadOptions, settings_of_optimizer
from .run_state import Place, RunState
from .writing import WriteOptions, Written, only_first, save, state_dict

PROGRAM = "torch.save"
_MODEL = ("model", "model_state_dict", "state_dict", "model_state", "module", "net", "weights")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optimizer_state", "optim", "optim_state_dict", "opt")
_SCHEDULER = ("lr_scheduler", "scheduler", "lr_scheduler_state_dict", "scheduler_state_dict", "sched")
_SCALER = ("scaler", "grad_scaler", "scaler_state_dict", "amp_scaler")
_STEP = ("global_step", "step", "iteration", "iter_num", "iter", "steps")
_EPOCH = ("epoch",)
NO_PLACE = {"random generators": "such files have no place for them"}
_KNOWN = {*_MODEL, *_OPTIMIZER, *_SCHEDULER, *_SCALER, *_STEP, *_EPOCH}


def is_at(path: Path) -> bool:
    return path.is_file() and path.suffix != ".safetensors"


def read(path: Path, options: ReadOptions) -> RunState:
    """
    Raises:
        StateMismatch: if the file contains more than data.
        ConfigurationError: if it contains no model, or neither the file nor the options know step or optimizer class.
    """
    return run_of_dicts(PROGRAM, pickles.read({"file": path}), options, path)


def write(run: RunState, target: Path, options: WriteOptions) -> Written:
    """A dict with ``model``, ``optimizer``, ``lr_scheduler``, ``scaler``, ``step``, ``epoch``."""
    parts = {"model": state_dict(run, options.add_prefix), **progress_of(run)}
    if run.optimizer is not None:
        parts["optimizer"] = run.optimizer.numbered()
    return [save(parts, target)], NO_PLACE | only_first(run)


def progress_of(run: RunState) -> dict[str, Any]:
    """All but model and optimizer."""
    return {
        "step": run.step,
        "epoch": run.epoch,
        **({"lr_scheduler": dict(run.schedulers[0])} if run.schedulers else {}),
        **({} if run.scaler is None else {"scaler": dict(run.scaler)}),
    }


def run_of_dicts(program: str, unpickled: Unpickled, options: ReadOptions, path: Path) -> RunState:
    """A run whose parts are the items of one dict, ``unpickled.content["file"]``."""
    content = unpickled.content["file"]
    if not isinstance(content, Mapping):
        raise ConfigurationError(f"{path}: contains a {type(content).__name__}, not a dict with a model's state")
    key = _found(content, _MODEL, Mapping)
    tensors = content if key is None else content[key]
    if not any(isinstance(each, torch.Tensor) for each in tensors.values()):
        raise ConfigurationError(f"{path}: contains no model's state_dict; its keys are {', '.join(map(str, content))}")
    names = [name for name, each in tensors.items() if isinstance(each, torch.Tensor)]
    model, tied = options.model(tensors, tied_in(tensors))
    states = _found(content, _OPTIMIZER, Mapping)
    optimizer = options.optimizer_of(states and content[states], f"{path}: {states}")
    schedule, scaler = (_found(content, keys, Mapping) for keys in (_SCHEDULER, _SCALER))
    saved_epoch = content.get(_found(content, _EPOCH, int | float))
    epoch = options.epoch if options.epoch is not None else saved_epoch
    left_out = {str(name): "unknown to a run here" for name in content if name not in _KNOWN and name not in names}
    left_out |= dict.fromkeys(unpickled.dropped, "not plain data")
    missing = ["random generators", "log", "order of the data"]
    missing += ["place in the data"] * (epoch is None) + ["optimizer"] * (optimizer is None)
    return RunState(
        program=program,
        step=options.step_of(content.get(_found(content, _STEP, int | torch.Tensor)), optimizer, path),
        epoch=epoch,
        model=model,
        tied=tied,
        optimizer=optimizer,
        schedulers=[content[schedule]] if schedule else [],
        scaler=content[scaler] if scaler else None,
        place=Place() if epoch is None else Place.at(epoch),
        settings=settings_of_optimizer(optimizer),
        left_out={**left_out, **{part: NOT_THERE[part] for part in missing}},
    )


def _found(content: Mapping[str, Any], keys: tuple[str, ...], kind: Any) -> str | None:
    return next((key for key in keys if isinstance(content.get(key), kind)), None)
