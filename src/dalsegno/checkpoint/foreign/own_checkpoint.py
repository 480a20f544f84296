"""A RunState as a checkpoint of dalsegno: written as a save writes it, and read from one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dalsegno.checkpoint import names
from dalsegno.checkpoint.async_save import AsyncSave, NewDirectory
from dalsegno.checkpoint.contract import Captured
from dalsegno.checkpoint.export import expect_all_saved
from dalsegno.checkpoint.index import Index
from dalsegno.checkpoint.manifest import Checkpoint, ComponentRecord
from dalsegno.checkpoint.names import MODEL, SETTINGS
from dalsegno.checkpoint.sidecar import SavedState, SavedStates
from dalsegno.checkpoint.snapshot import Snapshotter
from dalsegno.checkpoint.tensor_reader import read_tensors
from dalsegno.data.loader import IMPORTED
from dalsegno.errors import ConfigurationError
from dalsegno.stateful.component import State

from .run_state import OptimizerContents, Place, RunState

_OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class _Tensors:
    """A component with tensors, to be saved."""

    key: str
    class_name: str
    tensors: dict[str, torch.Tensor]
    rest: State
    optimizer: None = None

    def capture(self) -> Captured:
        return Captured(self.tensors, self.rest)


def write(run: RunState, output_dir: Path) -> Path:
    """Write the checkpoint; returns its path. Raises CannotSave if the state contains what a checkpoint cannot;
    SaveFailed if the disk refuses it."""
    sharded = [_Tensors(MODEL, f"{IMPORTED}.{run.program}", dict(run.model), {"tied": dict(run.tied), "extra": {}})]
    if run.optimizer is not None:
        sharded.append(_Tensors(_OPTIMIZER, run.optimizer.class_name, *run.optimizer.captured()))
    snapshot = Snapshotter().capture(sharded, (), _components(run), copy=False)
    save = AsyncSave(
        snapshot,
        NewDirectory(names.checkpoint_path(output_dir / names.CHECKPOINTS, run.step)),
        step=run.step,
        is_best=False,
        manifest_of=partial(snapshot.manifest, run.step, {}, False, True),
    )
    save.join()
    if save.failure is not None:
        raise save.failure
    return save.path


def read(checkpoint: Checkpoint) -> RunState:
    """The state in a verified checkpoint. Raises ConfigurationError if it is not that of a whole run, was saved without
    its frozen parameters, or contains quantized or wrapped weights.
    """
    if missing := [key for key in (MODEL, "trainer", "loader") if key not in checkpoint.manifest.components]:
        raise ConfigurationError(
            f"{checkpoint.path}: contains no {', '.join(missing)}, so no program can resume from it; export its model "
            "alone, without program="
        )
    saved = SavedStates(checkpoint)
    trainer, rest = saved.state("trainer"), saved.state(MODEL)
    _expect_plain(checkpoint, rest, "weights", "export the adapters (--adapters), or without --program the model alone")
    index = Index.of_checkpoint(checkpoint)
    expect_all_saved(checkpoint, index.known_of(MODEL), index.of(MODEL))
    tensors = read_tensors(checkpoint)
    settings, loader = saved.state(SETTINGS) if SETTINGS in saved else {}, saved.state("loader")
    ranks = checkpoint.manifest.world_size
    data_size = len({*checkpoint.manifest.data_ranks}) or ranks
    batch = settings.get("per_device_train_batch_size", 0)
    if loader.get("microbatches") and loader.get("samples"):  # a loader of the user's own
        batch = batch or loader["samples"] // loader["microbatches"] // data_size
    optimizer = None
    if _OPTIMIZER in saved:
        _expect_plain(checkpoint, saved.state(_OPTIMIZER), "states of parameters", "export the model alone")
        class_name = saved.record(_OPTIMIZER).class_name
        optimizer = OptimizerContents.of_captured(class_name, tensors.get(_OPTIMIZER, {}), saved.state(_OPTIMIZER))
    taken = {MODEL, _OPTIMIZER, "trainer", "loader", "clock", "meter"}
    schedulers = [key for key in sorted(saved) if key.startswith("scheduler.")]
    left_out = {key: "never exported" for key in saved if key not in {*taken, *schedulers}}
    left_out |= dict.fromkeys(rest["extra"], "not a tensor")
    return RunState(
        program="dalsegno",
        step=checkpoint.step,
        model=tensors[MODEL],
        tied=rest["tied"],
        optimizer=optimizer,
        schedulers=[saved.state(key) for key in schedulers],
        place=_place(loader, trainer["epoch"], batch * data_size),
        settings={**settings, "per_device_train_batch_size": batch},
        world_size=ranks,
        left_out=left_out,
    )


def _expect_plain(checkpoint: Checkpoint, rest: State, what: str, instead: str) -> None:
    """Other programs save a quantized tensor as one of its class, by pickle, or in a form of their own."""
    if wrapped := sorted(rest.get("wrapped", {})):
        more = ", …" if wrapped[1:] else ""
        raise ConfigurationError(
            f"{checkpoint.path}: contains {len(wrapped)} quantized or wrapped {what} ({wrapped[0]}{more}), which no "
            f"other program builds from the tensors inside them; {instead}"
        )


def _place(loader: Mapping[str, Any], epoch: float, batch: int) -> Place:
    """``batch``: samples of one micro-batch, on all ranks."""
    if loader["kind"] == IMPORTED:
        return Place(**{name: value for name, value in loader.items() if name != "kind"})
    if loader["kind"] != "map":
        microbatches = loader["microbatches"]
    else:
        microbatches = -(-loader["cursor"] // batch) if batch else None
    return Place(loader["epoch"], max(0.0, epoch - loader["epoch"]), microbatches)


def _components(run: RunState) -> dict[str, SavedState]:
    """How far the run is; all else begins anew."""
    states: dict[str, State] = {
        "trainer": {
            "global_step": run.step,
            "epoch": run.place.position,
            "samples_seen": 0,
            "total_flos": 0.0,
            "best_metric": None,
            "best_global_step": 0,
            "best_model_checkpoint": None,
            "epoch_is_cut": False,
            "evaluations_owed": [],
            "given_up": None,
            "save_owed": None,
        },
        "loader": {"kind": IMPORTED, **dataclasses.asdict(run.place)},
        **{f"scheduler.{number}": dict(state) for number, state in enumerate(run.schedulers)},
    }
    return {
        key: SavedState(ComponentRecord(f"{IMPORTED}.{key}", 1, "replicated"), [state]) for key, state in states.items()
    }
