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

PROGRAM = "Lightning"
VERSION = "pytorch-lightning_version"
SCALER = "MixedPrecision"
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
    model, tied = options.model(content["state_dict"], unpickled.tied("file.state_dict", content["state_dict"]))
    states = content.get("optimizer_states") or []
    if len(states) > 1:
        raise ConfigurationError(f"{path}: contains {len(states)} optimizers; a run here has one")
    optimizer = None
    if states:
        where = f"{path}: optimizer_states[0]"
        optimizer = OptimizerContents.of_state_dict(states[0], options.optimizer, options.renamed, where)
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


def _place(content: Mapping[str, Any]) -> Place:
    """From the progress of the loop over batches, which counts those of the current epoch."""
    epoch = int(content.get("epoch") or 0)
    progress = content.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
    if progress is None:
        return Place(epoch)
    done = progress["current"]["processed"]
    return Place(epoch + 1, 0.0) if progress["is_last_batch"] else Place(epoch, microbatches=done)


def _left_out(content: Mapping[str, Any], optimizer: OptimizerContents | None, dropped: Any) -> dict[str, str]:
    left_out = {name: "unknown to a run here" for name in content if name not in _TAKEN | {"callbacks"}}
    for name in content.get("callbacks") or ():
        left_out[f"callback {name}"] = "its state has no meaning for a callback here"
    missing = ["random generators", "log", "order of the data"] + ["optimizer"] * (optimizer is None)
    return left_out | {part: NOT_THERE[part] for part in missing} | dict.fromkeys(dropped, "not plain data")
