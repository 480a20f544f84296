"""TrainingLog: the log of one run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.errors import DamagedRunFile, expect_known
from dalsegno.logs import Leg, RunFile
from dalsegno.logs.values import Record
from dalsegno.stateful.annotations import check_types
from dalsegno.system.imports import require_extra

from .blocks import KINDS, concatenate, read_columns
from .formats.find import source_of_run
from .formats.source import BOOKKEEPING, HEADER, Skipped, Source, loss_of
from .lineage import (
    Intervention,
    LegSummary,
    Restart,
    Tail,
    find_interventions,
    find_restarts,
    read_tails,
    summarize_legs,
)
from .plotting import Limits, View, XAxis
from .series import ParameterSeries, Series, read_parameters
from .summary import Summary, is_listed, is_summarized, summarize

if TYPE_CHECKING:
    import polars as pl

    from .plotting.figure import Picture

logger = logging.getLogger("dalsegno")


def _files_of(folder: Path) -> set[tuple[str, str]]:
    """The files of a run directory among which its log may be; empty for a file."""
    found: set[tuple[str, str]] = set()
    for name in ("", "logs"):
        with suppress(OSError):
            found |= {(name, each.name) for each in os.scandir(folder / name)}
    for checkpoint in [name for place, name in found if not place and name.startswith("checkpoint-")]:
        with suppress(OSError):  # of another user, say
            (folder / checkpoint / "trainer_state.json").stat()
            found.add((checkpoint, "state"))
    return found


class TrainingLog:
    """The log of one run, read on demand and cached until its file changes: a log that is still being written can be
    queried again, also after it continued in another file of the run directory.

    ::

        log = ds.open_log("runs/a")
        log.metric("loss").values    # an array
        log.frame()                  # a Polars frame

    Created by :func:`dalsegno.open_log`. ``path``: the run directory, or the file that was opened.
    """

    def __init__(self, name: str, path: Path, source: Source) -> None:
        self.name = name
        self.path = path
        self._source = source
        self._files: set[tuple[str, str]] = set()
        self.skipped = Skipped()
        """What the last read skipped."""
        self._columns = read_columns((), (), lambda name: False)
        self._stamp: tuple[int, ...] = ()
        self._damage = ""  # of run.json, as it was said

    def __iter__(self) -> Iterator[TrainingLog]:
        """Yields itself, as a directory of runs yields its runs."""
        yield self

    def __len__(self) -> int:
        return 1

    @property
    def source(self) -> Source:
        """The current file or files of the log; searched again if files were added to the directory, or removed.

        A log whose file could not be resumed continues in ``train-2.jsonl``; Hugging Face rewrites its log in each
        checkpoint and deletes older checkpoints.
        """
        files = _files_of(self.path)
        if files != self._files:
            found = source_of_run(self.path, self._source.step_key)
            if found is not None and (type(found), found.path) != (type(self._source), self._source.path):
                self._source = found
            self._files = files
        return self._source

    @property
    def output_dir(self) -> Path | None:
        """The run directory, if it has a ``run.json``."""
        path = self.path.resolve()
        folders = [path, path.parent, path.parent.parent]
        return next((folder for folder in folders if (folder / "run.json").is_file()), None)

    @property
    def header(self) -> Record:
        """The fields of the header, the first record; empty if the log has none."""
        for record in self.source.records(Skipped()):
            if record["kind"] == HEADER:
                return {name: value for name, value in record.items() if name not in BOOKKEEPING}
            break
        return {}

    @check_types
    def records(self, kind: str | None = None) -> Iterator[Record]:
        """Yield the records of one kind (``train``, ``eval``, ``final``, ``user``), or all; never the header.

        Each has ``global_step`` and ``kind``, and ``timestamp`` and ``epoch`` if the log has them, under whatever
        names. Lines that cannot be of the kind are not decoded, and so not noted as skipped.
        """
        self.skipped = Skipped()
        for record in self.source.records(self.skipped, kind):
            if record["kind"] != HEADER and kind in (None, record["kind"]):
                yield record

    def metrics(self) -> list[str]:
        """Names of all logged numbers, in the order of their first appearance."""
        self._read([])
        return [name for name in self._columns.names if name not in BOOKKEEPING]

    @check_types
    def metric(self, name: str, kind: str | None = None) -> Series:
        """One metric, in the records of one kind or in all.

        Raises UnknownName if no record has it; suggests the nearest.
        """
        return self.series([name], kind)[name]

    @check_types
    def series(self, names: Iterable[str], kind: str | None = None) -> dict[str, Series]:
        """As :meth:`metric`, for several metrics in one pass over the file."""
        names = list(names)
        expect_known("kind of record", [] if kind is None else [kind], KINDS)
        self._read(names)
        expect_known(f"metric of {self.name}", names, {*self._columns.names, *BOOKKEEPING})
        return {name: self._series(name, kind) for name in names}

    @property
    def loss(self) -> str | None:
        """Name of the loss; None if no metric has a usual name of a loss."""
        return loss_of(self.metrics())

    def frame(self) -> pl.DataFrame:
        """The whole log: one row per record, one column per name.

        Raises ConfigurationError if Polars is not installed; ``dalsegno[analysis]`` includes it.
        """
        require_extra("analysis", "polars", "frame()")
        self.skipped = Skipped()
        frame = concatenate([block.frame() for block in self.source.blocks(self.skipped)])
        empty = [name for name in frame.columns if len(frame) and frame[name].null_count() == len(frame)]
        return frame.drop(name for name in empty if name not in BOOKKEEPING)

    def legs(self) -> list[Leg]:
        """The legs of the run as recorded in ``run.json``; empty without one. A damaged one is none, with a warning.

        Raises StateMismatch if the file is of a newer format.
        """
        try:
            return RunFile(self.output_dir).legs() if self.output_dir else []
        except DamagedRunFile as error:
            if self._damage != (damage := str(error)):
                logger.warning("%s; the legs of this run are unknown", damage)
            self._damage = damage
            return []

    def lineage(self) -> list[LegSummary]:
        """The legs of the run, each with what became of its work; empty, and raises, as :meth:`legs` does."""
        self._read(())
        return self._legs()

    def _legs(self) -> list[LegSummary]:
        """As :meth:`lineage`, by the columns that have been read."""
        folder, legs, clock = self.output_dir, self.legs(), self._series("global_step")
        return summarize_legs(folder, legs, read_tails(self._source.path), clock) if folder and legs else []

    def summary(self, *, brief: bool = False) -> Summary:
        """The run in about twenty numbers. One pass over the file; memory holds only the columns it summarizes.

        ``brief``: only what a list of runs shows: state, steps, losses, legs and times.
        """
        is_wanted = is_listed if brief else is_summarized
        self._read((), also=is_wanted)
        legs, kinds = self._legs(), self._columns.count_kinds()
        goal = None if legs or kinds.get("final") else self.header.get("max_steps")
        names = [name for name in self._columns.columns if is_wanted(name)]
        return summarize(
            run=self.name,
            program=self._source.program,
            kinds=kinds,
            goal=goal if isinstance(goal, int) else None,
            clock=self._series("global_step"),
            series={name: partial(self._curve, name) for name in names},
            legs=legs,
            skipped=self.skipped.count,
            brief=brief,
        )

    @check_types
    def parameters(self, metric: str) -> ParameterSeries:
        """``grad_norm``, ``norm`` or ``spectral_norm`` of each parameter, from this log itself or those beside it.

        Raises UnknownName for another metric; NotFound if there is no such log.
        """
        return read_parameters(self.source.path, self.name, metric, self.skipped)

    def tails(self) -> list[Tail]:
        """Records cut off the log when the run went back to a checkpoint; read from ``rewound/``."""
        return read_tails(self.source.path)

    def restarts(self) -> list[Restart]:
        """Every start of a new leg and every rollback within one, in the order of time."""
        return find_restarts(self.lineage())

    def interventions(self) -> list[Intervention]:
        """Settings that were changed between legs, and commands that took effect; empty without a ``run.json``."""
        return [] if self.output_dir is None else find_interventions(self.output_dir, self.legs())

    def plot(
        self,
        *metrics: str,
        x: XAxis = "step",
        smooth: int | None = None,
        log: bool = False,
        perplexity: bool = False,
        xlim: Limits | None = None,
        ylim: Limits | None = None,
        ignore_outliers: bool = False,
    ) -> Picture:
        """Plot metrics, one panel each; default: the loss. Needs ``dalsegno[analysis]``.

        The options are those of :class:`View`; the result displays itself in a notebook and has ``save(path)``. A
        directory of runs draws all its runs in the same panels. Raises UnknownName for a metric that is not logged;
        ConfigurationError if matplotlib is not installed, or for an invalid value.
        """
        from .plotting.plot import plot_logs

        ranges = {"xlim": xlim, "ylim": ylim}
        view = View(x=x, smooth=smooth, log=log, perplexity=perplexity, ignore_outliers=ignore_outliers, **ranges)
        return plot_logs(list(self), metrics, view, compare=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def _repr_html_(self) -> str:
        from .notebook import html_repr

        return html_repr(self)

    def _series(self, name: str, kind: str | None = None) -> Series:
        columns, here = self._columns.columns, self._columns.of_kind(name, kind).present
        epochs, times = (
            columns[other].at(here) if len(columns[other].values) else None for other in ("epoch", "timestamp")
        )
        return replace(self._curve(name, kind), epochs=epochs, times=times)

    def _curve(self, name: str, kind: str | None = None) -> Series:
        """A series without epochs and times."""
        here, steps = self._columns.of_kind(name, kind), self._columns.steps
        steps = steps if here.present is None else steps[here.present]
        return Series(name=name, run=self.name, steps=steps, values=here.values)

    def _read(self, names: Iterable[str], also: Callable[[str], bool] = lambda name: False) -> None:
        """Load the columns in ``names``, those for which ``also`` is true and the bookkeeping, unless up to date."""
        stamp = self.source.stamp()
        wanted = {*names, "global_step", "epoch", "timestamp"}
        if stamp == self._stamp:
            known = self._columns
            wanted.update(name for name in known.names if also(name))
            if wanted <= known.columns.keys():
                return
            wanted |= known.columns.keys()
        self.skipped = Skipped()
        self._columns = read_columns(self.source.blocks(self.skipped), wanted, also)
        self._stamp = stamp
