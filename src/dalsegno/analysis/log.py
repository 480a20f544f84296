"""TrainingLog: what one run has logged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dalsegno.errors import UnknownName
from dalsegno.logs import Leg, RunFile
from dalsegno.logs.values import Record

from .blocks import KINDS, concatenate
from .columns import read_columns
from .extras import require_extra
from .formats import BOOKKEEPING, HEADER, Skipped, Source
from .formats.naming import loss_of
from .lineage import LegSummary, summarize_legs
from .log_location import LogLocation
from .parameters import read_parameters
from .plotting.view import Limits, View, XAxis
from .rewound import Restart, Tail, find_restarts, read_tails
from .series import ParameterSeries, Series
from .summary import Summary, is_told, summarize

if TYPE_CHECKING:
    import polars as pl

    from .plotting.figure import Picture


class TrainingLog:
    """The log of one run. Nothing is read before it is asked for. What has been read is kept until the file changes: a
    log that is being written can be asked again, also after it had to go on in another file of the run's folder.

    ::

        log = ds.open_log("runs/a")
        log.metric("loss").values    # an array
        log.frame()                  # a Polars frame

    It comes from :func:`dalsegno.open_log`. ``path`` is the run's folder, or the file that was opened.
    """

    def __init__(self, name: str, path: Path, source: Source) -> None:
        self.name = name
        self.path = path
        self._place = LogLocation(path, source)
        self.skipped = Skipped()
        """What the last reading has left out."""
        self._columns = read_columns((), (), lambda name: False)
        self._stamp: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[TrainingLog]:
        """Itself: as a folder of runs gives its runs."""
        yield self

    def __len__(self) -> int:
        return 1

    @property
    def source(self) -> Source:
        """The file, or files, in which the log lies now."""
        return self._place.source()

    @property
    def output_dir(self) -> Path | None:
        """The run's folder, where there is one with a ``run.json``."""
        path = self.path.resolve()
        folders = [path, path.parent, path.parent.parent]
        return next((folder for folder in folders if (folder / "run.json").is_file()), None)

    @property
    def header(self) -> Record:
        """What the first record says of the run; empty if the log has no header."""
        for record in self.source.records(Skipped()):
            if record["kind"] == HEADER:
                return {name: value for name, value in record.items() if name not in BOOKKEEPING}
            break
        return {}

    def records(self, kind: str | None = None) -> Iterator[Record]:
        """The records of one kind (``train``, ``eval``, ``final``, ``user``), or all; never the header.

        They are read one by one, and have ``global_step`` and ``kind``, and ``timestamp`` and ``epoch`` where the
        log knows them, whatever their own program calls these.
        """
        self.skipped = Skipped()
        for record in self.source.records(self.skipped):
            if record["kind"] != HEADER and kind in (None, record["kind"]):
                yield record

    def metrics(self) -> list[str]:
        """The names of all numbers that are logged, in the order of their first appearance."""
        self._read([])
        return [name for name in self._columns.names if name not in BOOKKEEPING]

    def metric(self, name: str, kind: str | None = None) -> Series:
        """One metric, in the records of one kind or in all.

        Raises:
            UnknownName: if no record has it; names the nearest.
        """
        return self.series([name], kind)[name]

    def series(self, names: Iterable[str], kind: str | None = None) -> dict[str, Series]:
        """As :meth:`metric`, for several of them in one reading."""
        names = list(names)
        if kind is not None and kind not in KINDS:
            raise UnknownName("kind of record", kind, KINDS)
        self._read(names)
        for name in names:
            if name not in (*self._columns.names, *BOOKKEEPING):
                raise UnknownName(f"metric of {self.name}", name, self.metrics())
        return {name: self._series(name, kind) for name in names}

    @property
    def loss(self) -> str | None:
        """The name of the loss; None if there is none that looks like it."""
        return loss_of(self.metrics())

    def frame(self) -> pl.DataFrame:
        """Everything, a row a record, a column a name.

        Raises:
            ConfigurationError: if Polars is not installed, which comes with ``dalsegno[analysis]``.
        """
        require_extra("polars", "frames are made")
        self.skipped = Skipped()
        frame = concatenate([block.frame() for block in self.source.blocks(self.skipped)])
        empty = [name for name in frame.columns if len(frame) and frame[name].null_count() == len(frame)]
        return frame.drop(name for name in empty if name not in BOOKKEEPING)

    def legs(self) -> list[Leg]:
        """The process lives of the run, where it has a ``run.json``."""
        run = RunFile(self.output_dir).load() if self.output_dir else None
        return run.legs if run else []

    def lineage(self) -> list[LegSummary]:
        """The legs, with what became of what each has done; none where the run has no ``run.json``.

        Raises:
            StateMismatch: if that file is damaged, or of a newer format.
        """
        if self.output_dir is None:
            return []
        clock = self.metric("global_step")
        times = np.full(len(clock), np.nan) if clock.times is None else clock.times
        return summarize_legs(self.output_dir, self.tails(), times, clock.steps)

    def summary(self) -> Summary:
        """The run in some twenty numbers. Takes one reading, and the memory of the columns that it is about."""
        self._read((), also=is_told)
        kinds, legs = self._columns.count_kinds(), self.lineage()
        goal = None if legs or kinds.get("final") else self.header.get("max_steps")
        told = [name for name in self._columns.columns if is_told(name)]
        return summarize(
            run=self.name,
            program=self.source.program,
            kinds=kinds,
            goal=goal if isinstance(goal, int) else None,
            clock=self._series("global_step"),
            series=_Asked(told, self._curve),
            legs=legs,
            skipped=self.skipped.count,
        )

    def parameters(self, metric: str) -> ParameterSeries:
        """``grad_norm``, ``norm`` or ``spectral_norm`` of each parameter, from the logs that lie beside this one.

        Raises:
            UnknownName: for another metric.
            NotFound: if there is no such log.
        """
        return read_parameters(self.source.path.parent, self.name, metric, self.skipped)

    def tails(self) -> list[Tail]:
        """What the run logged in vain: cut off when it went back to a checkpoint, and kept in ``rewound/``."""
        return read_tails(self.source.path)

    def restarts(self) -> list[Restart]:
        """Where the run went on in a new leg, or rolled back within one, in the order of time."""
        return find_restarts(self.legs(), self.tails())

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
        """Draw metrics, below each other; without any, the loss. Needs ``dalsegno[analysis]``.

        The arguments are those of :class:`View`; the result shows itself in a notebook, and has ``save(path)``.
        A folder of runs draws all of them over each other.

        Raises:
            UnknownName: for a metric that is not logged.
            ConfigurationError: if matplotlib is not installed, or for a value that cannot work.
        """
        from .plotting.plot import plot_logs

        view = View(
            x=x,
            smooth=smooth,
            log=log,
            perplexity=perplexity,
            xlim=xlim,
            ylim=ylim,
            ignore_outliers=ignore_outliers,
        )
        return plot_logs(list(self), metrics, view, compare=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def _repr_html_(self) -> str:
        from .html_repr import html_repr

        return html_repr(self)

    def _series(self, name: str, kind: str | None = None) -> Series:
        columns, here = self._columns.columns, self._columns.of_kind(name, kind).present
        epochs, times = (
            columns[other].at(here) if len(columns[other].values) else None for other in ("epoch", "timestamp")
        )
        return replace(self._curve(name, kind), epochs=epochs, times=times)

    def _curve(self, name: str, kind: str | None = None) -> Series:
        """Without epochs and times."""
        here, steps = self._columns.of_kind(name, kind), self._columns.steps
        steps = steps if here.present is None else steps[here.present]
        return Series(name=name, run=self.name, steps=steps, values=here.values)

    def _read(self, names: Iterable[str], also: Callable[[str], bool] = lambda name: False) -> None:
        """Have these columns, all others that ``also`` is true of, and the bookkeeping, as they are in the file now."""
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


class _Asked(Mapping[str, Series]):
    """Series that are made when they are asked for, and not kept."""

    def __init__(self, names: Sequence[str], make: Callable[[str], Series]) -> None:
        self._names = names
        self._make = make

    def __getitem__(self, name: str) -> Series:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names
