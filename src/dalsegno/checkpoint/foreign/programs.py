"""Import a run of another program: its files become the first checkpoint of a run here. Export one for a program.

torch numbers an optimizer's parameters in the order of the groups. Where a program saves only the numbers, the
parameters get names by position (``checkpoint/optimizer_state.py``).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dalsegno.checkpoint import checkpoint_dir, names
from dalsegno.checkpoint.async_save import AsyncSave, NewDirectory
from dalsegno.checkpoint.contract import Captured
from dalsegno.checkpoint.export import LARGEST_SHARD, checkpoint_to_export, expect_all_saved, export_model
from dalsegno.checkpoint.foreign import pickles
from dalsegno.checkpoint.foreign.formats import PROGRAMS, TRAINER_STATE, Place, Program
from dalsegno.checkpoint.index import Index
from dalsegno.checkpoint.manifest import Checkpoint, ComponentRecord
from dalsegno.checkpoint.names import MODEL, SETTINGS
from dalsegno.checkpoint.optimizer_state import OptimizerRows, OptimizerState, are_positional, positional_name
from dalsegno.checkpoint.sidecar import SavedState, SavedStates
from dalsegno.checkpoint.snapshot import Snapshotter
from dalsegno.checkpoint.tensor_reader import read_tensors
from dalsegno.data.loader import IMPORTED
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError, DalsegnoError, NotFound, StateMismatch, expect_known
from dalsegno.stateful.annotations import check_types
from dalsegno.stateful.component import State
from dalsegno.system import filesystem
from dalsegno.system.lock import DirectoryLock

_OPTIMIZER = OptimizerState.key


@dataclass(frozen=True, slots=True)
class OptimizerContents:
    """Hyperparameters of each group, with the names of its parameters under ``params``; state by name and kind."""

    class_name: str
    groups: Sequence[Mapping[str, Any]]
    state: Mapping[str, Mapping[str, Any]]

    @property
    def is_by_position(self) -> bool:
        return are_positional([group["params"] for group in self.groups])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run after ``step`` optimizer steps. Tensors are full tensors on the CPU; each tied one is in ``model``
    once, and ``tied`` has its further names. ``left_out``: parts that were not taken, and why."""

    program: str
    step: int
    model: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]
    optimizer: OptimizerContents | None
    schedulers: Sequence[Mapping[str, Any]]
    place: Place
    left_out: Mapping[str, str]


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
@check_types
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
        program: ``"hf"``, ``"accelerate"``, ``"dcp"``, ``"lightning"`` or ``"torch"``; None: recognized by the files.
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
        if value is not None and not 0 <= value < _MOST:  # which NaN is not, either
            raise ConfigurationError(f"{name}={value!r}; needs a finite number of at least 0")
    _expect_no_run(target)
    layout = _program_of(path, program)
    try:
        run = _run_of(layout, path, step, epoch, strip_prefix, optimizer)
    except DalsegnoError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError, RecursionError) as error:
        raise StateMismatch(f"{path}: is not as {layout.name} writes it ({error!r}); nothing was imported") from error
    filesystem.make_directory(target)
    with DirectoryLock(target):
        _expect_no_run(target)
        return Imported(_write(run, target), run)


def _program_of(path: Path, key: str | None) -> Program:
    if key is not None:
        expect_known("program", [key], PROGRAMS)
        return PROGRAMS[key]
    found = next((each for each in PROGRAMS.values() if each.is_at(path)), None)
    if found is None:
        known = ", ".join(each.name for each in PROGRAMS.values())
        raise ConfigurationError(f"{path}: not recognized as a checkpoint of {known}")
    return found


def _expect_no_run(target: Path) -> None:
    if (target / "run.json").exists() or checkpoint_dir.published(target / names.CHECKPOINTS):
        raise ConfigurationError(f"{target}: has a run already; choose another directory")


_MOST = 2**53
_NOT_TAKEN = {
    "order of the data": "this run's own: in the current epoch some samples come twice, some never",
    "random generators": "never taken: seeded anew",
    "gradient scaler": "never taken: begins with its first scale",
    "log": "never taken: the run here begins one",
    "settings": "never taken: set the arguments in TrainingArguments",
}


