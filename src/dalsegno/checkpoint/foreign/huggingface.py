"""Hugging Face's Trainer: the folder ``checkpoint-500``.

::

    model.safetensors, or several with model.safetensors.index.json    (pytorch_model.bin in older ones)
    optimizer.pt  scheduler.pt  scaler.pt                               state_dicts, pickled
    rng_state.pth, or rng_state_0.pth … of each rank                    random generators, pickled
    trainer_state.json                                                  progress, and the log
    training_args.bin                                                   a pickle of classes: never read
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dalsegno.errors import DamagedCheckpoint
from dalsegno.system import filesystem

from . import pickles
from .run_state import Place, RunState
from .source import Source

PROGRAM = "Hugging Face Trainer"
HAS_SAFETENSORS = True
_STATE = "trainer_state.json"
_ARGUMENTS = "training_args.bin"
_PICKLES = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}
_GENERATORS = {"python": "python", "numpy": "numpy", "torch": "cpu"}


def is_at(path: Path) -> bool:
    return (path / _STATE).is_file()


def read(source: Source) -> RunState:
    path = source.path
    state = _trainer_state(path)
    content = source.load_existing(_PICKLES)
    run = source.run_state(
        PROGRAM,
        source.load_weights(),
        optimizer=(content.get("optimizer"), str(path / _PICKLES["optimizer"])),
        step=state["global_step"],
        place=Place.at(float(state.get("epoch") or 0.0)),
        schedulers=[content["scheduler"]] if "scheduler" in content else [],
        scaler=content.get("scaler"),
        callbacks=state.get("stateful_callbacks") or (),
    )
    random = [_generators(pickles.load(each)) for each in _random_files(path)]
    settings: dict[str, Any] = {"world_size": max(1, len(random))}
    if (steps := state.get("max_steps", 0)) > 0:
        settings["max_steps of the schedule"] = steps
    if batch := state.get("train_batch_size"):
        settings["per_device_train_batch_size"] = batch
    why = "a pickle of classes, never read: set the arguments in TrainingArguments"
    return replace(
        run,
        random=random,
        tokens_seen=int(state.get("num_input_tokens_seen") or 0),
        total_flos=float(state.get("total_flos") or 0.0),
        best_metric=state.get("best_metric"),
        best_step=int(state.get("best_global_step") or 0),
        records=[_record(each) for each in state.get("log_history", ())],
        settings={**settings, **run.settings},
        left_out={**({_ARGUMENTS: why} if (path / _ARGUMENTS).exists() else {}), **run.left_out},
    )


def _trainer_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / _STATE).read_text())  # may contain NaN
    except ValueError as error:
        raise DamagedCheckpoint(f"{path / _STATE}: is not JSON ({error})") from error
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        raise DamagedCheckpoint(f"{path / _STATE}: has no global_step")
    return state


def _random_files(path: Path) -> list[Path]:
    if (path / "rng_state.pth").is_file():
        return [path / "rng_state.pth"]
    return [*itertools.takewhile(Path.is_file, (path / f"rng_state_{rank}.pth" for rank in itertools.count()))]


def _generators(saved: Mapping[str, Any]) -> dict[str, Any]:
    cuda = saved.get("cuda", [])
    devices = [cuda] if isinstance(cuda, torch.Tensor) else list(cuda)
    return {ours: saved[theirs] for ours, theirs in _GENERATORS.items()} | {"cuda": devices}


def _record(logged: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in logged.items() if name not in ("step", "epoch")}
    kind = "eval" if any(name.startswith("eval_") for name in values) else "final" if "train_runtime" in values else ""
    place = {"global_step": logged.get("step"), "epoch": logged.get("epoch")}
    return {**place, **({"kind": kind} if kind else {}), **values}


def write(run: RunState, target: Path, prefix: str) -> tuple[list[Path], Mapping[str, str]]:
    """The folder from which a trainer with the same parameter groups resumes (``resume_from_checkpoint=``)."""
    files = pickles.save_states(run, PROGRAM, target, _PICKLES)
    for rank, each in enumerate(run.random):
        name = "rng_state.pth" if len(run.random) == 1 else f"rng_state_{rank}.pth"
        states = {theirs: each[ours] for ours, theirs in _GENERATORS.items()}
        files.append(pickles.save({**states, **({"cuda": each["cuda"]} if each["cuda"] else {})}, target / name))
    filesystem.replace_durably(target / _STATE, json.dumps(_progress(run), indent=2, sort_keys=True).encode())
    return [*files, target / _STATE], run.further_schedulers()


def _progress(run: RunState) -> dict[str, Any]:
    names = {name: name for name in ("logging_steps", "eval_steps", "save_steps")}
    names["max_steps"] = "max_steps of the schedule"
    return {
        "global_step": run.step,
        "epoch": run.place.position,
        "train_batch_size": run.settings.get("per_device_train_batch_size", 0),
        "num_input_tokens_seen": run.tokens_seen,
        "total_flos": run.total_flos,
        "best_metric": run.best_metric,
        "best_global_step": run.best_step or None,
        "log_history": [_logged(each) for each in run.records if each.get("kind") != "header"],
        **{theirs: run.settings[ours] for theirs, ours in names.items() if ours in run.settings},
    }


def _logged(record: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in record.items() if name not in ("timestamp", "kind", "global_step")}
    return {**values, "step": record["global_step"]}
