"""Detect the format of a log file, and find the log of a run directory."""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path

from dalsegno.analysis.formats.json_lines import JsonArray, TrainerState, decode_array
from dalsegno.analysis.formats.trackers import MetricsCsv
from dalsegno.errors import ConfigurationError
from dalsegno.logs.reader import numbered

from .json_lines import JsonLines, decode_lines
from .source import Naming, Skipped, Source, Unreadable, loss_of
from .tensorboard import EventFiles, event_files
from .trackers import SQLITE, Database, MLflowFiles, WandbRun, is_mlflow_run, wandb_files

LOOKED_FOR = (
    "logs/train.jsonl, trainer_logs.json, trainer_state.json (also in checkpoint-*), metrics.csv, TensorBoard event "
    "files, run-*.wandb, a run of MLflow's file store, and *.jsonl or *.json whose records have a step"
)

BEGINNING = 1 << 16  # bytes read to detect a file's format
FEW = 5  # leading records of which one must have a step, in a file without a log's name

SUFFIXES = (".json", ".jsonl")

_SIDE_LOG = re.compile(r"(gradient|parameter)_norms(-\d+)?\.jsonl?|control\.jsonl")
_OWN_LOG = re.compile(r"train(-\d+)?\.jsonl?")


def source_of_file(path: Path, step_key: str | None = None) -> Source:
    """The log in a file, by its name and first bytes."""
    try:
        beginning = _beginning(path).lstrip(b"\xef\xbb\xbf \t\r\n\0")
    except OSError as error:
        return Unreadable(path, error)
    if "tfevents" in path.name:
        return EventFiles(path)
    if path.suffix == ".wandb":
        return WandbRun(path)
    if beginning.startswith(SQLITE):
        return Database(path)
    if path.suffix == ".csv":
        return MetricsCsv(path, step_key)
    if path.name == "trainer_state.json" or (beginning.startswith(b"{") and b'"log_history"' in beginning):
        return TrainerState(path)
    if beginning.startswith(b"["):
        return JsonLines(path, step_key) if _has_line_per_record(beginning[1:]) else JsonArray(path, step_key)
    has_records = path.suffix in (".jsonl", ".json") and b"\n{" in beginning  # after a damaged first line
    if beginning.startswith(b"{") or has_records or not beginning:
        return JsonLines(path, step_key)
    raise ConfigurationError(
        f"{path}: not a log that dalsegno can read; it reads JSON lines and arrays, trainer_state.json, metrics.csv, "
        "TensorBoard event files, run-*.wandb, and SQLite databases of MLflow"
    )


def loose_sources(folder: Path, step_key: str | None = None) -> list[Source]:
    """Files in a directory whose contents are a log, although their names are not those of one."""
    for place in (folder / "logs", folder):
        loose = [path for path in _json_files(place) if _has_steps(path, step_key)]
        if loose:
            return [source_of_file(path, step_key) for path in loose]
    return []


def source_of_run(folder: Path, step_key: str | None = None) -> Source | None:
    """The log of a run directory; None if ``folder`` is not one."""
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
            # a JSON log of the run contains more than its curves
            loose = [source for source in loose_sources(folder, step_key) if _has_loss(source)]
            return loose[0] if len(loose) == 1 else EventFiles(place)
    if files := [*folder.glob("run-*.wandb"), *wandb_files(folder)]:
        return WandbRun(files[-1])
    return MLflowFiles(folder) if is_mlflow_run(folder) else None


def _json_files(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(each.name for each in entries if Path(each.name).suffix in SUFFIXES)
    except OSError:
        return []
    return [folder / name for name in names if not _SIDE_LOG.fullmatch(name) and (folder / name).is_file()]


def _progress(state: Path) -> int:
    found = re.search(rb'"global_step"\s*:\s*(\d+)', state.read_bytes())
    return int(found[1]) if found else -1


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(BEGINNING)


def _has_line_per_record(beginning: bytes) -> bool:
    """Whether an array's bracket is alone on its line and the next line is a whole record."""
    bracket, _, rest = beginning.partition(b"\n")
    return not bracket.strip() and any(True for _ in decode_lines(rest.lstrip().splitlines()[:1], 1, Skipped()))


def _has_loss(source: Source) -> bool:
    """Whether one of the first records has a loss: a configuration or a data set may have steps, too."""
    if isinstance(source, Unreadable):
        return False
    return any(loss_of(record) for record in islice(source.records(Skipped()), FEW))


def _has_steps(path: Path, step_key: str | None) -> bool:
    """Whether the records of a file have steps; data sets are JSON lines as well. True for an unreadable file, so that
    opening it reports the error."""
    try:
        beginning = _beginning(path)
    except OSError:
        return True
    records = [record for _, record in decode_lines(beginning.splitlines()[:FEW], 1, Skipped())]
    if beginning.lstrip().startswith(b"["):
        text = beginning.decode(errors="replace")
        records += islice(decode_array(text, text.find("[") + 1, Skipped()), FEW)
    return any(Naming.of(record, step_key) for record in records)
