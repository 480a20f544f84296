"""ResumableSummaryWriter, TBLogger: curves in TensorBoard, which continue after a resume without duplicates or gaps."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict
from weakref import WeakValueDictionary

from dalsegno.callbacks.argument_checks import Spec, folder, mapping, merge_specs
from dalsegno.callbacks.loggers.json_logger import warn_not_writing
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError
from dalsegno.events import Binder, Event, FlaglessCallback, contexts
from dalsegno.events.callback import refusal
from dalsegno.logs.event_files import EventPosition, lengths, make_durable, rewind_events
from dalsegno.state import Handler
from dalsegno.stateful.schema import check

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


logger = logging.getLogger("dalsegno")


class RewoundWriter(FlaglessCallback):
    """Base class of callbacks with methods of torch's ``SummaryWriter``."""

    is_bound = False
    """Whether it is among the callbacks of a run."""

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        self.is_bound = True
        return super().bound_handlers(binder)


def checked_writer(owner: str, summary_writer: Any, *needed: str) -> Any:
    """Return the writer that a callback is given, if it is None or has these methods of torch's ``SummaryWriter``."""
    missing = [] if summary_writer is None else [name for name in needed if not hasattr(summary_writer, name)]
    if missing:
        raise ConfigurationError(f"{owner}: summary_writer={summary_writer!r}; it has no {missing[0]}")
    return summary_writer


def check_rewound(owner: str, summary_writer: Any) -> None:
    """Refuse a :class:`RewoundWriter` that no run has among its callbacks: no resume would rewind it."""
    if isinstance(summary_writer, RewoundWriter) and not summary_writer.is_bound:
        raise ConfigurationError(
            f"{owner}: its summary_writer {summary_writer.key} is in no trainer's list of callbacks; "
            "callbacks=[writer, …]"
        )


