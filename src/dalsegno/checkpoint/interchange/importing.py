"""Import a run of another program: its files become the first checkpoint of a run here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dalsegno.checkpoint.format import checkpoint_dir, names
from dalsegno.errors import ConfigurationError, DalsegnoError, NotFound, StateMismatch, UnknownName
from dalsegno.system import filesystem
from dalsegno.system.lock import DirectoryLock

from . import own_checkpoint
from .formats import FORMATS
from .reading import ReadOptions
from .run_state import RunState


@dataclass(frozen=True, slots=True)
class Imported:
    """Outcome of an import: the checkpoint, and what it contains."""

    checkpoint: Path
    run: RunState

    @property
    def can_resume(self) -> bool:
        """Whether a run can resume from it; else only the model can be loaded."""
        return self.run.optimizer is not None


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

    Pickles are read in a process of its own with torch's restricted unpickler, without network, and with a memory
    limit; see :mod:`dalsegno.checkpoint.interchange.sandbox`. Memory here holds all tensors.

    Args:
        source: the other program's folder or file.
        output_dir: of the new run; must not contain one.
        program: key of :data:`FORMATS` such as ``"lightning"``; None: recognized by the files.
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
    if program is not None and program not in FORMATS:
        raise UnknownName("program", program, FORMATS)
    _expect_no_run(target)
    form = FORMATS[program] if program else next((each for each in FORMATS.values() if each.is_at(place)), None)
    if form is None:
        known = ", ".join(each.PROGRAM for each in FORMATS.values())
        raise ConfigurationError(f"{place}: not recognized as a checkpoint of {known}")
    try:
        run = form.read(place, ReadOptions(step, epoch, strip_prefix, optimizer))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, DalsegnoError):
            raise
        raise StateMismatch(f"{place}: is not as {form.PROGRAM} writes it ({error!r}); nothing was imported") from error
    filesystem.make_directory(target)
    with DirectoryLock(target):
        _expect_no_run(target)
        return Imported(own_checkpoint.write(run, target), run)


def _expect_no_run(target: Path) -> None:
    """A log without checkpoints, as a killed import leaves, is moved to ``logs/rewound/`` when the next one writes."""
    if (target / "run.json").exists() or checkpoint_dir.newest_first(target / names.CHECKPOINTS):
        raise ConfigurationError(f"{target}: has a run already; choose another directory")
