"""JsonLogger: everything that is logged, one JSON record after the other."""

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
    """Writes one record for each on_log: ``timestamp`` (UTC seconds), ``global_step``, ``epoch``, the metrics.

    Records of training have no ``kind``; the others do: ``eval``, ``final``, ``user``. An evaluation of averages in
    the weights' place has ``evaluated_weights``, the key of the callback whose averages they are. The first record of
    a run has ``kind`` ``header`` and holds what was given as keyword arguments::

        JsonLogger(run="baseline", lr=3e-4)

    A resumed run cuts the file back to its checkpoint; what came later is kept in ``logs/rewound/``. Two of them in
    one run need different names and paths.

    Args:
        path: relative to ``output_dir``; ``logs/train.jsonl`` if None. With the suffix ``.json`` the file is a JSON
            array that is valid after every record, with ``.jsonl`` it has a record a line.
        name: the key of its state in checkpoints; the class's name if None.
        header: what the first record says of this run; anything that JSON can hold.

    Raises:
        ConfigurationError: for a header key that every record has.
    """

    ranks = "zero"

    def __init__(self, *, path: str | Path | None = None, name: str | None = None, **header: Any) -> None:
        super().__init__("logs/train.jsonl" if path is None else folder("JsonLogger", "path", path))
        self.name = name
        taken = [key for key in RESERVED if key in header]
        if taken:
            raise ConfigurationError(f"JsonLogger: {taken[0]}= is part of every record; use another key")
        self._header = header
        self._said_not_writing = False

    def header(self) -> Mapping[str, Any]:
        return {"kind": "header", **self._header}

    def on_log(self, ctx: LogContext) -> None:
        if self.writing:
            kind = {} if ctx.kind == "train" else {"kind": ctx.kind}
            weights = {"evaluated_weights": ctx.evaluated_weights} if ctx.evaluated_weights else {}
            self.write(ctx, {**kind, **weights, **ctx.logs})
        elif not self._said_not_writing:
            self._said_not_writing = True
            logger.warning("%s writes while training runs; what is logged before or after is not kept", self.key)