class ResumableSummaryWriter(RewoundWriter):
    """A TensorBoard ``SummaryWriter`` whose curves continue exactly after a resume.

    It is a callback, too: pass it to the trainer, and write through it::

        writer = ResumableSummaryWriter()
        trainer = ds.Trainer(..., callbacks=[writer, PeakMemory(summary_writer=writer)])
        writer.add_scalar("my/number", 3.0, global_step=10)     # on rank 0; on other ranks nothing

    A resumed run moves events after the checkpoint, and only these, into ``rewound/``, and makes a running TensorBoard
    purge them. File names contain the writer's key, so several writers may share a directory. Before and after
    training, writes go to a separate file, which no checkpoint counts and no resume moves.

    Args:
        log_dir: relative to the ``output_dir`` of the writer's trainer, or absolute. A resumed run continues in the
            directory of its checkpoint, even if another one is given now; if that no longer exists, it begins in the
            given one, with a warning.
        name: the key of its state in checkpoints; None: the class's name.

    Raises:
        ConfigurationError: on a write before the writer is among a trainer's callbacks, if ``log_dir`` is relative.
    """

    _first_in: ClassVar[WeakValueDictionary[Path, ResumableSummaryWriter]] = WeakValueDictionary()
    """The writer of this leg that first opened a file in a directory."""

    state_schema = EventPosition
    state_compared = False  # the files' lengths, which only rank 0 knows

    def __init__(self, log_dir: str | Path = "logs/tensorboard", *, name: str | None = None) -> None:
        self.name = name
        self._log_dir = folder("ResumableSummaryWriter", "log_dir", log_dir)
        self._output_dir: Path | None = None  # once a trainer is built
        self._folder: Path | None = None  # while training runs, on rank 0
        self._writer: SummaryWriter | None = None
        self._outside: SummaryWriter | None = None  # before and after training
        self._saved = EventPosition(0, {})
        self._events = 0
        self._first_step: int | None = None  # first step of a resumed leg

    def on_init_end(self, ctx: contexts.Context) -> None:
        self._output_dir = ctx.args.directory

    def on_load(self, ctx: contexts.LoadContext) -> None:
        self._first_step = ctx.step + 1

    def on_rollback(self, ctx: contexts.RollbackContext) -> None:
        self._first_step = ctx.to_step + 1  # the files are opened with the next event

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        self._output_dir = ctx.args.directory
        if self._outside is not None:
            self._outside.close()
            self._outside = None
        if ctx.state.is_world_process_zero:
            self._log_dir = self._resumed_log_dir(ctx.args.directory)
            self._folder = ctx.args.directory / self._log_dir
            self._go_back()

    def _resumed_log_dir(self, output_dir: Path) -> Path:
        """Return the directory that the checkpoint's events are in, if it still exists; else the given one."""
        saved = None if self._saved.log_dir is None else Path(self._saved.log_dir)
        if saved is None or saved == self._log_dir:
            return self._log_dir
        if not any(self._saved.files.values()) or (output_dir / saved).is_dir():
            logger.info("%s: continues in %s, the directory of the checkpoint, not %s", self.key, saved, self._log_dir)
            return saved
        logger.warning(
            "%s: %s no longer exists; its events are lost, and new ones are in %s",
            *(self.key, output_dir / saved, output_dir / self._log_dir),
        )
        self._saved = EventPosition(self._saved.events, {}, str(self._log_dir))
        return self._log_dir

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        self._close()
        if self._folder is not None:
            self._first_in.pop(self._folder, None)
            self._saved = self._position(self._folder)
        self._folder, self._first_step = None, None

    def state_dict(self) -> dict[str, Any]:
        if self._folder is None:
            return self._saved.to_state()
        self.flush()
        return self._position(self._folder).to_state()

    def _position(self, folder: Path) -> EventPosition:
        return EventPosition(self._events, lengths(folder, self._mark), str(self._log_dir))

    def load_state_dict(self, state: Any) -> None:
        self._saved = check(state, EventPosition, "the saved state of a writer of event files")
        if self._folder is not None:
            self._go_back()

    def make_durable(self) -> None:
        """Fsync the files: their lengths in a checkpoint must be on disk before the checkpoint is published."""
        if self._folder is not None:
            make_durable(self._folder, self._mark)

    def flush(self) -> None:
        """Write buffered events to the operating system."""
        for writer in (self._writer, self._outside):
            if writer is not None:
                writer.flush()

    close = flush  # for programs that close their writer

    @property
    def _mark(self) -> str:
        """Suffix of this writer's file names."""
        return "." + re.sub(r"[^\w-]", "_", self.key)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return ``add_scalar``, ``add_text`` and any other ``add_…`` method of torch's SummaryWriter."""
        if not name.startswith("add_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return partial(self._add, name)

    def _add(self, name: str, /, *args: Any, **named: Any) -> None:
        if collectives.rank() != 0:
            return
        if self._folder is not None:
            getattr(self._opened(self._folder), name)(*args, **named)
            self._events += 1
        else:
            outside = self._opened_outside(name)
            getattr(outside, name)(*args, **named)
            outside.flush()  # the process may end without a further call

    def _opened_outside(self, name: str) -> SummaryWriter:
        if self._outside is None:
            from torch.utils.tensorboard import SummaryWriter

            if self._output_dir is None and not self._log_dir.is_absolute():
                raise ConfigurationError(
                    f"{self.key}.{name}(): {self._log_dir} is relative to the run's output_dir, which this writer gets "
                    "from the trainer that is built with it: callbacks=[writer, …]; or give an absolute log_dir"
                )
            directory = (self._output_dir or Path()) / self._log_dir
            self._outside = SummaryWriter(str(directory), filename_suffix=f"{self._mark}.outside")
        return self._outside

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _go_back(self) -> None:
        assert self._folder is not None
        self._close()
        rewind_events(self._folder, self._mark, self._saved.files)
        self._events = self._saved.events

    def _opened(self, folder: Path) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # The purge step is for a TensorBoard that has already read the tail, which is now in rewound/. It purges
            # the events of every writer from that step on: so the first writer sets it, before the others write.
            is_first = self._first_in.setdefault(folder, self) is self
            purge_step = self._first_step if is_first else None
            self._writer = SummaryWriter(str(folder), purge_step=purge_step, filename_suffix=self._mark)
        return self._writer


Transform = Callable[[float, Mapping[str, Any]], float | None]
"""``transform(value, metrics)``: the point to draw for a value of a record; None: no point."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """Source of a curve's values: a name in the records, and a transformation."""

    source: str
    transform: Transform | None = None


def perplexity(loss: float, metrics: Mapping[str, Any]) -> float:
    """Return exp(loss); infinity where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def default_tb_scalars() -> dict[str, Spec]:
    """Return the curves that :class:`TBLogger` writes by default, by tag, in the form of its argument ``scalars``."""
    return {
        "train-loss": {"source": "loss"},
        "learning-rate": {},
        "grad-norm": {},
        "eval-loss": {},
        "eval-perplexity": {"source": "eval_loss", "transform": perplexity},
    }


class TBLoggerState(TypedDict):
    described: bool
    writer: EventPosition | None


class TBLogger(FlaglessCallback):
    """Logs selected values of each record to TensorBoard, and once texts that describe the run.

    With several evaluation sets, a curve of ``eval_...`` is written for each set, as ``<tag>/<set>``.

    Args:
        summary_writer: a :class:`ResumableSummaryWriter` that is also among the trainer's callbacks, or any object with
            torch's ``add_scalar`` and ``add_text``; None: create one for ``logs/tensorboard``.
        scalars: curves by tag, merged over those of :func:`default_tb_scalars`: ``{"source": name in the records,
            "transform": function}``, or None to remove a default one. Without ``source``, the name is the tag with
            ``_`` for ``-``. ``transform(value, metrics)`` gets the value and the whole record, and returns the point to
            draw; None: no point. Short for a source alone: its name.
        experiment_info: a text in Markdown, or a mapping of titles to such texts or to JSON values; written once per
            run.
        name: the key of its state in checkpoints; None: the class's name.
    """

    ranks = "zero"
    state_compared = False
    state_schema = TBLoggerState

    def __init__(
        self,
        summary_writer: Any = None,
        scalars: Mapping[str, Mapping[str, Any] | str | None] | None = None,
        experiment_info: str | Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self.name = name
        self._own = ResumableSummaryWriter(name=name or "TBLogger") if summary_writer is None else None
        self._writer = self._own or checked_writer("TBLogger", summary_writer, "add_scalar", "add_text")
        given = mapping("TBLogger", "scalars", {} if scalars is None else scalars)
        specs = merge_specs(default_tb_scalars(), given, "source")
        self._scalars = {tag: _scalar(tag, spec) for tag, spec in specs.items()}
        info: Any = {} if experiment_info is None else experiment_info
        self._texts = {"experiment": info} if isinstance(info, str) else mapping("TBLogger", "experiment_info", info)
        self._has_described = False
        self._is_training = False

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        own = [] if self._own is None else self._own.bound_handlers(binder)
        return [*own, *super().bound_handlers(binder)]

    @staticmethod
    def mapping_as_markdown(mapping: Any) -> str:
        """Return a mapping, or any other JSON value, as a block of JSON in Markdown; a string unchanged."""
        return mapping if isinstance(mapping, str) else f"```json\n{json.dumps(mapping, indent=2, default=str)}\n```"

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        self._is_training = True
        check_rewound("TBLogger", self._writer)

    def on_log(self, ctx: contexts.LogContext) -> None:
        if not self._is_training:
            warn_not_writing(self)
            return
        if not self._has_described:  # not earlier: a kill before the first record would lose the texts
            self._has_described = True
            for title, text in self._texts.items():
                self._writer.add_text(title, self.mapping_as_markdown(text), 0)
        sets = ctx.eval_dataloader if isinstance(ctx.eval_dataloader, Mapping) else {}
        for tag, scalar in _of_each_set(self._scalars, sets):
            value = ctx.logs.get(scalar.source)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                point = float(value) if scalar.transform is None else scalar.transform(float(value), ctx.logs)
                if point is not None:
                    self._writer.add_scalar(tag, point, ctx.state.global_step)

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        self._is_training = False

    def state_dict(self) -> dict[str, Any]:
        return {"described": self._has_described, "writer": None if self._own is None else self._own.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self._has_described = state["described"]
        if self._own is not None and state["writer"] is not None:  # else it wrote through a writer that was passed in
            self._own.load_state_dict(state["writer"])

    def make_durable(self) -> None:
        if self._own is not None:
            self._own.make_durable()


def _of_each_set(scalars: Mapping[str, Scalar], sets: Iterable[str]) -> Iterator[tuple[str, Scalar]]:
    """Yield the curves; with several evaluation sets, also ``<tag>/<set>`` for each curve of ``eval_...``."""
    for tag, scalar in scalars.items():
        yield tag, scalar
        if scalar.source.startswith("eval_"):
            for name in sets:
                yield f"{tag}/{name}", Scalar(f"eval_{name}_{scalar.source.removeprefix('eval_')}", scalar.transform)


def _scalar(tag: str, spec: Spec) -> Scalar:
    source, transform = spec.get("source"), spec.get("transform")
    if source is None or source == "":
        source = tag.replace("-", "_")
    if not spec.keys() <= {"source", "transform"}:
        raise ConfigurationError(
            f"TBLogger: scalars[{tag!r}]={spec!r}; needs a name in the records, a mapping that may have 'source' and "
            "'transform', or None"
        )
    if not isinstance(source, str):
        raise ConfigurationError(
            f"TBLogger: scalars[{tag!r}]: source={source!r}; needs a name in the records, or None to remove the curve"
        )
    if transform is not None and refusal(transform, 0.0, {}) is not None:
        raise ConfigurationError(
            f"TBLogger: scalars[{tag!r}]: transform={transform!r}; needs a function (value, metrics), where metrics is "
            "the whole record"
        )
    return Scalar(source, transform)
