"""Export a checkpoint to the files from which another program resumes training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dalsegno.checkpoint.format.manifest import Checkpoint
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.logs import read_records
from dalsegno.system import filesystem

from . import own_checkpoint
from .export import checkpoint_to_export, export_model
from .formats import FORMATS
from .run_state import RunState
from .writing import WriteOptions


@dataclass(frozen=True, slots=True)
class ExportedRun:
    """Outcome of an export: the checkpoint, the program, its files, and what they do not contain, with the reason."""

    checkpoint: Path
    program: str
    files: Sequence[Path]
    left_out: Mapping[str, str]


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
    """Write model, optimizer, schedule, random state and progress in the files of another program. In one process.

    Verifies the checkpoint first. Memory holds all tensors.

    Args:
        checkpoint: a checkpoint, or a run, whose newest valid checkpoint is exported.
        target: folder or file to write; must not exist.
        program: key of ``FORMATS``: ``"hf"``, ``"accelerate"``, ``"dcp"``, ``"lightning"`` or ``"torch"``.
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
    if program not in FORMATS:
        raise UnknownName("program", program, FORMATS)
    form, place = FORMATS[program], Path(target)
    if place.exists():
        raise ConfigurationError(f"{place}: exists already; choose another name")
    source = checkpoint_to_export(checkpoint, best=best)
    run = own_checkpoint.read(source)
    run = replace(run, records=_records(source, run))

    def export_weights(folder: Path) -> Sequence[Path]:
        done = export_model(source.path, folder, max_shard_size=max_shard_size, config_from=config_from)
        return [*done.files, *done.copied]

    filesystem.make_directory(place.parent)
    files, left_out = form.write(run, place, WriteOptions(add_prefix, export_weights))
    return ExportedRun(source.path, form.PROGRAM, files, {**run.left_out, **left_out})


def _records(source: Checkpoint, run: RunState) -> list[dict[str, object]]:
    """The run's log up to the checkpoint."""
    log = source.path.parent.parent / own_checkpoint.LOG
    if not log.exists():
        return []
    return [
        each for each in read_records(log) if each.get("global_step") is not None and each["global_step"] <= run.step
    ]
