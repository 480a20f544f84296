"""JsonLogger, and RecordCallback: the base class of all callbacks that write a log file."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

from dalsegno.callbacks.argument_checks import folder
from dalsegno.errors import ConfigurationError
from dalsegno.events import Callback, FlaglessCallback, contexts
from dalsegno.logs import RecordLog, RunFile
from dalsegno.logs.rewind import Position

logger = logging.getLogger("dalsegno")


_has_warned: WeakSet[Callback] = WeakSet()


def warn_not_writing(callback: Callback) -> None:
    """Warn, once for each callback, that it writes nothing now."""
    if callback not in _has_warned:
        _has_warned.add(callback)
        logger.warning("%s writes while training runs; what is logged before or after is not kept", callback.key)


class RecordCallback(FlaglessCallback):
    """Writes records into a log on rank 0; a resume cuts the log back to its length at the checkpoint.

    The file is open from on_train_begin to on_train_end. A second ``train()`` appends, after what a checkpoint of the
    first contains: its final record is cut off. A record that cannot be written
    (say, the disk is full) does not end the run: its loss is logged, and the next record is tried.
    """

    state_compared = False  # the file's offset, which only rank 0 knows
    state_schema: Any = Position | None

    def __init__(self, default_path: str, path: str | Path | None = None, name: str | None = None) -> None:
        """``path`` is relative to ``output_dir``; its suffix chooses the format: see :class:`RecordLog`."""
        self.name = name
        self._path = default_path if path is None else folder(type(self).__name__, "path", path)
        self._log: RecordLog | None = None
        self._position: Any = None
        """RecordLog state from which the log continues when it is opened; None: from the beginning. While the log is
        open: that before the final record, once this is written."""
        self._lost: list[int] = []  # steps of the records lost since the last one that was written

    @property
    def writing(self) -> bool:
        """Whether :meth:`write` reaches a file: on rank 0, while training runs."""
        return self._log is not None

    @property
    def log_path(self) -> Path | None:
        """The file that is written; None while none is."""
        return None if (log := self._log) is None else log.path

    def write(self, ctx: contexts.Context, values: Mapping[str, Any]) -> None:
        """Append one record: timestamp, step and epoch, then ``values``."""
        if self._log is not None:
            now = {"timestamp": time.time(), "global_step": ctx.state.global_step, "epoch": ctx.state.epoch}
            try:
                self._log.append({**now, **values})
            except OSError as error:
                step = ctx.state.global_step
                if not self._lost:
                    logger.error(
                        "%s: the record of step %d is lost (%s); training continues", self._log.path, step, error
                    )
                self._lost.append(step)
            else:
                self._log_loss(self._log, ctx, "is written again")

    def header(self) -> Mapping[str, Any] | None:
        """Return the first record of the file; None for no such record."""
        return None

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        if not ctx.state.is_world_process_zero:
            return
        log = RecordLog(self._path, ctx.args.directory, self.header)
        RunFile.lost[ctx.args.directory] += log.open(self._position).missing_records
        self._log, self._position = log, None

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        if self._log is not None:
            self._log_loss(self._log, ctx, "ends incomplete")
            self._position = self._position or self._log.state()
            self._log.make_durable()
            self._log.close()
            self._log = None

    def state_dict(self) -> Any:
        return self._position if self._log is None else self._log.state()

    def make_durable(self) -> None:
        """Fsync the file: the length in a checkpoint must be on disk before the checkpoint is published."""
        if (log := self._log) is not None:  # on the thread of the save
            log.make_durable()

    def load_state_dict(self, state: Any) -> None:
        """Cut the log back at once if it is open (rollback), else when it is opened."""
        if self._log is None:
            self._position = state
        else:
            self._log.make_durable()
            self._log.open(state)

    def _log_loss(self, log: RecordLog, ctx: contexts.Context, state: str) -> None:
        if self._lost:
            count, first, last = len(self._lost), self._lost[0], self._lost[-1]
            logger.warning("%s %s: %d records are lost, of steps %d to %d", log.path, state, count, first, last)
            RunFile.lost[ctx.args.directory] += count
            self._lost.clear()


RESERVED = ("timestamp", "kind", "global_step", "epoch")


class JsonLogger(RecordCallback):
    """Logs training, evaluations and the run's end as JSON lines, which ``dalsegno logs`` reads.

    Each record has ``timestamp`` (UTC seconds), ``global_step``, ``epoch`` and the metrics; those not of training also
    ``kind``: ``eval``, ``final``, ``user`` (``trainer.log()``) or ``save`` (the same inside ``on_save``). The first
    record has ``kind`` ``header`` and the keyword arguments: ``JsonLogger(run="baseline", lr=3e-4)``. A resumed run
    cuts the file back to its checkpoint; later records are moved to ``logs/rewound/``. Two loggers in one run need
    different names and paths.

    Args:
        path: relative to ``output_dir``; None: ``logs/train.jsonl``. With the suffix ``.json`` the file is a JSON array
            that is valid after every record, with ``.jsonl`` it has one record per line.
        name: the key of its state in checkpoints; None: the class's name.
        header: further entries of the first record, as JSON values; not those of every record.
    """

    ranks = "zero"

    def __init__(self, *, path: str | Path | None = None, name: str | None = None, **header: Any) -> None:
        super().__init__("logs/train.jsonl", path, name)
        taken = [key for key in RESERVED if key in header]
        if taken:
            raise ConfigurationError(f"JsonLogger: {taken[0]}= is part of every record; use another key")
        self._header = header

    def header(self) -> Mapping[str, Any]:
        return {"timestamp": time.time(), "kind": "header", **self._header}

    def on_log(self, ctx: contexts.LogContext) -> None:
        if self._log is not None:
            if ctx.kind == "final":
                self._position = self._log.state()
            kind = {} if ctx.kind == "train" else {"kind": ctx.kind}
            weights = {"evaluated_weights": ctx.evaluated_weights} if ctx.evaluated_weights else {}
            self.write(ctx, {**kind, **weights, **ctx.logs})
        else:
            warn_not_writing(self)
