"""How a leg begins: ``ResumeOptions``, as the user asks for it, and ``ChosenStart``, that choice on disk.

``train(False)`` and ``train(path)`` move the files of an abandoned timeline away one by one. If the process is killed
meanwhile, some of these files are still in their place: say commands of a run whose checkpoints are gone.
So the choice is recorded first, in the file ``.start``, and the next start completes it.

The record stays until the run's URL, if it has one, has no file of the abandoned timeline any more; until then, nothing
is fetched from there. A run that begins with a checkpoint of another run keeps the record until its own first
checkpoint: only this record says where the run resumes from.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from dalsegno.checkpoint.compatibility import check_allowed
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError, StateMismatch
from dalsegno.stateful.schema import Must, check
from dalsegno.system import filesystem

logger = logging.getLogger("dalsegno")


_NEWEST = ("auto", "best", "last", "latest", "newest")


@dataclass(frozen=True, slots=True)
class ResumeOptions:
    """How a leg begins: the arguments of ``Trainer.train``; ``origin`` is ``resume_from_checkpoint``."""

    origin: bool | str | Path = True
    strict: bool = False
    strict_callbacks: bool = False
    allow_changes: Collection[str] = ()
    load_components: Collection[str] = ()
    continue_stopped: bool = False

    @property
    def chooses(self) -> bool:
        """Whether the user selects where to begin, instead of resuming the run where it is."""
        return self.origin is not True and not self.load_components

    def __post_init__(self) -> None:
        if not isinstance(self.origin, (bool, str, Path)):
            raise ConfigurationError(
                f"resume_from_checkpoint={self.origin!r}; pass True (from the newest checkpoint, if any), False "
                "(start anew) or a checkpoint's path"
            )
        if str(self.origin) in _NEWEST and not Path(str(self.origin)).exists():
            raise ConfigurationError(
                f"resume_from_checkpoint={self.origin!r}: there is no such path; pass True for the newest checkpoint"
            )
        object.__setattr__(self, "allow_changes", check_allowed(_names("allow_changes", self.allow_changes)))
        names = _names("load_components", self.load_components)
        object.__setattr__(self, "load_components", names)
        if names and isinstance(self.origin, bool):
            raise ConfigurationError(
                f"load_components={names}: pass resume_from_checkpoint= the path of a checkpoint, or of a folder of "
                f"safetensors; it is {self.origin}"
            )


def _names(argument: str, given: object) -> list[str]:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, Collection) or not all(isinstance(each, str) for each in names):
        raise ConfigurationError(f"{argument}={given!r}; needs names, as ('model',)")
    return list(names)


class _Choice(TypedDict):
    checkpoint: str | None
    """Relative to ``output_dir`` if it is inside; None: the run starts anew, or it is in its place by now."""
    stage: Literal["moving", "moved here", "moved"]
    """Whether files are left to be moved here, or at the URL only."""
    archive: Annotated[str, Must("rewound/timeline.…", re.compile(r"rewound/timeline\.\d{4,}").fullmatch)]


class ChosenStart:
    """``.start`` of an ``output_dir``; ``has_url``: the run has a copy at a URL, which follows later. All methods but
    :meth:`settle` are collective."""

    def __init__(self, output_dir: Path, *, has_url: bool) -> None:
        self._output_dir = output_dir
        self._has_url = has_url
        self._path = output_dir / ".start"

    def completed(self, options: ResumeOptions) -> ResumeOptions:
        """Complete what a killed process has begun, unless the user chooses again. Returns the options of the leg: with
        the checkpoint that was chosen then, if the run is not yet where that was.
        """
        choice = None if options.chooses else collectives.from_rank_zero(self._read)
        if choice is None or choice["stage"] != "moving":
            return options
        name = choice["checkpoint"]
        if collectives.rank() == 0:
            logger.warning(
                "the process that was to %s was killed while it moved files to %s: that is completed first",
                "start anew" if name is None else f"resume from {name}",
                choice["archive"],
            )
        if name is None:
            self.begin_anew()
            return options
        return replace(options, origin=self._output_dir / name, load_components=())

    def begin_anew(self) -> None:
        """Move the whole run, if there is one, into an archive."""

        def move_all() -> None:
            files = filesystem.run_files(self._output_dir)
            if files or self._has_url or self._path.exists():
                filesystem.archive_run(files, self._write(None))
                self._complete(is_own=True)

        collectives.from_rank_zero(move_all)

    def record(self, checkpoint: Path) -> Path:
        """Before anything is moved: the run is to resume from ``checkpoint``. Returns the archive of what comes later,
        which need not exist."""
        return collectives.from_rank_zero(partial(self._write, name_in(self._output_dir, checkpoint)))

    def complete(self, *, is_own: bool) -> None:
        """Everything is where the choice has it. ``is_own``: the chosen checkpoint is the run's newest now."""
        collectives.from_rank_zero(partial(self._complete, is_own=is_own))

    def outdates_url(self) -> bool:
        """Whether the URL has the abandoned timeline still."""
        choice = collectives.from_rank_zero(self._read) if self._has_url else None
        return choice is not None and choice["stage"] == "moved here"

    def settle(self) -> None:
        """The abandoned timeline is moved at the URL, too. On rank 0, on any thread."""
        choice = self._read()
        if choice is not None and choice["stage"] == "moved here":
            self._advance(choice, "moved")

    def origin(self) -> Path | None:
        """The checkpoint of another run that this one has begun with; None if there is none. To be asked for as long as
        this one has no checkpoint."""
        choice = collectives.from_rank_zero(self._read)
        return None if choice is None or choice["checkpoint"] is None else self._output_dir / choice["checkpoint"]

    # -- on rank 0 --------------------------------------------------------------------------------------------------

    def _write(self, name: str | None) -> Path:
        with contextlib.suppress(StateMismatch):
            choice = self._read()
            if choice is not None and choice["checkpoint"] == name and choice["stage"] == "moving":
                return self._output_dir / choice["archive"]
        place = filesystem.new_archive_dir(self._output_dir)
        self._replace(_Choice(checkpoint=name, stage="moving", archive=place.relative_to(self._output_dir).as_posix()))
        return place

    def _complete(self, *, is_own: bool) -> None:
        choice = self._read()
        assert choice is not None, "record() comes before complete()"
        if is_own:
            choice["checkpoint"] = None
        self._advance(choice, "moved here" if self._has_url else "moved")

    def _advance(self, choice: _Choice, stage: Literal["moved here", "moved"]) -> None:
        if stage == "moved" and choice["checkpoint"] is None:
            filesystem.remove(self._path)
            filesystem.fsync_directory(self._output_dir)
        else:
            self._replace({**choice, "stage": stage})

    def _replace(self, choice: _Choice) -> None:
        filesystem.replace_durably(self._path, (json.dumps(choice) + "\n").encode())

    def _read(self) -> _Choice | None:
        if not self._path.exists():
            return None
        try:
            choice: _Choice = json.loads(self._path.read_bytes())
            check(choice, _Choice, "choice")
        except (ValueError, StateMismatch) as error:
            raise StateMismatch(
                f"{self._path}: damaged ({error}); choose again: pass resume_from_checkpoint= a checkpoint's path, or "
                "False to start anew"
            ) from error
        return choice


def name_in(directory: Path, path: Path) -> str:
    """``path`` relative to the run's directory, if it is inside: then it stays valid when the run is moved."""
    path, home = path.resolve(), directory.resolve()
    return path.relative_to(home).as_posix() if path.is_relative_to(home) else str(path)
