"""Files of ``torch.save``: a dict with the states of model and optimizer, as many loops and Lightning save it.

A loop's parts are found by the names that people give them, such as ``model_state_dict`` or ``optimizer``; the file may
be the model's ``state_dict`` itself.

Keys of Lightning's ``.ckpt``: ``state_dict`` (of the LightningModule: a model in its attribute ``net`` has names that
begin with ``net.``), ``optimizer_states`` and ``lr_schedulers`` (lists), ``global_step``, ``epoch``, ``loops``,
``callbacks``, ``hyper_parameters``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dalsegno.checkpoint.foreign.run_state import Files, Program, Source
from dalsegno.errors import ConfigurationError

from . import pickles
from .run_state import Place, RunState

_MODEL = ("model", "model_state_dict", "state_dict", "model_state", "module", "net", "weights")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optimizer_state", "optim", "optim_state_dict", "opt")
_SCHEDULER = ("lr_scheduler", "scheduler", "lr_scheduler_state_dict", "scheduler_state_dict", "sched")
_STEP = ("global_step", "step", "iteration", "iter_num", "iter", "steps")
_KNOWN = {*_MODEL, *_OPTIMIZER, *_SCHEDULER, *_STEP, "epoch"}


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
    optimizer, scheduler = (_found(content, keys) for keys in (_OPTIMIZER, _SCHEDULER))
    epoch = _found(content, ("epoch",), int | float)
    return source.run_state(
        program,
        tensors,
        optimizer=(content.get(optimizer), f"{source.path}: {optimizer}"),
        step=content.get(_found(content, _STEP, int | torch.Tensor)),
        place=Place.at(content[epoch]) if epoch else None,
        schedulers=[content[scheduler]] if scheduler else [],
        unknown=[name for name in content if name not in _KNOWN | names],
    )


def _found(content: Mapping[Any, Any], keys: tuple[str, ...], kind: Any = Mapping) -> str | None:
    return next((key for key in keys if isinstance(content.get(key), kind)), None)


def dict_of_run(run: RunState, prefix: str, optimizer: Mapping[str, Any] | None) -> dict[str, Any]:
    """``model``, ``optimizer``, ``lr_scheduler``, ``step``, ``epoch``."""
    return {
        "model": run.state_dict(prefix),
        "step": run.step,
        "epoch": run.place.position,
        **({"lr_scheduler": dict(run.schedulers[0])} if run.schedulers else {}),
        **({"optimizer": optimizer} if optimizer is not None else {}),
    }


def _read(source: Source) -> RunState:
    return run_of_dict(TORCH.name, pickles.load(source.path), source)


def _write(run: RunState, target: Path, prefix: str) -> Files:
    content = dict_of_run(run, prefix, run.optimizer.numbered() if run.optimizer is not None else None)
    return [pickles.save(content, target)], run.further_schedulers()


TORCH = Program(
    "torch.save",
    is_at=lambda path: path.is_file() and path.suffix != ".safetensors",
    read=_read,
    write=_write,
)

# --- Lightning ------------------------------------------------------------------------------------------------------

_VERSION = "pytorch-lightning_version"
_LAYOUT = "2.0.0"
"""The version since which the layout is this one."""
_LIGHTNING = {
    "state_dict",
    "optimizer_states",
    "lr_schedulers",
    "global_step",
    "epoch",
    "loops",
    "callbacks",
    _VERSION,
}


def _read_lightning(source: Source) -> RunState:
    path, content = source.path, pickles.load(source.path)
    if not isinstance(content, Mapping) or _VERSION not in content:
        raise ConfigurationError(f"{path}: has no {_VERSION}, so Lightning did not write it; try program='torch'")
    optimizers = content.get("optimizer_states") or []
    if len(optimizers) > 1:
        raise ConfigurationError(f"{path}: contains {len(optimizers)} optimizers; a run here has one")
    return source.run_state(
        LIGHTNING.name,
        content["state_dict"],
        optimizer=(next(iter(optimizers), None), f"{path}: optimizer_states[0]"),
        step=content.get("global_step"),
        place=_place(content),
        schedulers=content.get("lr_schedulers") or [],
        unknown=[name for name in content if name not in _LIGHTNING],
        callbacks=content.get("callbacks") or (),
    )


def _place(content: Mapping[str, Any]) -> Place:
    """From the progress of the loops. A run that has ended counts an epoch as completed that it left in the middle."""
    loops = content.get("loops", {}).get("fit_loop", {})
    if "epoch_loop.batch_progress" not in loops:
        return Place(int(content.get("epoch") or 0))
    begun, batches = loops["epoch_progress"]["current"]["ready"], loops["epoch_loop.batch_progress"]
    if batches["is_last_batch"] or not begun:
        return Place(begun, 0.0)
    return Place(begun - 1, microbatches=batches["current"]["processed"])


def _write_lightning(run: RunState, target: Path, prefix: str) -> Files:
    """The file from which ``trainer.fit(module, ckpt_path=…)`` resumes."""
    content = {
        "epoch": run.place.epoch,
        "global_step": run.step,
        _VERSION: _LAYOUT,
        "state_dict": run.state_dict(prefix),
        "loops": {"fit_loop": _progress(run)},
        "callbacks": {},
        "optimizer_states": [run.expect_optimizer(LIGHTNING.name).numbered()],
        "lr_schedulers": [dict(each) for each in run.schedulers],
    }
    return [pickles.save(content, target)], {}


def _progress(run: RunState) -> dict[str, Any]:
    """Counts of the loops. Lightning takes its ``global_step`` from the optimizer's."""
    steps = {"ready": run.step, "completed": run.step}
    both = {"total": steps, "current": steps}
    batches = dict.fromkeys(("ready", "completed", "started", "processed"), run.place.microbatches or 0)
    done = run.place.epoch
    epochs = {"ready": done + 1, "completed": done, "started": done + 1, "processed": done}
    gradients = {**steps, "started": run.step}
    return {
        "epoch_progress": {"total": epochs, "current": epochs},
        "epoch_loop.state_dict": {"_batches_that_stepped": run.step},
        "epoch_loop.batch_progress": {"total": batches, "current": batches, "is_last_batch": False},
        "epoch_loop.scheduler_progress": both,
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": both, "zero_grad": {"total": gradients, "current": gradients}}
        },
    }


LIGHTNING = Program(
    "Lightning",
    is_at=lambda path: path.is_file() and path.suffix == ".ckpt",
    read=_read_lightning,
    write=_write_lightning,
)
