"""Lightning: a file ``.ckpt`` of ``trainer.save_checkpoint``, a dict that ``torch.save`` wrote.

Its keys: ``state_dict`` (of the LightningModule: a model in its attribute ``net`` has names that begin with ``net.``),
``optimizer_states`` and ``lr_schedulers`` (lists), ``global_step``, ``epoch``, ``loops``, ``callbacks``,
``hyper_parameters``, and the gradient scaler under the name of its plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dalsegno.errors import ConfigurationError

from . import pickles
from .optimizer_contents import OptimizerContents
from .reading import NOT_THERE, ReadOptions, settings_of_optimizer
from .run_state import Place, RunState
from .writing import WriteOptions, Written, expect_optimizer, save, state_dict

PROGRAM = "Lightning"
VERSION = "pytorch-lightning_version"
SCALER = "MixedPrecision"
_LAYOUT = "2.0.0"
"""The version since which the layout is this one."""
_TAKEN = {"state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "loops", VERSION, SCALER}


def is_at(path: Path) -> bool:
    return path.is_file() and path.suffix == ".ckpt"


def read(path: Path, options: ReadOptions) -> RunState:
    """
    Raises:
        StateMismatch: if the file contains more than data.
        ConfigurationError: if it is not Lightning's, has several optimizers, or the optimizer's class is unknown.
    """
    unpickled = pickles.read({"file": path})
    content = unpickled.content["file"]
    if not isinstance(content, Mapping) or VERSION not in content:
        raise ConfigurationError(f"{path}: has no {VERSION}, so Lightning did not write it; try program='torch'")
    model, tied = options.model(content["state_dict"], pickles.tied_in(content["state_dict"]))
    states = content.get("optimizer_states") or []
    if len(states) > 1:
        raise ConfigurationError(f"{path}: contains {len(states)} optimizers; a run here has one")
    optimizer = options.optimizer_of(next(iter(states), None), f"{path}: optimizer_states[0]")
    return RunState(
        program=PROGRAM,
        step=options.step_of(content.get("global_step"), optimizer, path),
        epoch=options.epoch,
        model=model,
        tied=tied,
        optimizer=optimizer,
        schedulers=content.get("lr_schedulers") or [],
        scaler=content.get(SCALER),
        place=_place(content) if options.epoch is None else Place.at(options.epoch),
        settings=settings_of_optimizer(optimizer),
        left_out=_left_out(content, optimizer, unpickled.dropped),
    )


def write(run: RunState, target: Path, options: WriteOptions) -> Written:
    """The file from which ``trainer.fit(module, ckpt_path=…)`` resumes."""
    optimizer = expect_optimizer(run, PROGRAM)
    content = {
        "epoch": run.place.epoch,
        "global_step": run.step,
        VERSION: _LAYOUT,
        "state_dict": state_dict(run, options.add_prefix),
        "loops": {"fit_loop": _progress(run)},
        "callbacks": {},
        "optimizer_states": [optimizer.numbered()],
        "lr_schedulers": [dict(each) for each in run.schedulers],
        **({} if run.scaler is None else {SCALER: dict(run.scaler)}),
    }
    return [save(content, target)], {"random generators": "such files have no place for them"}


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


def _place(content: Mapping[str, Any]) -> Place:
    """From the progress of the loops. A run that has ended counts an epoch as completed that it left in the middle."""
    loops = content.get("loops", {}).get("fit_loop", {})
    if "epoch_loop.batch_progress" not in loops:
        return Place(int(content.get("epoch") or 0))
    begun, batches = loops["epoch_progress"]["current"]["ready"], loops["epoch_loop.batch_progress"]
    if batches["is_last_batch"] or not begun:
        return Place(begun, 0.0)
    return Place(begun - 1, microbatches=batches["current"]["processed"])


def _left_out(content: Mapping[str, Any], optimizer: OptimizerContents | None, dropped: Any) -> dict[str, str]:
    left_out = {name: "unknown to a run here" for name in content if name not in _TAKEN | {"callbacks"}}
    for name in content.get("callbacks") or ():
        left_out[f"callback {name}"] = "its state has no meaning for a callback here"
    missing = ["random generators", "log", "order of the data"] + ["optimizer"] * (optimizer is None)
    return left_out | {part: NOT_THERE[part] for part in missing} | dict.fromkeys(dropped, "not plain data")