def _run_of(
    program: Program, path: Path, step: int | None, epoch: float | None, strip_prefix: str, optimizer: str | None
) -> RunState:
    """The state in the files, as far as the caller has not given another; arguments and errors are those of
    ``import_checkpoint``."""
    found = program.read(path)

    def renamed(name: str) -> str:
        return _unwrapped(name).removeprefix(strip_prefix)

    saved, where = pickles.with_arrays(found.optimizer)
    contents = None if saved is None else _contents_of(saved, optimizer, renamed, where)
    own = {
        name: each.detach()
        for name, each in found.tensors.items()
        if isinstance(each, torch.Tensor) and _unwrapped(name).startswith(strip_prefix)
    }
    if not own:
        first = ", ".join(list(found.tensors)[:3]) or "none"
        raise ConfigurationError(f"strip_prefix={strip_prefix!r}: no tensor has such a name; they are {first} …")
    tied = _tied_names(own)
    place = found.place if epoch is None else Place.at(epoch)
    finished = _step(found.step, contents, path) if step is None else step
    for what, value in ("step", finished), ("epoch", place.epoch), ("batches", place.microbatches or 0):
        if not (isinstance(value, int) and 0 <= value < _MOST):
            raise StateMismatch(f"{path}: {what}={value!r}; needs a count of at least 0; nothing was imported")
    left_out = {
        **{str(name): "unknown to a run here" for name in found.unknown},
        **{f"callback {name}": "its state has no meaning for a callback here" for name in found.callbacks},
        **_NOT_TAKEN,
    }
    if contents is None:
        left_out["optimizer"] = "not saved (save_only_model=True?), so no run can resume from this"
    if not place.is_known:
        left_out["place in the data"] = "not saved: it begins anew; pass --epoch, say 1.25"
    return RunState(
        program=found.program or program.name,
        step=finished,
        model={renamed(name): each.contiguous() for name, each in own.items() if name not in tied},
        tied={renamed(alias): renamed(name) for alias, name in tied.items()},
        optimizer=contents,
        schedulers=[_at_step(finished, each, found.processes) for each in pickles.with_arrays(found.schedulers)],
        place=place,
        left_out=left_out,
    )


def _contents_of(
    saved: Mapping[str, Any], class_name: str | None, rename: Callable[[str], str], where: str
) -> OptimizerContents:
    """Convert the result of ``optimizer.state_dict()``, by number or (as DCP's) by FQN, to which ``rename`` is applied.
    Without a ``class_name``, that is inferred."""
    try:
        groups = [dict(group) for group in saved["param_groups"]]
        renamed: dict[Any, str] = {}
        for number, group in enumerate(groups):
            known = [each if isinstance(each, str) else None for each in group["params"]]
            for position, name in enumerate(group.pop("param_names", known)):
                given = positional_name(number, position) if name is None else rename(name)
                renamed[group["params"][position]] = given
            group["params"] = [renamed[each] for each in group["params"]]
        state = {renamed[each]: dict(values) for each, values in saved["state"].items()}
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise StateMismatch(f"{where}: not the state_dict of a torch optimizer ({error!r})") from error
    return OptimizerContents(class_name or _class_of(groups, where), groups, state)


