"""ResumableSummaryWriter: a TensorBoard writer whose curves continue after a resume without duplicates or gaps."""

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
    """A callback that is also a ``SummaryWriter``: pass it to the trainer, and write through it::

        writer = ResumableSummaryWriter()
        trainer = ds.Trainer(..., callbacks=[writer, PeakMemory(summary_writer=writer)])
        writer.add_scalar("my/number", 3.0, global_step=10)     # while training runs; on rank 0, elsewhere nothing

    The first write opens a file; the end of training closes it. Events are on disk before a checkpoint that counts them
    is published. A resumed run continues in the same directory: events after the checkpoint, and only these, are moved
    into ``rewound/`` beside it, and a running TensorBoard is made to purge them. File names contain the writer's key,
    so several writers may share a directory.

    Args:
        log_dir: relative to ``output_dir``, or absolute. A resumed run writes to the one that is given now: if it is
            another than the checkpoint's, the curves until the checkpoint stay where they are.
        name: the key of its state in checkpoints; None: the class's name.

    Writes before or after training are dropped, since no checkpoint could count them; the first one logs a warning.

    Raises:
        ConfigurationError: on a write, if the writer is not in a trainer's list of callbacks.
    """

    _first_in: ClassVar[WeakValueDictionary[Path, ResumableSummaryWriter]] = WeakValueDictionary()
    """The writer of this leg that first opened a file in a directory."""

    sets_control_flags = False
    state_schema = EventState
    state_compared = False  # the files' lengths, which only rank 0 knows

    def __init__(self, log_dir: str | Path = "logs/tensorboard", *, name: str | None = None) -> None:
        self.name = name
        self._log_dir = folder("ResumableSummaryWriter", "log_dir", log_dir)
        self._folder: Path | None = None  # while training runs, on rank 0
        self._is_bound = False  # to the events of a run
        self._warned_not_writing = False
        self._writer: SummaryWriter | None = None
        self._saved = EventPosition(0, {})
        self._events = 0
        self._first_step: int | None = None  # first step of a resumed leg

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        self._is_bound = True
        return super().bound_handlers(binder)

    def on_load(self, ctx: LoadContext) -> None:
        self._first_step = ctx.step + 1

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        if ctx.state.is_world_process_zero:
            self._folder = ctx.args.directory / self._log_dir
            if self._saved.log_dir is not None and Path(self._saved.log_dir) != Path(self._log_dir):
                self._leave(ctx.args.directory / self._saved.log_dir)
            self._go_back()

    def on_train_end(self, ctx: TrainEndContext) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._folder is not None:
            self._first_in.pop(self._folder, None)
            self._saved = self._position(self._folder)
        self._folder, self._first_step = None, None

    def state_dict(self) -> EventState:
        if self._folder is None:
            return self._saved.to_state()
        self.flush()
        return self._position(self._folder).to_state()

    def _position(self, folder: Path) -> EventPosition:
        return EventPosition(self._events, lengths(folder, self._mark), str(self._log_dir))

    def load_state_dict(self, state: Any) -> None:
        """Rewind the files at once during training (rollback), else when training begins."""
        self._saved = EventPosition.from_state(state)
        if self._folder is not None:
            self._go_back()

    def make_durable(self) -> None:
        """Fsync the files: their lengths in a checkpoint must be on disk before the checkpoint is published."""
        if self._folder is not None:
            make_durable(self._folder, self._mark)

    def flush(self) -> None:
        """Write buffered events to the operating system."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Same as :meth:`flush`; for programs that close their writer."""
        self.flush()

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
        elif not self._is_bound:
            raise ConfigurationError(
                f"{self.key}.{name}(): this writer is in no trainer's list of callbacks; callbacks=[writer, …]"
            )
        elif not self._warned_not_writing:
            self._warned_not_writing = True
            logger.warning("%s writes while training runs; what is written before or after is not kept", self.key)

    def _leave(self, folder: Path) -> None:
        """Rewind the checkpoint's directory, and begin in another one."""
        rewind_events(folder, self._mark, self._saved.files)
        logger.info("%s: curves until the checkpoint stay in %s; new ones are in %s", self.key, folder, self._folder)
        self._saved = EventPosition(self._saved.events, {}, str(self._log_dir))

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

            # The purge step is for a TensorBoard that has already read the tail, which is now in rewound/. It purges
            # the events of every writer from that step on: so the first writer sets it, before the others write.
            is_first = self._first_in.setdefault(folder, self) is self
            purge_step = self._first_step if is_first else None
            self._writer = SummaryWriter(str(folder), purge_step=purge_step, filename_suffix=self._mark)
        return self._writer
