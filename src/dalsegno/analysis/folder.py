"""open_log: find the runs under a path and name them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dalsegno.errors import ConfigurationError, NotFound, UnknownName
from dalsegno.logs.values import Record
from dalsegno.stateful.annotations import check_types
from dalsegno.system.imports import require_extra

from .blocks import concatenate
from .formats.find import LOOKED_FOR, loose_sources, source_of_file, source_of_run
from .formats.source import Skipped, Source, Unreadable
from .formats.tensorboard import EventFiles
from .log import TrainingLog

if TYPE_CHECKING:
    import polars as pl


DEPTH = 4  # levels of directories below the given one that are searched for runs

NOT_RUNS = {"checkpoints", "rewound", "logs", "witness"}


@check_types
def open_log(path: str | os.PathLike[str], step_key: str | None = None) -> TrainingLog:
    """Open the log at ``path``: a run directory, a log file, or a directory of runs, which gives a :class:`RunFolder`.

    Reads nothing yet. docs/guides/logs.md lists the formats.

    Args:
        step_key: key of the step in the records, for JSON lines with an unusual one.

    Raises:
        NotFound: if the path does not exist or contains no log; the message lists the files searched for.
        ConfigurationError: for a file of unknown format.
    """
    path = Path(path)
    if not path.exists():
        raise NotFound(f"{path}: no such file or folder")
    if path.is_file():
        return TrainingLog(name_of(path), path, source_of_file(path, step_key))
    runs = list(_runs_in(path, path, step_key, DEPTH))
    if not runs:
        raise NotFound(f"{path}: no log in it; looked for {LOOKED_FOR}, here and in the directories below")
    return runs[0] if runs[0].path == path else RunFolder(path, runs)


@check_types
def open_logs(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], step_key: str | None = None
) -> list[TrainingLog]:
    """The runs under all paths, in order. Runs of the same name, such as ``a/run`` and ``b/run``, get as much of their
    path as makes the names unique. A single path is a list of one. Raises as :func:`open_log` does."""
    paths = [paths] if isinstance(paths, str | os.PathLike) else paths
    runs = [run for path in paths for run in open_log(path, step_key)]
    make_names_unique(runs)
    return runs


class RunFolder(TrainingLog):
    """The logs of several runs in one directory: iterate over them, or index by name, ``folder["a"]``. The list of runs
    is fixed when the directory is opened; each run is read again when its log grows.

    ``records()`` and ``frame()`` cover all runs and add the name as ``run``. Methods about a single run (series, legs,
    summary) raise ConfigurationError.
    """

    def __init__(self, path: Path, runs: list[TrainingLog]) -> None:
        super().__init__(path.resolve().name, path, _NoLog(path))
        self.runs = runs

    def __iter__(self) -> Iterator[TrainingLog]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, name: str) -> TrainingLog:
        """Raises UnknownName if there is no such run."""
        for run in self.runs:
            if run.name == name:
                return run
        raise UnknownName(f"run in {self.path}", name, [run.name for run in self.runs])

    def records(self, kind: str | None = None) -> Iterator[Record]:
        self.skipped = Skipped()
        for run in self.runs:
            for record in run.records(kind):
                yield {"run": run.name, **record}
            self.skipped.include(run.name, run.skipped)

    def metrics(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs for name in run.metrics()))

    def frame(self) -> pl.DataFrame:
        require_extra("analysis", "polars", "frame()")
        import polars as pl

        self.skipped = Skipped()
        frames = []
        for run in self.runs:
            frames.append(run.frame().select(pl.lit(run.name).alias("run"), pl.exclude("run")))
            self.skipped.include(run.name, run.skipped)
        return concatenate(frames)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        names = ", ".join(run.name for run in self.runs)
        raise ConfigurationError(f"{self.path} contains {len(self.runs)} runs ({names}); choose one of them")

    series = legs = lineage = summary = parameters = _refuse

    def _repr_html_(self) -> str:
        from .notebook import cards

        return cards(self.runs)


class _NoLog(Source):
    """Of a directory of runs; or of a run with only a ``run.json``, which may have failed before its first record."""

    program = ""

    def read(self, skipped: Skipped) -> Iterator[tuple[int, Record]]:
        return iter(())


def _runs_in(root: Path, folder: Path, step_key: str | None, depth: int) -> Iterator[TrainingLog]:
    """``folder`` if it is a run; otherwise its log files, and the runs in the directories below."""
    name = folder.relative_to(root)
    whole = name_of(folder) if folder == root else name.as_posix()
    try:
        run = source_of_run(folder, step_key)
        loose = [] if run else loose_sources(folder, step_key)
        inner = [] if run or not depth else sorted(folder.iterdir())
        named = (path for path in inner if path.name not in NOT_RUNS and not path.name.startswith("."))
        folders = [path for path in named if path.is_dir()]
    except (OSError, ConfigurationError) as error:
        if folder == root and isinstance(error, ConfigurationError):
            raise
        run = Unreadable(folder, error)
    if run:
        yield TrainingLog(whole, folder, run)
        return
    below = [run for child in folders for run in _runs_in(root, child, step_key, depth - 1)]
    if len(loose) == 1 and all(isinstance(run.source, EventFiles) for run in below):  # event files of the same run
        yield TrainingLog(whole, folder, loose[0])
        return
    for source in loose:
        yield TrainingLog((name / source.path.stem).as_posix(), source.path, source)
    yield from below
    if not (loose or below) and (folder / "run.json").is_file():
        yield TrainingLog(whole, folder, _NoLog(folder / "run.json"))


def name_of(path: Path) -> str:
    """Name of the run directory that ``path`` is or lies in; otherwise the file's stem."""
    path = path.resolve()
    if path.is_dir():
        return path.parent.name if path.name == "logs" else path.name
    if path.parent.name == "logs":
        return path.parent.parent.name
    return path.stem


def make_names_unique(runs: Sequence[TrainingLog]) -> None:
    """Prefix equal names with as many parent directories as needed; number equal names in the same directory."""
    above = {id(run): _above(run) for run in runs}

    def is_shared(run: TrainingLog) -> bool:
        return any(run.name == other.name and above[id(run)] != above[id(other)] for other in runs)

    while alike := [run for run in runs if is_shared(run)]:
        for run in alike:
            if folders := above[id(run)]:
                run.name = f"{folders.pop()}/{run.name}"
    seen: Counter[str] = Counter()
    for run in runs:
        seen[run.name] += 1
        if seen[run.name] > 1:
            run.name = f"{run.name} ({seen[run.name]})"


def _above(run: TrainingLog) -> list[str]:
    """The directories above the one that names the run, outermost first."""
    path = run.path.resolve()
    name = run.name.split("/")
    parts = [*path.parts[1:-1], path.name if path.is_dir() else path.stem]
    while parts and parts[-len(name) :] != name:
        parts.pop()
    return parts[: -len(name)]
