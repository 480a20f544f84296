"""Which log a path holds."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

from dalsegno.errors import ConfigurationError
from dalsegno.logs.formats import numbered

from .json_array import JsonArray, decode_array
from .json_lines import JsonLines, decode_lines
from .metrics_csv import MetricsCsv
from .naming import Naming
from .source import Skipped, Source, Unreadable
from .tensorboard import EventFiles, event_files
from .trainer_state import TrainerState

LOOKED_FOR = (
    "logs/train.jsonl, trainer_logs.json, trainer_state.json (in checkpoint-* too), metrics.csv, event files of "
    "TensorBoard, and *.jsonl or *.json whose records have a step"
)

BEGINNING = 1 << 16
"""Bytes by which a file's format is told."""

FEW = 5
"""Records of which one must have a step, in a file whose name does not say that it is a log."""

_SIDE_LOG = re.compile(r"(gradient|parameter)_norms(-\d+)?\.jsonl?")
_OWN_LOG = re.compile(r"train(-\d+)?\.jsonl?")


def source_of_file(path: Path, step_key: str | None = None) -> Source:
    """
    Raises:
        ConfigurationError: if it is of no known format.
    """
    try:
        beginning = _beginning(path).lstrip(b"\xef\xbb\xbf \t\r\n")
    except OSError as error:
        return Unreadable(path, error)
    if "tfevents" in path.name:
        return EventFiles(path)
    if path.suffix == ".csv":
        return MetricsCsv(path, step_key)
    if path.name == "trainer_state.json" or (beginning.startswith(b"{") and b'"log_history"' in beginning):
        return TrainerState(path)
    if beginning.startswith(b"["):
        return JsonLines(path, step_key) if _a_record_a_line(beginning[1:]) else JsonArray(path, step_key)
    if beginning.startswith(b"{") or not beginning:
        return JsonLines(path, step_key)
    raise ConfigurationError(
        f"{path}: not a log that dalsegno can read; it reads JSON lines and arrays, trainer_state.json, metrics.csv "
        "and event files of TensorBoard"
    )


def loose_sources(folder: Path, step_key: str | None = None) -> list[Source]:
    """The files of a folder that may each be a log, although their names do not say so."""
    for place in (folder / "logs", folder):
        loose = [path for path in _json_files(place) if _has_steps(path, step_key)]
        if loose:
            return [source_of_file(path, step_key) for path in loose]
    return []


def source_of_run(folder: Path, step_key: str | None = None) -> Source | None:
    """The log of a run's folder; None if it is none."""
    own = [path for place in (folder / "logs", folder) for path in _json_files(place) if _OWN_LOG.fullmatch(path.name)]
    if own:
        return source_of_file(max(own, key=lambda path: numbered(path.stem)), step_key)
    for name in ("trainer_logs.json", "logs/trainer_logs.json"):
        if (folder / name).is_file():
            return source_of_file(folder / name, step_key)
    states = [*folder.glob("trainer_state.json"), *folder.glob("checkpoint-*/trainer_state.json")]
    if states:
        return TrainerState(max(states, key=_progress))
    if (folder / "metrics.csv").is_file():
        return MetricsCsv(folder / "metrics.csv", step_key)
    for place in (folder, folder / "logs" / "tensorboard"):
        if event_files(place):
            return EventFiles(place)
    return None


def _json_files(folder: Path) -> list[Path]:
    files = [path for path in sorted(folder.glob("*.json*")) if path.suffix in (".json", ".jsonl") and path.is_file()]
    return [path for path in files if not _SIDE_LOG.fullmatch(path.name)]


def _progress(state: Path) -> int:
    found = re.search(rb'"global_step"\s*:\s*(\d+)', state.read_bytes())
    return int(found[1]) if found else -1


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(BEGINNING)


def _a_record_a_line(beginning: bytes) -> bool:
    """Whether an array's bracket stands alone in its line, and the next line holds a whole record."""
    bracket, _, rest = beginning.partition(b"\n")
    return not bracket.strip() and any(True for _ in decode_lines(rest.lstrip().splitlines()[:1], 1, Skipped()))


def _has_steps(path: Path, step_key: str | None) -> bool:
    """Whether a file of any name is a log: data sets are JSON lines, too. Who cannot read it has to be told so."""
    try:
        beginning = _beginning(path)
    except OSError:
        return True
    records = [record for _, record in decode_lines(beginning.splitlines()[:FEW], 1, Skipped())]
    if beginning.lstrip().startswith(b"["):
        text = beginning.decode(errors="replace")
        records += islice(decode_array(text, text.find("[") + 1, Skipped()), FEW)
    return any(Naming.of(record, step_key) for record in records)
