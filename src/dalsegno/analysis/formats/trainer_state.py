"""``trainer_state.json`` of Hugging Face's Trainer: its ``log_history``, also of a torn file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from dalsegno.logs.values import Record

from .json_array import decode_array
from .naming import HEADER, Naming
from .source import Skipped, Source, named

_HISTORY = re.compile(r'"log_history"\s*:\s*\[')
_NAMING = Naming("step", None, "epoch")


class TrainerState(Source):
    """The header contains the other fields of the state: ``max_steps``, ``train_batch_size`` …"""

    program = "Hugging Face"

    def records(self, skipped: Skipped) -> Iterator[Record]:
        text = self.path.read_text(encoding="utf-8-sig", errors="replace")
        if header := _header(text):
            yield {"kind": HEADER, **header}
        history = _HISTORY.search(text)
        if history is None:
            skipped.note("no log_history")
            return
        records = enumerate(decode_array(text, history.end(), skipped), start=1)
        yield from named(records, _NAMING, skipped, "record")


def _header(text: str) -> Record:
    """Scalar fields of the state; empty if the file is torn."""
    try:
        state = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    scalar = (bool, int, float, str)
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, scalar) and name not in ("global_step", "epoch")
    }
