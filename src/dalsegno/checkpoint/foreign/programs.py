"""Import a run of another program: its files become the first checkpoint of a run here. Export one for a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dalsegno.checkpoint import checkpoint_dir, names
from dalsegno.checkpoint.export import checkpoint_to_export, export_model
from dalsegno.checkpoint.foreign.run_state import Program, Source
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError, DalsegnoError, NotFound, StateMismatch, UnknownName
from dalsegno.system import filesystem
from dalsegno.system.lock import DirectoryLock

from . import own_checkpoint
from .dcp_folder import DCP
from .hf_folders import ACCELERATE, HUGGING_FACE
from .run_state import RunState
from .torch_files import LIGHTNING, TORCH

PROGRAMS: Mapping[str, Program] = {
    "hf": HUGGING_FACE,
    "accelerate": ACCELERATE,
    "dcp": DCP,
    "lightning": LIGHTNING,
    "torch": TORCH,
}
"""By key; in the order in which a folder is recognized."""

_NOT_TAKEN = {
    "order of the data": "this run's own: in the current epoch some samples come twice, some never",
    "random generators": "never taken: seeded anew",
    "gradient scaler": "never taken: begins with its first scale",
    "log": "never taken: the run here begins one",
    "settings": "never taken: set the arguments in TrainingArguments",
}


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
    place, target = Path(source), Path(output_dir)
    if not place.exists():
        raise NotFound(f"{place}: does not exist")
    _expect_no_run(target)
    if program is not None:
        layout = _program(program)
    elif (found := next((each for each in PROGRAMS.values() if each.is_at(place)), None)) is not None:
        layout = found
    else:
        known = ", ".join(each.name for each in PROGRAMS.values())
        raise ConfigurationError(f"{place}: not recognized as a checkpoint of {known}")
    try:
        run = layout.read(Source(place, step, epoch, strip_prefix, optimizer))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, DalsegnoError):
            raise
        raise StateMismatch(f"{place}: is not as {layout.name} writes it ({error!r}); nothing was imported") from error
    run = replace(run, left_out={**run.left_out, **_missing(run)})
    filesystem.make_directory(target)
    with DirectoryLock(target):
        _expect_no_run(target)
        return Imported(own_checkpoint.write(run, target), run)


def _program(key: str) -> Program:
    if key not in PROGRAMS:
        raise UnknownName("program", key, PROGRAMS)
    return PROGRAMS[key]


def _expect_no_run(target: Path) -> None:
    if (target / "run.json").exists() or checkpoint_dir.newest_first(target / names.CHECKPOINTS):
        raise ConfigurationError(f"{target}: has a run already; choose another directory")


def _missing(run: RunState) -> dict[str, str]:
    """Parts that the files do not contain, or that are never taken, and what follows from that."""
    found = dict(_NOT_TAKEN)
    if run.optimizer is None:
        found["optimizer"] = "not saved (save_only_model=True?), so no run can resume from this"
    if not run.place.is_known:
        found["place in the data"] = "not saved: it begins anew; pass --epoch, say 1.25"
    return found


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
    run = own_checkpoint.read(source)
    weights: list[Path] = []
    if layout.has_safetensors:
        run.expect_optimizer(layout.name)
        done = export_model(source.path, place, max_shard_size=max_shard_size, config_from=config_from)
        weights = [*done.files, *done.copied]
    else:
        filesystem.make_directory(place.parent)
    files, left_out = layout.write(run, place, add_prefix)
    return ExportedRun(source.path, layout.name, [*weights, *files], {**run.left_out, **left_out})
