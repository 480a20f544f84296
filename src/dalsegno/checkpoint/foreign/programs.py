"""Import a run of another program: its files become the first checkpoint of a run here. Export one for a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dalsegno.checkpoint import checkpoint_dir, names
from dalsegno.checkpoint.async_save import AsyncSave, NewDirectory
from dalsegno.checkpoint.contract import Captured
from dalsegno.checkpoint.export import checkpoint_to_export, expect_all_saved, export_model
from dalsegno.checkpoint.foreign.formats import PROGRAMS, Program
from dalsegno.checkpoint.foreign.run_state import MOST, OptimizerContents, Place, RunState, run_of
from dalsegno.checkpoint.index import Index
from dalsegno.checkpoint.manifest import Checkpoint, ComponentRecord
from dalsegno.checkpoint.names import MODEL, SETTINGS
from dalsegno.checkpoint.optimizer_state import OptimizerState
from dalsegno.checkpoint.sidecar import SavedState, SavedStates
from dalsegno.checkpoint.snapshot import Snapshotter
from dalsegno.checkpoint.tensor_reader import read_tensors
from dalsegno.data.loader import IMPORTED
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError, DalsegnoError, NotFound, StateMismatch, UnknownName
from dalsegno.stateful.component import State
from dalsegno.system import filesystem
from dalsegno.system.lock import DirectoryLock

_NOT_TAKEN = {
    "order of the data": "this run's own: in the current epoch some samples come twice, some never",
    "random generators": "never taken: seeded anew",
    "gradient scaler": "never taken: begins with its first scale",
    "log": "never taken: the run here begins one",
    "settings": "never taken: set the arguments in TrainingArguments",
}
_OPTIMIZER = OptimizerState.key


# --- import ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Imported:
    """Outcome of an import: the checkpoint, and what it contains."""

    checkpoint: Path
    run: RunState

    @property
    def can_resume(self) -> bool:
        """Whether a run can resume from it; else only the model can be loaded."""
        return self.run.optimizer is not None


@collectives.alone()
def import_checkpoint(
    source: str | Path,
    output_dir: str | Path,
    *,
    program: str | None = None,
    step: int | None = None,
    epoch: float | None = None,
    strip_prefix: str = "",
    optimizer: str | None = None,
) -> Imported:
    """Turn a checkpoint of another program into one of a new run, which ``Trainer.train()`` resumes.

    Pickled files are read as data, with ``torch.load(weights_only=True)``. Memory holds all tensors. In one process: of
    several ranks, rank 0 calls it, and the others wait for it.

    Args:
        source: the other program's folder or file.
        output_dir: of the new run; must not contain one.
        program: key of :data:`PROGRAMS` such as ``"lightning"``; None: recognized by the files.
        step: finished optimizer steps, if the files do not contain them.
        epoch: passes over the data, say 1.25, if the files do not contain them, or to begin elsewhere.
        strip_prefix: prefix of the model's names there that they do not have here, such as ``"model."``.
        optimizer: class of the optimizer, such as ``"torch.optim.AdamW"``, if it cannot be inferred.

    Raises:
        NotFound: if ``source`` does not exist.
        ConfigurationError: if it is not a checkpoint of a known program, or ``output_dir`` contains a run.
        StateMismatch: if a file contains more than data. Nothing is written then.
        UnknownName: for an unknown ``program``.
    """
    path, target = Path(source), Path(output_dir)
    if not path.exists():
        raise NotFound(f"{path}: does not exist")
    for name, value in ("step", step), ("epoch", epoch):
        if value is not None and not 0 <= value < MOST:  # which NaN is not, either
            raise ConfigurationError(f"{name}={value!r}; needs a finite number of at least 0")
    _expect_no_run(target)
    layout = _recognized(path) if program is None else _program(program)
    try:
        run = run_of(
            layout.read(path),
            layout.name,
            path,
            step=step,
            epoch=epoch,
            strip_prefix=strip_prefix,
            optimizer=optimizer,
        )
    except DalsegnoError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError, RecursionError) as error:
        raise StateMismatch(f"{path}: is not as {layout.name} writes it ({error!r}); nothing was imported") from error
    left_out = {**run.left_out, **_NOT_TAKEN}
    if run.optimizer is None:
        left_out["optimizer"] = "not saved (save_only_model=True?), so no run can resume from this"
    if not run.place.is_known:
        left_out["place in the data"] = "not saved: it begins anew; pass --epoch, say 1.25"
    run = replace(run, left_out=left_out)
    filesystem.make_directory(target)
    with DirectoryLock(target):
        _expect_no_run(target)
        return Imported(_write(run, target), run)


def _recognized(path: Path) -> Program:
    found = next((each for each in PROGRAMS.values() if each.is_at(path)), None)
    if found is None:
        known = ", ".join(each.name for each in PROGRAMS.values())
        raise ConfigurationError(f"{path}: not recognized as a checkpoint of {known}")
    return found


def _program(key: str) -> Program:
    if key not in PROGRAMS:
        raise UnknownName("program", key, PROGRAMS)
    return PROGRAMS[key]


def _expect_no_run(target: Path) -> None:
    if (target / "run.json").exists() or checkpoint_dir.newest_first(target / names.CHECKPOINTS):
        raise ConfigurationError(f"{target}: has a run already; choose another directory")


@dataclass(frozen=True, slots=True)
class _Tensors:
    key: str
    class_name: str
    tensors: dict[str, torch.Tensor]
    rest: State
    optimizer: None = None

    def capture(self) -> Captured:
        return Captured(self.tensors, self.rest)


def _write(run: RunState, output_dir: Path) -> Path:
    """Write the checkpoint as a save does; returns its path. All that is not in ``run`` begins anew."""
    sharded = [_Tensors(MODEL, f"{IMPORTED}.{run.program}", dict(run.model), {"tied": dict(run.tied), "extra": {}})]
    if run.optimizer is not None:
        sharded.append(_Tensors(_OPTIMIZER, run.optimizer.class_name, *run.optimizer.captured()))
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
    kept = {
        key: SavedState(ComponentRecord(f"{IMPORTED}.{key}", 1, "replicated"), [state]) for key, state in states.items()
    }
    save = AsyncSave(
        Snapshotter().capture(sharded, (), kept, copy=False),
        NewDirectory(names.checkpoint_path(output_dir / names.CHECKPOINTS, run.step)),
        step=run.step,
        is_best=False,
        metrics={},
        is_finite=True,
    )
    save.join()
    if save.failure is not None:
        raise save.failure
    return save.path


# --- export ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExportedRun:
    """Outcome of an export: the checkpoint, the program, its files, and what they do not contain, with the reason."""

    checkpoint: Path
    program: str
    files: Sequence[Path]
    left_out: Mapping[str, str]


@collectives.alone()
def export_checkpoint(
    checkpoint: str | Path,
    target: str | Path,
    *,
    program: str,
    best: bool = False,
    add_prefix: str = "",
    max_shard_size: int | str = "5GB",
    config_from: str | Path | None = None,
) -> ExportedRun:
    """Write model, optimizer, schedule and progress in the files of another program. In one process.

    Verifies the checkpoint first. Memory holds all tensors.

    Args:
        checkpoint: a checkpoint, or a run, whose newest valid checkpoint is exported.
        target: folder or file to write; must not exist.
        program: key of :data:`PROGRAMS`: ``"hf"``, ``"accelerate"``, ``"dcp"``, ``"lightning"`` or ``"torch"``.
        best: export the run's checkpoint with the best evaluation instead of the newest one.
        add_prefix: added to the names of the model's tensors, such as ``"net."`` for the attribute of a
            LightningModule.
        max_shard_size, config_from: as for :func:`export_model`, where the program saves safetensors.

    Raises:
        UnknownName: for an unknown ``program``.
        NotFound: if there is no such checkpoint.
        DamagedCheckpoint: if its bytes do not match its manifest.
        ConfigurationError: if ``target`` exists, or the checkpoint lacks what the program needs.
    """
    layout, place = _program(program), Path(target)
    if place.exists():
        raise ConfigurationError(f"{place}: exists already; choose another name")
    source = checkpoint_to_export(checkpoint, best=best)
    run = _read(source)
    weights: list[Path] = []
    if layout.has_safetensors:
        run.expect_optimizer(layout.name)
        done = export_model(source.path, place, max_shard_size=max_shard_size, config_from=config_from)
        weights = [*done.files, *done.copied]
    else:
        filesystem.make_directory(place.parent)
    files = layout.write(run, place, add_prefix)
    further = [] if layout.has_all_schedules else [f"scheduler.{number}" for number in range(1, len(run.schedulers))]
    left_out = {**run.left_out, **layout.left_out, **dict.fromkeys(further, "there is a place for one")}
    return ExportedRun(source.path, layout.name, [*weights, *files], left_out)


def _read(checkpoint: Checkpoint) -> RunState:
    """The state in a verified checkpoint. Raises ConfigurationError if it is not that of a whole run, was saved without
    its frozen parameters, or contains quantized or wrapped weights."""
    if missing := [key for key in (MODEL, "trainer", "loader") if key not in checkpoint.manifest.components]:
        raise ConfigurationError(
            f"{checkpoint.path}: contains no {', '.join(missing)}, so no program can resume from it; export its model "
            "alone, without program="
        )
    saved, index = SavedStates(checkpoint), Index.of_checkpoint(checkpoint)
    trainer, loader, rest = saved.state("trainer"), saved.state("loader"), saved.state(MODEL)
    _expect_plain(checkpoint, rest, "weights", "export the adapters (--adapters), or without --program the model alone")
    expect_all_saved(checkpoint, index.known_of(MODEL), index.of(MODEL))
    tensors = read_tensors(checkpoint)
    settings = saved.state(SETTINGS) if SETTINGS in saved else {}
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
    schedulers = [key for key in sorted(saved) if key.startswith("scheduler.")]
    taken = {MODEL, _OPTIMIZER, "trainer", "loader", "clock", "meter", *schedulers}
    left_out = {key: "never exported" for key in saved if key not in taken}
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
        left_out=left_out | dict.fromkeys(rest["extra"], "not a tensor"),
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
