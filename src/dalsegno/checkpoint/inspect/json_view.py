"""A checkpoint for people: states without the marks that bring them back bit by bit, and tensors by name. No torch.

``{"$tuple": [1, 2]}`` becomes ``[1, 2]``, a tensor the text ``tensor float32 [3]``. Nothing is decoded that could be
large or false, so that it may be shown of a checkpoint that nobody has verified.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from dalsegno.checkpoint.format.manifest import Checkpoint, read_json
from dalsegno.errors import DamagedCheckpoint

Json = Any

SHORT = 8
"""How many items of a list, or characters of a text times ten, :func:`shortened` leaves."""


def readable_states(checkpoint: Checkpoint) -> dict[str, list[Json]]:
    """Component to its states, as plain JSON: one state, or one for each rank that saved.

    Raises:
        DamagedCheckpoint: if a sidecar is not one that dalsegno can have written.
    """
    states: dict[str, list[Json]] = {key: [] for key in checkpoint.manifest.components}
    for name in sorted(checkpoint.manifest.files, key=lambda name: (name != "shared.json", name)):
        if name == "shared.json" or (name.startswith("rank-") and name.endswith(".json")):
            for key, entry in _entries(checkpoint, name):
                states.setdefault(key, []).extend(json_view(state) for state in entry["states"])
    return states


def readable_tensors(checkpoint: Checkpoint) -> dict[str, Json]:
    """Every sharded tensor, by ``<component>.<name>``: dtype, shape, and where its pieces lie, as the index says.

    Raises:
        DamagedCheckpoint: if the index is not one that dalsegno can have written.
    """
    path = checkpoint.file("index.json")
    content = read_json(path)
    try:
        return {name: _tensor(entry) for name, entry in content["tensors"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path}: is no index ({error!r})") from error


def json_view(json: Json) -> Json:
    """One value of the codec's JSON, as plain JSON."""
    if isinstance(json, list):
        return [json_view(each) for each in json]
    if not isinstance(json, dict):
        return json
    tag = next(iter(json), "")
    shown = _SHOWN.get(tag)
    try:
        return shown(json) if shown else {key: json_view(value) for key, value in json.items()}
    except (ValueError, TypeError, KeyError, struct.error):
        return json  # not what the codec writes: shown as it is


def shortened(json: Json) -> Json:
    """The same with long lists and texts cut, each cut said."""
    if isinstance(json, dict):
        return {key: shortened(value) for key, value in json.items()}
    if isinstance(json, list):
        rest = [f"… {len(json) - SHORT} more"] if len(json) > SHORT + 1 else []
        return [*map(shortened, json[:SHORT] if rest else json), *rest]
    if isinstance(json, str) and len(json) > 10 * SHORT:
        return f"{json[: 10 * SHORT]}… {len(json)} characters"
    return json


def _entries(checkpoint: Checkpoint, name: str) -> list[tuple[str, Mapping[str, Any]]]:
    path = checkpoint.file(name)
    content = read_json(path)
    try:
        entries = list(content["states"].items())
        if all(isinstance(entry["states"], list) for _, entry in entries):
            return entries
    except (TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path}: is no sidecar ({error!r})") from error
    raise DamagedCheckpoint(f"{path}: is no sidecar")


def _tensor(entry: Any) -> Json:
    pieces = [
        {
            "file": str(piece["file"]),
            "bytes": _numbers(piece["bytes"], 2),
            "offsets": _numbers(piece["offsets"]),
            "shape": _numbers(piece["shape"]),
        }
        for piece in entry["pieces"]
    ]
    return {"dtype": str(entry["dtype"]), "shape": _numbers(entry["shape"]), "pieces": pieces}


def _numbers(value: Any, count: int | None = None) -> list[int]:
    if not isinstance(value, list) or count not in (None, len(value)) or any(type(each) is not int for each in value):
        raise ValueError(f"{value!r} in the place of numbers")
    return value


def _pairs(json: Json) -> Json:
    return {str(json_view(key)): json_view(value) for key, value in json["$dict"]}


def _float(json: Json) -> str:
    value: float = struct.unpack(">d", bytes.fromhex(json["$float"]))[0]
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def _int(json: Json) -> int:
    return int(json["$int"], 16)


def _scalar(json: Json) -> Json:
    return f"numpy {json['$scalar']} {json['hex']}"


def _of_array(json: Json) -> str:
    return f"array {json['dtype']} {json['shape']}"


def _of_tensor(json: Json) -> str:
    return f"tensor {json['dtype']} {json['shape']}"


_SHOWN: dict[str, Callable[[Any], Json]] = {
    "$dict": _pairs,
    "$tuple": lambda json: json_view(json["$tuple"]),
    "$ordered": lambda json: json_view(json["$ordered"]),
    "$counter": lambda json: json_view(json["$counter"]),
    "$size": lambda json: json["$size"],
    "$dtype": lambda json: json["$dtype"],
    "$device": lambda json: json["$device"],
    "$bytes": lambda json: f"bytes {json['$bytes']}",
    "$str": lambda json: f"text {json['$str']}",
    "$float": _float,
    "$int": _int,
    "$scalar": _scalar,
    "$array": _of_array,
    "$tensor": _of_tensor,
}
