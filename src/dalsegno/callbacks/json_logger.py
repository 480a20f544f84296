"""JsonLogger: writes everything that is logged as JSON records."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dalsegno.errors import ConfigurationError
from dalsegno.events.contexts import LogContext

from .argument_checks import folder
from .record_callback import RecordCallback

logger = logging.getLogger("dalsegno")

RESERVED = ("timestamp", "kind", "global_step", "epoch")


class JsonLogger(RecordCallback):
    """Logs training, evaluations and the run's end as JSON lines, which ``dalsegno logs`` reads.

    Writes one record at each on_log: ``timestamp`` (UTC seconds), ``global_step``, ``epoch``, the metrics.

    Training records have no ``kind``; other records have ``eval``, ``final`` or ``user``. The record of an evaluation
    of averaged weights has ``evaluated_weights``, the key of the callback that averages. The first record of a run has
    ``kind`` ``header`` and contains the keyword arguments::

        JsonLogger(run="baseline", lr=3e-4)

    A resumed run cuts the file back to its checkpoint; later records are moved to ``logs/rewound/``. Two loggers in one
    run need different names and paths.

    Args:
        path: relative to ``output_dir``; None: ``logs/train.jsonl``. With the suffix ``.json`` the file is a JSON array
            that is valid after every record, with ``.jsonl`` it has one record per line.
        name: the key of its state in checkpoints; None: the class's name.
        header: further entries of the first record, as JSON values.

    Raises:
        ConfigurationError: for a header key that is part of every record.
    """

    ranks = "zero"

    def __init__(self, *, path: str | Path | None = None, name: str | None = None, **header: Any) -> None:
        super().__init__("logs/train.jsonl" if path is None else folder("JsonLogger", "path", path))
        self.name = name
        taken = [key for key in RESERVED if key in header]
        if taken:
            raise ConfigurationError(f"JsonLogger: {taken[0]}= is part of every record; use another key")
        self._header = header
        self._warned_not_writing = False

    def header(self) -> Mapping[str, Any]:
        return {"kind": "header", **self._header}

    def on_log(self, ctx: LogContext) -> None:
        if self.writing:
            kind = {} if ctx.kind == "train" else {"kind": ctx.kind}
            weights = {"evaluated_weights": ctx.evaluated_weights} if ctx.evaluated_weights else {}
            self.write(ctx, {**kind, **weights, **ctx.logs})
        elif not self._warned_not_writing:
            self._warned_not_writing = True
            logger.warning("%s writes while training runs; what is logged before or after is not kept", self.key)