_ADDED = {"params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
"""Keys of a parameter group that are not its optimizer's arguments."""


def _class_of(groups: Sequence[Mapping[str, Any]], where: str) -> str:
    """The class of ``torch.optim`` with these hyperparameters. Adam and AdamW differ in one value."""
    own = groups[0].keys() - _ADDED
    fitting = []
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            defaults = kind([torch.zeros(1, 1)]).defaults  # type: ignore[call-arg]
            decoupled = defaults.get("decoupled_weight_decay")
            if defaults.keys() == own and decoupled == groups[0].get("decoupled_weight_decay"):
                fitting.append(kind)
    if len(fitting) != 1:
        raise ConfigurationError(
            f"{where}: does not contain the optimizer's class, and its hyperparameters ({', '.join(sorted(own))}) are "
            "not those of one optimizer of this torch; pass optimizer= (--optimizer), say torch.optim.AdamW"
        )
    return f"{fitting[0].__module__}.{fitting[0].__qualname__}"


def _at_step(step: int, schedule: Mapping[str, Any], processes: int) -> Mapping[str, Any]:
    """A schedule that each of several processes has advanced once in a step, if it is one of a function."""
    if processes > 1 and "lr_lambdas" in schedule and schedule.get("last_epoch") == step * processes:
        return {**schedule, "last_epoch": step, "_step_count": step + 1}
    return schedule


def _step(saved: object, optimizer: OptimizerContents | None, path: Path) -> int:
    """The step that is saved, else the largest count of the optimizer's own."""
    if isinstance(saved, torch.Tensor) and saved.numel() == 1:
        return int(saved)
    if type(saved) is int:
        return saved
    if optimizer is None:
        return 0
    counts = [int(values["step"]) for values in optimizer.state.values() if values.get("step") is not None]
    if not counts:
        raise ConfigurationError(f"{path}: does not contain the number of finished steps; pass step= (--step)")
    return max(counts)


def _unwrapped(name: str) -> str:
    """Without the prefixes that DistributedDataParallel and torch.compile add to all names."""
    return name.removeprefix("module.").removeprefix("_orig_mod.")


def _tied_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Further name to first name of each tensor that has several: they are one place in memory."""
    first: dict[object, str] = {}
    found = {
        name: first.setdefault((each.data_ptr(), each.dtype, each.shape, each.stride()), name)
        for name, each in tensors.items()
        if each.numel()
    }
    return {name: other for name, other in found.items() if name != other}


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
        sharded.append(_captured(run.optimizer))
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
        metrics={},
    )
    save.join()
    if save.failure is not None:
        raise save.failure
    return save.path


def _captured(optimizer: OptimizerContents) -> _Tensors:
    """The optimizer as a checkpoint stores it."""
    tensors: dict[str, torch.Tensor] = {}
    rows = OptimizerRows()
    for name, values in optimizer.state.items():
        plain = rows.plain[name] = {}
        for kind, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim():
                tensors[f"{name}.{kind}"] = value.contiguous()
                rows.sharded.setdefault(name, []).append(kind)
            else:
                plain[kind] = value
    rest = {**rows.by_kind(), "other": {}, "groups": [dict(group) for group in optimizer.groups]}
    return _Tensors(_OPTIMIZER, optimizer.class_name, tensors, rest)


# --- export ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExportedRun:
    """Outcome of an export: the checkpoint, the program, its files, and what they do not contain, with the reason."""

    checkpoint: Path
    program: str
    files: Sequence[Path]
    left_out: Mapping[str, str]


@collectives.alone()
@check_types
def export_checkpoint(
    checkpoint: str | Path,
    target: str | Path,
    *,
    program: str,
    best: bool = False,
    max_shard_size: int | str = LARGEST_SHARD,
    config_from: str | Path | None = None,
) -> ExportedRun:
    """Write model, optimizer, schedule and progress in the files of another program. In one process.

    Verifies the checkpoint first. Memory holds all tensors.

    Args:
        checkpoint: a checkpoint, or a run, whose newest valid checkpoint is exported.
        target: folder or file to write; must not exist.
        program: ``"hf"``: a folder from which Hugging Face's Trainer resumes; ``"torch"``: a file of ``torch.save``,
            for any loop.
        best: export the run's checkpoint with the best evaluation instead of the newest one.
        max_shard_size, config_from: as for :func:`export_model`, of Hugging Face's folder.

    Raises:
        UnknownName: for an unknown ``program``.
        NotFound: if there is no such checkpoint.
        DamagedCheckpoint: if its bytes do not match its manifest.
        ConfigurationError: if ``target`` exists, or the checkpoint lacks what the program needs.
    """
    advice = "export program='torch', whose parts the load_state_dict of model, optimizer and schedule take"
    expect_known("program to export for", [program], ["hf", "torch"], dict.fromkeys(PROGRAMS, advice))
    place = Path(target)
    if place.exists():
        raise ConfigurationError(f"{place}: exists already; choose another name")
    source = checkpoint_to_export(checkpoint, best=best)
    content, left_out = _read(source)
    if program == "hf":
        if "optimizer" not in content:
            raise ConfigurationError("the checkpoint contains no optimizer, without which Hugging Face cannot resume")
        done = export_model(source.path, place, max_shard_size=max_shard_size, config_from=config_from)
        files = [*done.files, *done.copied, *_write_trainer(content, source, place)]
    else:
        filesystem.make_directory(place.parent)
        files = [_save(content, place)]
    return ExportedRun(source.path, PROGRAMS[program].name, files, left_out)


def _read(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, str]]:
    """What a file of ``torch.save`` contains of a verified checkpoint, and what it does not, with the reason.

    The model's tensors are there under all their names, tied ones the same tensor; the optimizer's state by number.
    Raises ConfigurationError if the checkpoint is not that of a whole run, was saved without its frozen parameters, or
    contains quantized or wrapped weights.
    """
    if missing := [key for key in (MODEL, "trainer", "loader") if key not in checkpoint.manifest.components]:
        raise ConfigurationError(
            f"{checkpoint.path}: contains no {', '.join(missing)}, so no program can resume from it; export its model "
            "alone, without program="
        )
    saved, index = SavedStates(checkpoint), Index.of_checkpoint(checkpoint)
    rest = saved.state(MODEL)
    _expect_plain(checkpoint, rest, "weights", "export the adapters (--adapters), or without --program the model alone")
    expect_all_saved(checkpoint, index.known_of(MODEL), index.of(MODEL))
    tensors = read_tensors(checkpoint)
    model = tensors[MODEL]
    content = {
        "model": model | {alias: model[name] for alias, name in rest["tied"].items()},
        "step": checkpoint.step,
        "epoch": Place.at(saved.state("trainer")["epoch"]).position,
    }
    schedulers = [key for key in sorted(saved) if key.startswith("scheduler.")]
    if schedulers:
        content["lr_scheduler"] = saved.state(schedulers[0])
    if _OPTIMIZER in saved:
        own = saved.state(_OPTIMIZER)
        _expect_plain(checkpoint, own, "states of parameters", "export the model alone")
        content["optimizer"] = _by_number(own, tensors.get(_OPTIMIZER, {}))
    left_out = {key: "never exported" for key in saved if key not in _EXPORTED and key not in schedulers}
    left_out |= dict.fromkeys(rest["extra"], "not a tensor")
    return content, left_out | dict.fromkeys(schedulers[1:], "there is a place for one")


_EXPORTED = {MODEL, _OPTIMIZER, "trainer", "loader", "clock", "meter"}


def _by_number(own: State, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The ``state_dict`` of a torch optimizer with this state, and these sharded tensors."""
    rows = OptimizerRows.of(own)
    names = [name for group in own["groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    state = {
        number: rows.plain[name] | {kind: tensors[f"{name}.{kind}"] for kind in rows.sharded.get(name, ())}
        for name, number in numbers.items()
        if name in rows.plain
    }
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in own["groups"]]
    return {"state": state, "param_groups": groups}


_TRAINER_SETTINGS = {
    "max_steps": "max_steps of the schedule",
    "train_batch_size": "per_device_train_batch_size",
    **{name: name for name in ("logging_steps", "eval_steps", "save_steps")},
}
"""Those in Hugging Face's state, which win over the arguments of a trainer that resumes, by their names here. Its
trainer divides by them: 0, which turns a schedule off here, is left out."""


def _write_trainer(content: Mapping[str, Any], source: Checkpoint, folder: Path) -> list[Path]:
    """Beside the model, what a trainer with the same parameter groups resumes (``resume_from_checkpoint=``)."""
    saved = SavedStates(source)
    settings, loader = saved.state(SETTINGS) if SETTINGS in saved else {}, saved.state("loader")
    if not settings.get("per_device_train_batch_size") and loader.get("microbatches"):  # a loader of the user's own
        data_ranks = len({*source.manifest.data_ranks}) or source.manifest.world_size
        batch = loader.get("samples", 0) // loader["microbatches"] // data_ranks
        settings = {**settings, "per_device_train_batch_size": batch}
    progress = {
        "global_step": content["step"],
        "epoch": content["epoch"],
        **{theirs: settings[ours] for theirs, ours in _TRAINER_SETTINGS.items() if settings.get(ours)},
        # Its next save replaces the first, and appends to the second; it raises KeyError for one that is not there.
        "stateful_callbacks": {"TrainerControl": {"args": {}, "attributes": {}}, "EarlyStoppingCallback": []},
    }
    files = [_save(content["optimizer"], folder / "optimizer.pt")]
    if "lr_scheduler" in content:
        files.append(_save(content["lr_scheduler"], folder / "scheduler.pt"))
    filesystem.replace_durably(folder / TRAINER_STATE, json.dumps(progress, indent=2).encode())
    return [*files, folder / TRAINER_STATE]


def _save(content: object, path: Path) -> Path:
    """``torch.save``; the file appears under its name once it is complete."""
    partial = path.with_name(f"{path.name}.partial")
    torch.save(content, partial)
    filesystem.rename(partial, path)
    return path


def _expect_plain(checkpoint: Checkpoint, rest: State, what: str, instead: str) -> None:
    """Other programs save a quantized tensor as one of its class, by pickle, or in a form of their own."""
    if wrapped := sorted(rest.get("wrapped", {})):
        more = ", …" if wrapped[1:] else ""
        raise ConfigurationError(
            f"{checkpoint.path}: contains {len(wrapped)} quantized or wrapped {what} ({wrapped[0]}{more}), which no "
            f"other program builds from the tensors inside them; {instead}"
        )
