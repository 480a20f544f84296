"""open_log: from a path to the runs that are there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dalsegno.errors import ConfigurationError, NotFound, UnknownName
from dalsegno.logs import Leg
from dalsegno.logs.values import Record

from .blocks import concatenate
from .extras import require_extra
from .formats.find import LOOKED_FOR, loose_sources, source_of_file, source_of_run
from .formats.source import Skipped, Source, Unreadable
from .formats.tensorboard import EventFiles
from .lineage import LegSummary
from .log import TrainingLog
from .names import name_of, tell_apart
from .series import ParameterSeries, Series
from .summary import Summary

if TYPE_CHECKING:
    import polars as pl

DEPTH = 4
"""How many folders below the one that was named runs are looked for."""

NOT_RUNS = {"checkpoints", "rewound", "logs"}


def open_log(path: str | os.PathLike[str], step_key: str | None = None) -> TrainingLog:
    """The log in ``path``: a run's folder, a log file, or a folder of runs, which gives a :class:`RunFolder`.

    Nothing is read yet. All formats that can be read are listed in docs/logs.md.

    Args:
        step_key: the name of the step in the records, for JSON lines in which it has an unusual one.

    Raises:
        NotFound: if there is no such path, or no log in it; says what was looked for.
        ConfigurationError: for a file of no known format.
    """
    path = Path(path)
    if not path.exists():
        raise NotFound(f"{path}: no such file or folder")
    if path.is_file():
        return TrainingLog(name_of(path), path, source_of_file(path, step_key))
    runs = list(_runs_in(path, path, step_key, DEPTH))
    if not runs:
        raise NotFound(f"{path}: no log in it; looked for {LOOKED_FOR}, here and in the folders below")
    return runs[0] if runs[0].path == path else RunFolder(path, runs)


def open_logs(paths: Iterable[str | os.PathLike[str]], step_key: str | None = None) -> list[TrainingLog]:
    """The runs in all of these paths, in order. Of those that have one name, as ``a/run`` and ``b/run``, each is named
    by so much of its path that no two are the same. Raises as :func:`open_log` does."""
    runs = [run for path in paths for run in open_log(path, step_key)]
    tell_apart(runs)
    return runs


class RunFolder(TrainingLog):
    """The logs of several runs in one folder: iterate over them, or take one by its name, ``folder["a"]``. Which runs
    these are is found out when it is opened; each of them can be asked again as it goes on.

    ``records()`` and ``frame()`` go through all runs and add the name as ``run``. Whatever only one run has
    (a metric's series, legs, a summary) is asked of one run.
    """

    def __init__(self, path: Path, runs: list[TrainingLog]) -> None:
        super().__init__(path.resolve().name, path, _Nothing(path))
        self.runs = runs

    def __iter__(self) -> Iterator[TrainingLog]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, name: str) -> TrainingLog:
        """
        Raises:
            UnknownName: if there is no such run.
        """
        for run in self.runs:
            if run.name == name:
                return run
        raise UnknownName(f"run in {self.path}", name, [run.name for run in self.runs])

    def records(self, kind: str | None = None) -> Iterator[Record]:
        self.skipped = Skipped()
        for run in self.runs:
            for record in run.records(kind):
                yield {"run": run.name, **record}
            self._note(run)

    def metrics(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs for name in run.metrics()))

    def frame(self) -> pl.DataFrame:
        require_extra("polars", "frames are made")
        import polars as pl

        self.skipped = Skipped()
        frames = []
        for run in self.runs:
            frames.append(run.frame().select(pl.lit(run.name).alias("run"), pl.exclude("run")))
            self._note(run)
        return concatenate(frames)

    def series(self, names: Iterable[str], kind: str | None = None) -> dict[str, Series]:
        self._refuse()

    def legs(self) -> list[Leg]:
        self._refuse()

    def lineage(self) -> list[LegSummary]:
        self._refuse()

    def summary(self) -> Summary:
        self._refuse()

    def parameters(self, metric: str) -> ParameterSeries:
        self._refuse()

    def _repr_html_(self) -> str:
        from .html_repr import cards

        return cards(self.runs)

    def _note(self, run: TrainingLog) -> None:
        """What the reading of one run has left out."""
        told = run.skipped
        for sentence in told.sentences:
            self.skipped.note(f"{run.name}: {sentence}")
        self.skipped.count += told.count - len(told.sentences)

    def _refuse(self) -> NoReturn:
        names = ", ".join(run.name for run in self.runs)
        raise ConfigurationError(f"{self.path} holds {len(self.runs)} runs ({names}); ask one of them")


class _Nothing(Source):
    program = ""

    def records(self, skipped: Skipped) -> Iterator[Record]:
        return iter(())


def _runs_in(root: Path, folder: Path, step_key: str | None, depth: int) -> Iterator[TrainingLog]:
    """The run that ``folder`` is; otherwise those that its files are, and those in the folders below it."""
    name = folder.relative_to(root)
    whole = name_of(folder) if folder == root else name.as_posix()
    try:
        run = source_of_run(folder, step_key)
        loose = [] if run else loose_sources(folder, step_key)
        folders = [] if run or not depth else _folders_in(folder)
    except OSError as error:
        run = Unreadable(folder, error)
    if run:
        yield TrainingLog(whole, folder, run)
        return
    below = [run for child in folders for run in _runs_in(root, child, step_key, depth - 1)]
    if len(loose) == 1 and all(isinstance(run.source, EventFiles) for run in below):  # which are of the same run, then
        yield TrainingLog(whole, folder, loose[0])
        return
    for source in loose:
        yield TrainingLog((name / source.path.stem).as_posix(), source.path, source)
    yield from below


def _folders_in(folder: Path) -> list[Path]:
    """Those in which there may be runs."""
    named = (path for path in folder.iterdir() if path.name not in NOT_RUNS and not path.name.startswith("."))
    return sorted(path for path in named if path.is_dir())
