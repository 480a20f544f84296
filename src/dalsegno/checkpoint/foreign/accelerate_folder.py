"""Accelerate: the folder of ``accelerator.save_state``.

::

    model.safetensors  (pytorch_model.bin)      further models: model_1.safetensors …
    optimizer.bin  scheduler.bin  scaler.pt     further ones: optimizer_1.bin …
    random_states_0.pkl …                       of each rank
    sampler.bin  dl_state_dict.bin  custom_checkpoint_0.pkl
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import pickles
from .run_state import RunState
from .source import Source

PROGRAM = "Accelerate"
HAS_SAFETENSORS = True
_PICKLES = {"optimizer": "optimizer.bin", "scheduler": "scheduler.bin", "scaler": "scaler.pt"}
_RANDOM = "random_states_{}.pkl"
_GENERATORS = {"python": "random_state", "numpy": "numpy_random_seed", "torch": "torch_manual_seed"}
_CUDA = "torch_cuda_manual_seed"


def is_at(path: Path) -> bool:
    return (path / _RANDOM.format(0)).is_file()


def read(source: Source) -> RunState:
    path, content = source.path, source.load_existing(_PICKLES)
    random = [_RANDOM.format(rank) for rank in range(sum(1 for _ in path.glob(_RANDOM.format("*"))))]
    known = {*_PICKLES.values(), *random, "pytorch_model.bin"}
    others = (name for each in path.iterdir() if (name := each.name) not in known)
    run = source.run_state(
        PROGRAM,
        source.load_weights(),
        optimizer=(content.get("optimizer"), str(path / _PICKLES["optimizer"])),
        scaler=content.get("scaler"),
        unknown=sorted(name for name in others if not name.startswith(("model.", "model-"))),
    )
    return replace(
        run,
        schedulers=[_schedule(content["scheduler"], run.step, len(random))] if "scheduler" in content else [],
        random=[_generators(pickles.load(path / name)) for name in random],
        settings={"world_size": len(random), **run.settings},
    )


def _schedule(saved: Mapping[str, Any], step: int, ranks: int) -> dict[str, Any]:
    """Accelerate advances a schedule once per process in each step; here it is advanced once."""
    if "lr_lambdas" in saved and saved.get("last_epoch") == step * ranks:
        return {**saved, "last_epoch": step, "_step_count": step + 1}
    return dict(saved)


def _generators(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {ours: saved[theirs] for ours, theirs in _GENERATORS.items()} | {"cuda": list(saved.get(_CUDA, ()))}


def write(run: RunState, target: Path, prefix: str) -> tuple[list[Path], Mapping[str, str]]:
    """The folder that ``accelerator.load_state`` loads, for one process or as many as saved."""
    ranks = max(1, len(run.random))
    schedules = []
    for each in run.schedulers[:1]:
        steps = each.get("last_epoch", 0) * ranks  # the inverse of _schedule
        schedules.append({**each, "last_epoch": steps, "_step_count": steps + 1} if "lr_lambdas" in each else each)
    files = pickles.save_states(replace(run, schedulers=schedules), PROGRAM, target, _PICKLES)
    for rank, each in enumerate(run.random):
        states = {"step": 0, **{theirs: each[ours] for ours, theirs in _GENERATORS.items()}}
        states |= {_CUDA: each["cuda"]} if each["cuda"] else {}
        files.append(pickles.save(states, target / _RANDOM.format(rank)))
    return files, {
        "step, epoch and place in the data": "no file for it: your loop counts them",
        **run.further_schedulers(),
    }
