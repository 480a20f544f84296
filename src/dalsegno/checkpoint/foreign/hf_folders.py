"""Folders of Hugging Face's programs: the Trainer's ``checkpoint-500``, and that of ``accelerator.save_state``.

::

    model.safetensors, or several with model.safetensors.index.json    (pytorch_model.bin in older ones)
    optimizer.pt   scheduler.pt   trainer_state.json                   of the Trainer: state_dicts, pickled; progress
    optimizer.bin  scheduler.bin  scaler.pt  random_states_0.pkl …     of Accelerate; the last ones of each rank
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dalsegno.checkpoint.foreign.run_state import Files, Program, Source
from dalsegno.errors import DamagedCheckpoint
from dalsegno.system import filesystem

from . import pickles
from .run_state import Place, RunState

_STATE = "trainer_state.json"
_SETTINGS = {
    "max_steps": "max_steps of the schedule",
    "train_batch_size": "per_device_train_batch_size",
    **{name: name for name in ("logging_steps", "eval_steps", "save_steps")},
}
"""Those in its state, which win over the arguments of a trainer that resumes, by their names here. Hugging Face's
trainer divides by them: 0, which turns a schedule off here, is left out."""
_RANDOM = "random_states_"
_SCALER = "scaler.pt"


def _read_trainer(source: Source) -> RunState:
    state = _trainer_state(source.path / _STATE)
    optimizer, schedulers = _states(source.path, "pt")
    return source.run_state(
        HUGGING_FACE.name,
        source.load_weights(),
        optimizer=optimizer,
        step=state["global_step"],
        place=Place.at(float(state.get("epoch") or 0.0)),
        schedulers=schedulers,
        callbacks=state.get("stateful_callbacks") or (),
    )


def _trainer_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())  # may contain NaN
    except ValueError as error:
        raise DamagedCheckpoint(f"{path}: is not JSON ({error})") from error
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        raise DamagedCheckpoint(f"{path}: has no global_step")
    return state


def _read_accelerate(source: Source) -> RunState:
    optimizer, schedulers = _states(source.path, "bin")
    known = ("model.", "model-", "pytorch_model.bin", "optimizer.bin", "scheduler.bin", _RANDOM, _SCALER)
    names = sorted(each.name for each in source.path.iterdir())
    unknown = [name for name in names if not name.startswith(known)]
    run = source.run_state(
        ACCELERATE.name, source.load_weights(), optimizer=optimizer, schedulers=schedulers, unknown=unknown
    )
    ranks = sum(name.startswith(_RANDOM) for name in names)
    if schedulers and schedulers[0].get("last_epoch") == run.step * ranks:
        run = replace(run, schedulers=[_at(run.step, schedulers[0])])
    return run


def _at(steps: int, schedule: Mapping[str, Any]) -> Mapping[str, Any]:
    """Accelerate advances a schedule of a function once per process in each step; here it is advanced once."""
    return {**schedule, "last_epoch": steps, "_step_count": steps + 1} if "lr_lambdas" in schedule else schedule


def _states(folder: Path, suffix: str) -> tuple[tuple[Any, str], list[Any]]:
    """The optimizer's state with the name of its file, and the schedule's, as far as saved."""
    optimizer, scheduler = (folder / f"{name}.{suffix}" for name in ("optimizer", "scheduler"))
    states = pickles.load(optimizer) if optimizer.is_file() else None
    return (states, str(optimizer)), [pickles.load(scheduler)] if scheduler.is_file() else []


def _write_trainer(run: RunState, target: Path, prefix: str) -> Files:
    """The folder from which a trainer with the same parameter groups resumes (``resume_from_checkpoint=``)."""
    files, left_out = _write_folder(HUGGING_FACE.name, run, target, "pt")
    settings = {theirs: run.settings[ours] for theirs, ours in _SETTINGS.items() if run.settings.get(ours)}
    progress = {
        "global_step": run.step,
        "epoch": run.place.position,
        **settings,
        # Its next save replaces the first, and appends to the second; it raises KeyError for one that is not there.
        "stateful_callbacks": {"TrainerControl": {"args": {}, "attributes": {}}, "EarlyStoppingCallback": []},
    }
    filesystem.replace_durably(target / _STATE, json.dumps(progress, indent=2).encode())
    return [*files, target / _STATE], left_out


def _write_accelerate(run: RunState, target: Path, prefix: str) -> Files:
    """The folder that ``accelerator.load_state`` loads, with as many processes as the run had."""
    schedulers = [_at(each.get("last_epoch", 0) * run.world_size, each) for each in run.schedulers]
    files, left_out = _write_folder(ACCELERATE.name, replace(run, schedulers=schedulers), target, "bin")
    files.append(pickles.save(torch.amp.GradScaler("cpu").state_dict(), target / _SCALER))  # which fp16 asks for
    return files, {"step, epoch and place in the data": "no file for it: your loop counts them", **left_out}


def _write_folder(program: str, run: RunState, target: Path, suffix: str) -> tuple[list[Path], Mapping[str, str]]:
    files = [pickles.save(run.expect_optimizer(program).numbered(), target / f"optimizer.{suffix}")]
    if run.schedulers:
        files.append(pickles.save(run.schedulers[0], target / f"scheduler.{suffix}"))
    return files, run.further_schedulers()


HUGGING_FACE = Program(
    "Hugging Face Trainer",
    is_at=lambda path: (path / _STATE).is_file(),
    read=_read_trainer,
    write=_write_trainer,
    has_safetensors=True,
)
ACCELERATE = Program(
    "Accelerate",
    is_at=lambda path: (path / f"{_RANDOM}0.pkl").is_file() or (path / "optimizer.bin").is_file(),
    read=_read_accelerate,
    write=_write_accelerate,
    has_safetensors=True,
)
