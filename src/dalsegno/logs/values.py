"""Values of a record, and their JSON encoding; which of them depend on the wall clock.

JSON has no NaN or infinity: such floats are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, and
read back as floats. A string of exactly that spelling is therefore read as a float.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from dalsegno.errors import CannotSave

Record = dict[str, Any]
"""One line of a log: names to numbers, strings, booleans, None, and lists and dicts of these."""

_ENCODER = json.JSONEncoder(allow_nan=False)
_DECODER = json.JSONDecoder()
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(record: Mapping[str, Any]) -> bytes:
    """Encode ``record`` as one line of JSON, without the newline. Raises CannotSave if JSON cannot represent a value;
    names the key.
    """
    return _ENCODER.encode(to_json(record)).encode()


def decode(line: bytes) -> Any:
    """Decode the output of :func:`encode`, non-finite floats included. Raises ValueError if it is not JSON."""
    try:
        text = line.decode().strip(" \t\n\r")
        value, end = _DECODER.raw_decode(text)  # a quarter faster than json.loads, which looks for white space again
        if end < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
        return from_json(value) if b"NaN" in line or b"Infinity" in line else value
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def step_of(value: object) -> int | None:
    """Return ``value`` if it can be a step; a record contains what callbacks put into it."""
    return value if type(value) is int and value >= 0 else None


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def to_json(value: Any, where: str = "") -> Any:
    """Convert ``value`` to JSON values: NumPy and torch scalars by ``item()``, non-finite floats to strings.

    ``where``: path to ``value`` inside its record, for the error.
    """
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else json.dumps(float(value))  # its spelling, as a string
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, Mapping):
        inside = f"{where}." if where else ""
        return {
            key if isinstance(key, str) else _refuse_key(key, where): to_json(item, f"{inside}{key}")
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    scalar = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else None
    if isinstance(scalar, (float, int, str)):
        return to_json(scalar, where)
    shape = getattr(value, "shape", None)
    what = f"{type(value).__name__} of shape {tuple(shape)}" if shape else type(value).__name__
    raise CannotSave(f"record key {where!r}: JSON cannot hold a {what}; use a number, string, list or dict")


def from_json(value: Any) -> Any:
    """Invert :func:`to_json`, except for types that JSON does not have."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return value


def _refuse_key(key: object, where: str) -> NoReturn:
    place = f"in {where!r}" if where else "of the record"
    raise CannotSave(f"key {key!r} {place}: JSON keys are strings, this is a {type(key).__name__}; use str(key)")


WALL_CLOCK = ("timestamp", "tok_per_sec", "mfu", "peak_mem", "rank_peak_mem", "data_share")
WALL_CLOCK_BEGINNINGS = ("memory/", "gpu/")
WALL_CLOCK_ENDINGS = ("_runtime", "_per_second")


def is_wall_clock(key: str) -> bool:
    """Whether this field may differ between two equal runs."""
    return key in WALL_CLOCK or key.startswith(WALL_CLOCK_BEGINNINGS) or key.endswith(WALL_CLOCK_ENDINGS)


_MEASURED = re.compile(
    r"(^|[^a-z])(time|times|seconds|secs?|ms|duration|elapsed|eta|latency|speed|throughput|fps|it_s|memory|mem|vram|util|"
    r"utilization|temperature|temp|power|watts?|cpu|gpu|mfu)([^a-z]|$)|per_?sec|/s$",
    re.IGNORECASE,
)


def sounds_measured(key: str) -> bool:
    """Whether this metric of the user's own may, by its name, be measured by a clock or a counter of the machine."""
    return _MEASURED.search(key) is not None


def drop_wall_clock(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``record`` without its wall-clock fields."""
    return {key: value for key, value in record.items() if not is_wall_clock(key)}
