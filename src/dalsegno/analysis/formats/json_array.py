"""JSON texts that are held in memory while they are read: arrays of any layout, and Hugging Face's trainer_state.json.

An array may lack its end, or end within a record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from dalsegno.errors import ConfigurationError
from dalsegno.logs.values import Record, from_json

from .source import FIRST, HEADER, Naming, Skipped, Source, named, no_step

_BETWEEN = re.compile(r"[\s,]*")
_DECODER = json.JSONDecoder()


class JsonArray(Source):
    """Arguments and errors as for :class:`JsonLines`."""

    program = "JSON array"

    def records(self, skipped: Skipped) -> Iterator[Record]:
        text = self.path.read_text(encoding="utf-8", errors="replace")
        naming: Naming | None = None
        for number, record in enumerate(decode_array(text, text.find("[") + 1, skipped), start=1):
            naming = naming or Naming.of(record, self.step_key)
            if naming is None:
                if number == FIRST:
                    raise ConfigurationError(no_step(self.path, record, self.step_key))
            elif renamed := naming.apply(record):
                yield renamed
                continue
            skipped.note(f"record {number}: no step")


def decode_array(text: str, begin: int, skipped: Skipped) -> Iterator[Record]:
    """The records of the array whose bracket precedes ``begin``, up to its end or to the first invalid record."""
    number = 0
    while (begin := _skip(text, begin)) < len(text) and text[begin] != "]":
        number += 1
        try:
            value, begin = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            skipped.note(f"record {number}, at character {begin + 1}: {error}; the rest is not read")
            return
        if isinstance(value, dict):
            yield from_json(value)
        else:
            skipped.note(f"record {number}: a {type(value).__name__}, not an object")


def _skip(text: str, begin: int) -> int:
    between = _BETWEEN.match(text, begin)
    return between.end() if between else begin


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
