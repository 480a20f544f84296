"""States and tensors of a checkpoint as plain JSON, for people. Needs no torch.

``{"$tuple": [1, 2]}`` becomes ``[1, 2]``, a tensor the text ``tensor float32 [3]``. Nothing large or untrustworthy is
decoded, so that it is safe to show an unverified checkpoint.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dalsegno.checkpoint import names
from dalsegno.checkpoint.file_reading import HeaderEntry, opened, read_header, read_json
from dalsegno.checkpoint.manifest import Checkpoint
from dalsegno.checkpoint.sharding import ShardedChunks, Sharding, StoredChunk
from dalsegno.errors import DamagedCheckpoint

Json = Any

SHORT = 8
"""List items that :func:`shortened` keeps; of a text, ten times as many characters."""


Problems = list[str]
"""Receives an error for each file that cannot be read, which is left out; None: the first one is raised."""


def readable_states(checkpoint: Checkpoint, problems: Problems | None = None) -> dict[str, list[Json]]:
    """Component to its states, as plain JSON: one state, or one per rank that saved. With ``problems``, a rank's state
    is None if its sidecar cannot be read, and a component of the shared sidecar has no states if that one cannot."""
    states: dict[str, list[Json]] = {key: [] for key in checkpoint.manifest.components}
    shared: set[str] = set()  # also per-rank states that no component claimed: this file has those of all ranks
    for name in names.sidecars_among(checkpoint.manifest.files):
        is_shared = name == names.sidecar_states(names.SHARED)
        with _noting(problems):
            for key, entry in _entries(checkpoint, name):
                states.setdefault(key, []).extend(json_view(state) for state in entry["states"])
                if is_shared:
                    shared.add(key)
            continue
        for key, record in checkpoint.manifest.components.items():
            if record.scope == "per_rank" and not is_shared and key not in shared:
                states[key].append(None)
    return states


def readable_tensors(checkpoint: Checkpoint, problems: Problems | None = None) -> dict[str, Json]:
    """Every sharded tensor, by ``<component>.<name>``: dtype, shape and chunks, from the index and the files' headers.
    One that is not saved (``save_frozen="never"``) has no chunks; a chunk in a file that cannot be read, no
    ``bytes``."""
    with _noting(problems):
        path = checkpoint.file(names.INDEX)
        content = read_json(path)
        try:
            absent = {name: _tensor(entry, []) for name, entry in content.get("absent", {}).items()}
            return _saved(checkpoint, content, problems) | absent
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
            raise DamagedCheckpoint(f"{path}: not an index ({error!r})") from error
    return {}


@contextmanager
def _noting(problems: Problems | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # damaged (DamagedCheckpoint is an OSError), or unreadable
        if problems is None:
            raise
        problems.append(str(error))


def json_view(json: Json) -> Json:
    """Plain JSON of a value in the codec's JSON."""
    if isinstance(json, list):
        return [json_view(each) for each in json]
    if not isinstance(json, dict):
        return json
    tag = next(iter(json), "")
    shown = _SHOWN.get(tag)
    try:
        return shown(json) if shown else {key: json_view(value) for key, value in json.items()}
    except (ValueError, TypeError, KeyError, struct.error):
        return json  # the codec did not write it: show it as it is


def shortened(json: Json) -> Json:
    """The same with long lists and texts cut; each cut is marked."""
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
        raise DamagedCheckpoint(f"{path}: not a sidecar ({error!r})") from error
    raise DamagedCheckpoint(f"{path}: not a sidecar")


def _saved(checkpoint: Checkpoint, content: Mapping[str, Any], problems: Problems | None) -> dict[str, Json]:
    """The tensors of an index with every chunk, and its bytes in its file."""
    shardings = [Sharding.checked(each["ranks"], each["mesh"], each["cuts"]) for each in content["shardings"]]
    headers: dict[str, Mapping[str, HeaderEntry] | None] = {}
    listed = {}
    for full_name, entry in content["tensors"].items():
        pieces = []
        for chunk in ShardedChunks.of_entry(full_name, {**entry, "shape": _numbers(entry["shape"])}, shardings):
            if chunk.file not in headers:
                headers[chunk.file] = None
                with _noting(problems):
                    headers[chunk.file] = _header(checkpoint, chunk.file)
            span = None
            if (header := headers[chunk.file]) is not None:
                with _noting(problems):
                    span = _span(checkpoint, header, chunk)
            pieces.append(
                {"file": chunk.file, "bytes": span, "offsets": [*chunk.box.offsets], "shape": [*chunk.box.shape]}
            )
        listed[full_name] = _tensor(entry, pieces)
    return listed


def _header(checkpoint: Checkpoint, name: str) -> Mapping[str, HeaderEntry]:
    path = checkpoint.file(name)
    with opened(path) as descriptor:
        return read_header(path, descriptor)


def _span(checkpoint: Checkpoint, header: Mapping[str, HeaderEntry], chunk: StoredChunk) -> list[int]:
    if chunk.name not in header:
        raise DamagedCheckpoint(f"{checkpoint.file(chunk.file)}: does not contain {chunk.name}")
    return [*header[chunk.name].span]


def _tensor(entry: Any, pieces: list[Json]) -> Json:
    return {"dtype": str(entry["dtype"]), "shape": _numbers(entry["shape"]), "pieces": pieces}


def _numbers(value: Any) -> list[int]:
    if not isinstance(value, list) or any(type(each) is not int for each in value):
        raise ValueError(f"{value!r} instead of numbers")
    return value


def _float(json: Json) -> str:
    value: float = struct.unpack(">d", bytes.fromhex(json["$float"]))[0]
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


_SHOWN: dict[str, Callable[[Any], Json]] = {
    "$dict": lambda json: {str(json_view(key)): json_view(value) for key, value in json["$dict"]},
    "$tuple": lambda json: json_view(json["$tuple"]),
    "$ordered": lambda json: json_view(json["$ordered"]),
    "$counter": lambda json: json_view(json["$counter"]),
    "$deque": lambda json: json_view(json["$deque"]),
    "$size": lambda json: json["$size"],
    "$dtype": lambda json: json["$dtype"],
    "$device": lambda json: json["$device"],
    "$bytes": lambda json: f"bytes {json['$bytes']}",
    "$str": lambda json: f"text {json['$str']}",
    "$float": _float,
    "$int": lambda json: int(json["$int"], 16),
    "$scalar": lambda json: f"numpy {json['$scalar']} {json['hex']}",
    "$array": lambda json: f"array {json['dtype']} {json['shape']}",
    "$tensor": lambda json: f"tensor {json['dtype']} {json['shape']}",
    "$view": lambda json: json_view(json["$view"]),
}
