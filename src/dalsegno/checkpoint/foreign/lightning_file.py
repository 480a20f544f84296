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
from .run_state import Place, RunState
from .source import Source
from .torch_file import NO_RANDOM

PROGRAM = "Lightning"
HAS_SAFETENSORS = False
_VERSION = "pytorch-lightning_version"
_LAYOUT = "2.0.0"
"""The version since which the layout is this one."""
_SCALER = "MixedPrecision"
_KNOWN = {"state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "loops", "callbacks"}


def is_at(path: Path) -> bool:
    return path.is_file() and path.suffix == ".ckpt"


def read(source: Source) -> RunState:
    path, content = source.path, pickles.load(source.path)
    if not isinstance(content, Mapping) or _VERSION not in content:
        raise ConfigurationError(f"{path}: has no {_VERSION}, so Lightning did not write it; try program='torch'")
    optimizers = content.get("optimizer_states") or []
    if len(optimizers) > 1:
        raise ConfigurationError(f"{path}: contains {len(optimizers)} optimizers; a run here has one")
    return source.run_state(
        PROGRAM,
        content["state_dict"],
        optimizer=(next(iter(optimizers), None), f"{path}: optimizer_states[0]"),
        step=content.get("global_step"),
        place=_place(content),
        schedulers=content.get("lr_schedulers") or [],
        scaler=content.get(_SCALER),
        unknown=[name for name in content if name not in _KNOWN | {_VERSION, _SCALER}],
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


def write(run: RunState, target: Path, prefix: str) -> tuple[list[Path], Mapping[str, str]]:
    """The file from which ``trainer.fit(module, ckpt_path=…)`` resumes."""
    content = {
        "epoch": run.place.epoch,
        "global_step": run.step,
        _VERSION: _LAYOUT,
        "state_dict": run.state_dict(prefix),
        "loops": {"fit_loop": _progress(run)},
        "callbacks": {},
        "optimizer_states": [run.expect_optimizer(PROGRAM).numbered()],
        "lr_schedulers": [dict(each) for each in run.schedulers],
        **({} if run.scaler is None else {_SCALER: dict(run.scaler)}),
    }
    return [pickles.save(content, target)], NO_RANDOM


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
