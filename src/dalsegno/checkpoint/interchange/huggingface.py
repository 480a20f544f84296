"""Hugging Face's Trainer: the folder ``checkpoint-500``.

::

    model.safetensors, or several with model.safetensors.index.json    (pytorch_model.bin in older ones)
    optimizer.pt  scheduler.pt  scaler.pt                               state_dicts, pickled
    rng_state.pth, or rng_state_0.pth … of each rank                    random generators, pickled
    trainer_state.json                                                  progress, and the log
    training_args.bin                                                   a pickle of classes: never read
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dalsegno.errors import ConfigurationError, DamagedCheckpoint
from dalsegno.system import filesystem

from . import pickles
from .export import SHARD_INDEX, SINGLE_FILE
from .optimizer_contents import OptimizerContents
from .reading import NOT_THERE, ReadOptions, has_safetensors, model_in, settings_of_optimizer
from .run_state import Place, RunState
from .writing import WriteOptions, Written, expect_optimizer, only_first, save

PROGRAM = "Hugging Face Trainer"
_STATE = "trainer_state.json"
_PICKLED_WEIGHTS = "pytorch_model.bin"
_ADAPTER = "adapter_model.safetensors"
_GENERATORS = {"python": "python", "numpy": "numpy", "torch": "cpu"}
_PICKLES = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}


def is_at(path: Path) -> bool:
    return (path / _STATE).is_file()


def read(path: Path, options: ReadOptions) -> RunState:
    """
    Raises:
        StateMismatch: if a pickle contains more than data.
        DamagedCheckpoint: if a file's content does not match its name.
        ConfigurationError: if the folder contains no whole model, or the optimizer's class is unknown.
    """
    state = _trainer_state(path)
    found = {key: path / name for key, name in _PICKLES.items() if (path / name).is_file()}
    random = _random_files(path)
    found |= {f"random {number}": each for number, each in enumerate(random)}
    if not has_safetensors(path):
        found["weights"] = _pickled_weights(path)
    unpickled = pickles.read(found)
    content = unpickled.content
    model, tied = model_in(path, unpickled, options)
    optimizer = options.optimizer_of(content.get("optimizer"), str(path / _PICKLES["optimizer"]))
    epoch = options.epoch if options.epoch is not None else float(state.get("epoch") or 0.0)
    ranks = max(1, len(random))
    return RunState(
        program=PROGRAM,
        step=options.step if options.step is not None else int(state["global_step"]),
        epoch=epoch,
        model=model,
        tied=tied,
        optimizer=optimizer,
        schedulers=[content["scheduler"]] if "scheduler" in content else [],
        scaler=content.get("scaler"),
        random=[_random(content[f"random {number}"]) for number in range(len(random))],
        place=Place.at(epoch, int(state.get("train_batch_size") or 0) * ranks or None),
        tokens_seen=int(state.get("num_input_tokens_seen") or 0),
        total_flos=float(state.get("total_flos") or 0.0),
        best_metric=state.get("best_metric"),
        best_step=int(state.get("best_global_step") or 0),
        records=[_record(each) for each in state.get("log_history", ())],
        settings=_settings(state, optimizer, ranks),
        left_out=_left_out(path, state, found, unpickled.dropped),
    )


def write(run: RunState, target: Path, options: WriteOptions) -> Written:
    """The folder from which a trainer with the same parameter groups resumes (``resume_from_checkpoint=``)."""
    optimizer = expect_optimizer(run, PROGRAM)
    files = [*options.export_weights(target), save(optimizer.numbered(), target / _PICKLES["optimizer"])]
    if run.schedulers:
        files.append(save(run.schedulers[0], target / _PICKLES["scheduler"]))
    if run.scaler is not None:
        files.append(save(run.scaler, target / _PICKLES["scaler"]))
    for rank, each in enumerate(run.random):
        name = "rng_state.pth" if len(run.random) == 1 else f"rng_state_{rank}.pth"
        states = {theirs: each[ours] for ours, theirs in _GENERATORS.items()}
        files.append(save({**states, **({"cuda": each["cuda"]} if each["cuda"] else {})}, target / name))
    filesystem.replace_durably(target / _STATE, json.dumps(_progress(run), indent=2, sort_keys=True).encode())
    return [*files, target / _STATE], only_first(run)


def _progress(run: RunState) -> dict[str, Any]:
    settings = run.settings
    names = {"logging_steps": "logging_steps", "eval_steps": "eval_steps", "save_steps": "save_steps"}
    names |= {"max_steps": "max_steps of the schedule"}
    return {
        "global_step": run.step,
        "epoch": run.epoch,
        "train_batch_size": (run.place.batch or 0) // settings.get("world_size", 1),
        "num_input_tokens_seen": run.tokens_seen,
        "total_flos": run.total_flos,
        "best_metric": run.best_metric,
        "best_global_step": run.best_step or None,
        "log_history": [_logged(each) for each in run.records if each.get("kind") != "header"],
        **{theirs: settings[ours] for theirs, ours in names.items() if ours in settings},
    }


def _logged(record: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in record.items() if name not in ("timestamp", "kind", "global_step")}
    return {**values, "step": record["global_step"]}


def _trainer_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / _STATE).read_text())  # may contain NaN
    except ValueError as error:
        raise DamagedCheckpoint(f"{path / _STATE}: is not JSON ({error})") from error
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        raise DamagedCheckpoint(f"{path / _STATE}: has no global_step")
    return state


def _pickled_weights(path: Path) -> Path:
    if (path / _PICKLED_WEIGHTS).is_file():
        return path / _PICKLED_WEIGHTS
    if (path / _ADAPTER).is_file():
        raise ConfigurationError(
            f"{path}: contains only the weights of an adapter ({_ADAPTER}), and no whole model; merge the adapter into "
            "its base model first, or begin a new run with the merged weights"
        )
    raise ConfigurationError(
        f"{path}: contains neither {SINGLE_FILE} nor {SHARD_INDEX} nor {_PICKLED_WEIGHTS}; weights that DeepSpeed or "
        "FSDP has sharded are not read: convert them first with that program's own tool"
    )


def _random_files(path: Path) -> list[Path]:
    if (path / "rng_state.pth").is_file():
        return [path / "rng_state.pth"]
    found = {
        int(name[1]): each for each in path.glob("rng_state_*.pth") if (name := re.search(r"_(\d+)\.pth", str(each)))
    }
    return [found[rank] for rank in sorted(found)]


def _random(saved: Mapping[str, Any]) -> dict[str, Any]:
    cuda = saved.get("cuda", [])
    devices = [cuda] if isinstance(cuda, torch.Tensor) else list(cuda)
    return {ours: saved[theirs] for ours, theirs in _GENERATORS.items()} | {"cuda": devices}


def _record(logged: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in logged.items() if name not in ("step", "epoch")}
    kind = "eval" if any(name.startswith("eval_") for name in values) else "final" if "train_runtime" in values else ""
    place = {"global_step": logged.get("step"), "epoch": logged.get("epoch")}
    return {**place, **({"kind": kind} if kind else {}), **values}


def _settings(state: Mapping[str, Any], optimizer: OptimizerContents | None, ranks: int) -> dict[str, Any]:
    """What ``trainer_state.json`` knows of the arguments, for the comparison when a run resumes."""
    settings: dict[str, Any] = {"world_size": ranks}
    if (steps := state.get("max_steps", 0)) > 0:
        settings["max_steps of the schedule"] = steps
    if batch := state.get("train_batch_size"):
        settings["per_device_train_batch_size"] = batch
    return settings | settings_of_optimizer(optimizer)


def _left_out(path: Path, state: Mapping[str, Any], found: Mapping[str, Path], dropped: Any) -> dict[str, str]:
    reasons = {"training_args.bin": "a pickle of classes, never read: set the arguments in TrainingArguments"}
    left_out = {name: why for name, why in reasons.items() if (path / name).exists()}
    if "optimizer" not in found:
        left_out["optimizer"] = f"{NOT_THERE['optimizer']} (save_only_model=True?)"
    if not any(key.startswith("random") for key in found):
        left_out["random generators"] = NOT_THERE["random generators"]
    for name in state.get("stateful_callbacks") or ():
        left_out[f"callback {name}"] = "its state has no meaning for a callback here"
    left_out["order of the data"] = NOT_THERE["order of the data"]
    left_out |= dict.fromkeys(dropped, "not plain data")
    return left_out
