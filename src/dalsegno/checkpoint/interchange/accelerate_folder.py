"""Accelerate: the folder of ``accelerator.save_state``.

::

    model.safetensors  (pytorch_model.bin)      further models: model_1.safetensors …
    optimizer.bin  scheduler.bin  scaler.pt     further ones: optimizer_1.bin …
    random_states_0.pkl …                       of each rank
    sampler.bin  dl_state_dict.bin  custom_checkpoint_0.pkl
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import pickles
from .export import SHARD_INDEX, SINGLE_FILE
from .reading import NOT_THERE, ReadOptions, has_safetensors, model_in, settings_of_optimizer
from .run_state import Place, RunState
from .writing import WriteOptions, Written, expect_optimizer, only_first, save

PROGRAM = "Accelerate"
_PICKLED_WEIGHTS = "pytorch_model.bin"
_PICKLES = {"optimizer": "optimizer.bin", "scheduler": "scheduler.bin", "scaler": "scaler.pt"}
_RANDOM = "random_states_{}.pkl"
_GENERATORS = {"python": "random_state", "numpy": "numpy_random_seed", "torch": "torch_manual_seed"}
_CUDA = "torch_cuda_manual_seed"


def is_at(path: Path) -> bool:
    return (path / _RANDOM.format(0)).is_file()


def read(path: Path, options: ReadOptions) -> RunState:
    """
    Raises:
        StateMismatch: if a pickle contains more than data.
        NotFound: if the folder contains no model.
        ConfigurationError: if neither the files nor the options know step or optimizer class.
    """
    found = {key: path / name for key, name in _PICKLES.items() if (path / name).is_file()}
    ranks = sum(1 for _ in path.glob(_RANDOM.format("*")))
    found |= {f"random {number}": path / _RANDOM.format(number) for number in range(ranks)}
    if not has_safetensors(path):
        found["weights"] = path / _PICKLED_WEIGHTS
    unpickled = pickles.read(found)
    content = unpickled.content
    model, tied = model_in(path, unpickled, options)
    optimizer = options.optimizer_of(content.get("optimizer"), str(path / _PICKLES["optimizer"]))
    step = options.step_of(None, optimizer, path)
    return RunState(
        program=PROGRAM,
        step=step,
        epoch=options.epoch,
        model=model,
        tied=tied,
        optimizer=optimizer,
        schedulers=[_schedule(content["scheduler"], step, ranks)] if "scheduler" in content else [],
        scaler=content.get("scaler"),
        random=[_random(content[f"random {number}"]) for number in range(ranks)],
        place=Place() if options.epoch is None else Place.at(options.epoch),
        settings={"world_size": ranks, **settings_of_optimizer(optimizer)},
        left_out=_left_out(path, found, options, unpickled.dropped),
    )


def write(run: RunState, target: Path, options: WriteOptions) -> Written:
    """The folder that ``accelerator.load_state`` loads, for one process or as many as saved."""
    optimizer = expect_optimizer(run, PROGRAM)
    files = [*options.export_weights(target), save(optimizer.numbered(), target / _PICKLES["optimizer"])]
    ranks = max(1, len(run.random))
    if run.schedulers:
        files.append(save(_counted_by_process(run.schedulers[0], ranks), target / _PICKLES["scheduler"]))
    if run.scaler is not None:
        files.append(save(run.scaler, target / _PICKLES["scaler"]))
    for rank, each in enumerate(run.random):
        states = {"step": 0, **{theirs: each[ours] for ours, theirs in _GENERATORS.items()}}
        states |= {_CUDA: each["cuda"]} if each["cuda"] else {}
        files.append(save(states, target / _RANDOM.format(rank)))
    why = "no file for it: your loop counts them"
    return files, {"step, epoch and place in the data": why, **only_first(run)}


def _counted_by_process(saved: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The inverse of :func:`_schedule`."""
    if "lr_lambdas" not in saved:
        return dict(saved)
    steps = saved["last_epoch"] * ranks
    return {**saved, "last_epoch": steps, "_step_count": steps + 1}


def _random(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {ours: saved[theirs] for ours, theirs in _GENERATORS.items()} | {"cuda": list(saved.get(_CUDA, ()))}


def _schedule(saved: Mapping[str, Any], step: int, ranks: int) -> dict[str, Any]:
    """Accelerate advances a schedule once per process in each step; here it is advanced once."""
    if "lr_lambdas" in saved and saved.get("last_epoch") == step * ranks:
        return {**saved, "last_epoch": step, "_step_count": step + 1}
    return dict(saved)


def _left_out(path: Path, found: Mapping[str, Path], options: ReadOptions, dropped: Any) -> dict[str, str]:
    taken = {SINGLE_FILE, SHARD_INDEX, *(each.name for each in found.values())}
    others = sorted(each.name for each in path.iterdir() if each.name not in taken)
    left_out = {name: "unknown to a run here" for name in others if not name.startswith("model-")}
    missing = ["order of the data", "log"]
    missing += ["place in the data"] * (options.epoch is None) + ["optimizer"] * ("optimizer" not in found)
    return left_out | {part: NOT_THERE[part] for part in missing} | dict.fromkeys(dropped, "not plain data")
