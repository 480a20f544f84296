"""ResumableSummaryWriter: TensorBoard's writer, with curves that go on after a resume as if nothing had happened."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError
from dalsegno.events.callback import Binder, Callback
from dalsegno.events.contexts import LoadContext, TrainBeginContext, TrainEndContext
from dalsegno.events.table import Event
from dalsegno.logs.event_files import EventPosition, EventState, lengths, make_durable, rewind_events
from dalsegno.state import Handler

from .argument_checks import folder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger("dalsegno")


class ResumableSummaryWriter(Callback):
    """A callback and a ``SummaryWriter`` in one: give it to the trainer, and use it as the writer that it is::

        writer = ResumableSummaryWriter()
        trainer = ds.Trainer(..., callbacks=[writer, PeakMemory(summary_writer=writer)])
        writer.add_scalar("my/number", 3.0, global_step=10)     # while training runs; on rank 0, elsewhere nothing

    A file is opened when the first thing is written; the run closes it. What is written is on the disk before the
    checkpoint that knows of it is one. A resumed run goes on in the same folder: what came after the checkpoint, and
    only that, is moved into ``rewound/`` beside it, and a TensorBoard that is looking on is told to forget it. Files
    bear the writer's key, so several may share a folder.

    Args:
        log_dir: relative to ``output_dir``, or absolute.
        name: the key of its state in checkpoints; the class's name if None.

    What is written before or after the training is not kept, and the first time that is said: no checkpoint would know
    of it.

    Raises:
        ConfigurationError: when something is written, and the writer is in no trainer's list of callbacks.
    """

    _first_in: ClassVar[WeakValueDictionary[Path, ResumableSummaryWriter]] = WeakValueDictionary()
    """Who of this leg's writers was the first to open a file in a folder."""

    makes_wishes = False
    state_schema = EventState
    state_compared = False  # the files' lengths, which only rank 0 knows

    def __init__(self, log_dir: str | Path = "logs/tensorboard", *, name: str | None = None) -> None:
        self.name = name
        self._log_dir = folder("ResumableSummaryWriter", "log_dir", log_dir)
        self._folder: Path | None = None  # while training runs, on rank 0
        self._is_bound = False  # to the events of a run, that tell when training begins
        self._said_not_writing = False
        self._writer: SummaryWriter | None = None
        self._saved = EventPosition(0, {})
        self._events = 0
        self._first_step: int | None = None  # the first that a resumed leg writes

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        self._is_bound = True
        return super().bound_handlers(binder)

    def on_load(self, ctx: LoadContext) -> None:
        self._first_step = ctx.step + 1

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        if ctx.state.is_world_process_zero:
            self._folder = ctx.args.directory / self._log_dir
            self._go_back()

    def on_train_end(self, ctx: TrainEndContext) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._folder is not None:
            self._first_in.pop(self._folder, None)
            self._saved = EventPosition(self._events, lengths(self._folder, self._mark))
        self._folder, self._first_step = None, None

    def state_dict(self) -> EventState:
        if self._folder is None:
            return self._saved.to_state()
        self.flush()
        return EventPosition(self._events, lengths(self._folder, self._mark)).to_state()

    def load_state_dict(self, state: Any) -> None:
        """Go back to there at once if training runs (a rollback), else when it begins."""
        self._saved = EventPosition.from_state(state)
        if self._folder is not None:
            self._go_back()

    def make_durable(self) -> None:
        """Force what is written to the disk: before a checkpoint that knows of it becomes one."""
        if self._folder is not None:
            make_durable(self._folder, self._mark)

    def flush(self) -> None:
        """Hand what is written to the operating system."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """For programs that close whatever they have written to: the same as :meth:`flush`."""
        self.flush()

    @property
    def _mark(self) -> str:
        """What the names of this writer's files end with."""
        return "." + re.sub(r"[^\w-]", "_", self.key)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """``add_scalar``, ``add_text`` and all else that torch's SummaryWriter can add."""
        if not name.startswith("add_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return partial(self._add, name)

    def _add(self, name: str, /, *args: Any, **named: Any) -> None:
        if collectives.rank() != 0:
            return
        if self._folder is not None:
            getattr(self._opened(self._folder), name)(*args, **named)
            self._events += 1
        elif not self._is_bound:
            raise ConfigurationError(
                f"{self.key}.{name}(): this writer is in no trainer's list of callbacks; callbacks=[writer, …]"
            )
        elif not self._said_not_writing:
            self._said_not_writing = True
            logger.warning("%s writes while training runs; what is written before or after is not kept", self.key)

    def _go_back(self) -> None:
        assert self._folder is not None
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        rewind_events(self._folder, self._mark, self._saved.files)
        self._events = self._saved.events

    def _opened(self, folder: Path) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # The purge step is for a TensorBoard that has read the tail already, which by now is in rewound/. It
            # forgets what every writer has written from there on: so the first says it, before the others write.
            is_first = self._first_in.setdefault(folder, self) is self
            purge_step = self._first_step if is_first else None
            self._writer = SummaryWriter(str(folder), purge_step=purge_step, filename_suffix=self._mark)
        return self._writer
