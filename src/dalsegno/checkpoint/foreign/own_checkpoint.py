"""A RunState as a checkpoint of dalsegno: written as a save writes it, and read from one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
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
from dalsegno.checkpoint.names import CALLBACKS, MODEL, SETTINGS
from dalsegno.checkpoint.sidecar import SavedState, SavedStates
from dalsegno.checkpoint.snapshot import Snapshotter
from dalsegno.checkpoint.tensor_reader import read_tensors
from dalsegno.data.loader import IMPORTED
from dalsegno.distributed.rng import RANK, capture_generators, mix, preserved_generators, seed_generators
from dalsegno.errors import ConfigurationError
from dalsegno.logs import RecordLog, read_records
from dalsegno.stateful.component import Scope, State

from .run_state import OptimizerContents, Place, RunState

_LOG = "logs/train.jsonl"
_OPTIMIZER = "optimizer"
_LOGGER = f"{CALLBACKS}JsonLogger"


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
    """Write the log and then the checkpoint, which is published last; returns its path. Raises CannotSave if the state
    contains what a checkpoint cannot; SaveFailed if the disk refuses it.
    """
    sharded = [_Tensors(MODEL, f"imported.{run.program}", dict(run.model), {"tied": dict(run.tied), "extra": {}})]
    if run.optimizer is not None:
        sharded.append(_Tensors(_OPTIMIZER, run.optimizer.class_name, *run.optimizer.captured()))
    states = {**_components(run), **_log(run, output_dir)}
    snapshot = Snapshotter().capture(sharded, (), states, copy=False)
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
    """The state in a verified checkpoint, and the run's log up to it. Raises ConfigurationError if it is not that of a
    whole run, was saved without its frozen parameters, or contains quantized or wrapped weights.
    """
    if missing := [
        key for key in (MODEL, "trainer", "loader", "rng", "meter") if key not in checkpoint.manifest.components
    ]:
        raise ConfigurationError(
            f"{checkpoint.path}: contains no {', '.join(missing)}, so no program can resume from it; export its model "
            "alone, without program="
        )
    saved = SavedStates(checkpoint)
    trainer, rest = saved.state("trainer"), saved.state(MODEL)
    _expect_plain(checkpoint, rest, "weights", "export the adapters (--adapters), or without --program the model alone")
    index = Index.of_checkpoint(checkpoint)
    expect_all_saved(checkpoint, index, index.of(MODEL))
    tensors = read_tensors(checkpoint)
    settings, loader = saved.state(SETTINGS) if SETTINGS in saved else {}, saved.state("loader")
    if loader.get("microbatches") and loader.get("samples"):  # a loader of the user's own
        batch = loader["samples"] // loader["microbatches"] // settings.get("world_size", 1)
        settings = {"per_device_train_batch_size": batch, **settings}
    optimizer = None
    if _OPTIMIZER in saved:
        _expect_plain(checkpoint, saved.state(_OPTIMIZER), "states of parameters", "export the model alone")
        class_name = saved.record(_OPTIMIZER).class_name
        optimizer = OptimizerContents.of_captured(class_name, tensors.get(_OPTIMIZER, {}), saved.state(_OPTIMIZER))
    taken = {MODEL, _OPTIMIZER, "trainer", "loader", "rng", "meter", "clock", "scaler", SETTINGS}
    schedulers = [key for key in sorted(saved) if key.startswith("scheduler.")]
    left_out = {key: "has no place in the files of other programs" for key in saved if key not in {*taken, *schedulers}}
    left_out |= dict.fromkeys(rest["extra"], "not a tensor")
    return RunState(
        program="dalsegno",
        step=checkpoint.step,
        model=tensors[MODEL],
        tied=rest["tied"],
        optimizer=optimizer,
        schedulers=[saved.state(key) for key in schedulers],
        scaler=saved.state("scaler") if "scaler" in saved else None,
        random=[state for state in saved.all_of("rng").states if "torch" in state],
        place=_place(loader, trainer["epoch"], settings),
        tokens_seen=saved.state("meter")["run_tokens"],
        total_flos=trainer["total_flos"],
        best_metric=trainer["best_metric"],
        best_step=trainer["best_global_step"],
        records=_records(checkpoint),
        settings=settings,
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


def _place(loader: Mapping[str, Any], epoch: float, settings: Mapping[str, Any]) -> Place:
    if loader["kind"] == IMPORTED:
        return Place(**{name: value for name, value in loader.items() if name != "kind"})
    if loader["kind"] != "map":
        microbatches = loader["microbatches"]
    else:
        batch = settings.get("per_device_train_batch_size", 0) * settings.get("world_size", 1)
        microbatches = -(-loader["cursor"] // batch) if batch else None
    return Place(loader["epoch"], max(0.0, epoch - loader["epoch"]), microbatches)


def _records(checkpoint: Checkpoint) -> list[dict[str, object]]:
    log = checkpoint.path.parents[1] / _LOG
    found = read_records(log) if log.exists() else ()
    return [each for each in found if each.get("global_step") is not None and each["global_step"] <= checkpoint.step]


def _components(run: RunState) -> dict[str, SavedState]:
    best = names.checkpoint_path(Path(names.CHECKPOINTS), run.step)
    states = {
        "trainer": {
            "global_step": run.step,
            "epoch": run.place.position,
            "samples_seen": 0,
            "total_flos": run.total_flos,
            "best_metric": run.best_metric,
            "best_global_step": run.best_step,
            "best_model_checkpoint": best.as_posix() if run.best_step == run.step > 0 else None,
            "epoch_is_cut": False,
            "evaluations_owed": [],
            "given_up": None,
            "save_owed": None,
        },
        "clock": {"seconds": 0.0},
        "loader": {"kind": IMPORTED, **dataclasses.asdict(run.place)},
        **{f"scheduler.{number}": dict(state) for number, state in enumerate(run.schedulers)},
        **({} if run.scaler is None else {"scaler": dict(run.scaler)}),
        SETTINGS: dict(run.settings),
    }
    per_rank: dict[str, Sequence[State]] = {
        "rng": [{"seed": 0, "step": run.step, **each} for each in run.random or [_seeded(run.step)]],
        "meter": [_meter(run.tokens_seen)],
    }
    shared = {key: _saved(key, [state], "replicated") for key, state in states.items()}
    return shared | {key: _saved(key, each, "per_rank") for key, each in per_rank.items()}


def _saved(key: str, states: Sequence[State], scope: Scope) -> SavedState:
    return SavedState(ComponentRecord(f"imported.{key}", 1, scope), states)


def _seeded(step: int) -> State:
    """States of generators that are seeded for this step, as after a change of world size."""
    with preserved_generators():
        seed_generators(mix(RANK, 0, 0, step))
        return {**capture_generators(), "cuda": []}


def _meter(tokens: int) -> State:
    """Nothing summed since the last record."""
    return {
        "losses": None,
        "loss_sum": 0.0,
        "steps": 0,
        "grad_norms": None,
        "grad_norm": None,
        "max_grad_norm": None,
        "run_loss_sum": 0.0,
        "run_steps": 0,
        "tokens": 0,
        "run_tokens": tokens,
    }


def _log(run: RunState, output_dir: Path) -> dict[str, SavedState]:
    """Write the records, and return the state with which a JsonLogger continues that file."""
    if not run.records:
        return {}
    log = RecordLog(_LOG, output_dir, lambda: {"kind": "header", "imported_from": run.program})
    log.open()
    try:
        for record in run.records:
            log.append(record)
        log.make_durable()
        return {_LOGGER: _saved("JsonLogger", [log.state()], "replicated")}
    finally:
        log.close()
