"""Export a log to CSV, Parquet, JSON or TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from dalsegno.errors import ConfigurationError
from dalsegno.logs.reader import JSON_ARRAY
from dalsegno.logs.values import Record, encode, is_number
from dalsegno.stateful.annotations import check_types
from dalsegno.system import filesystem
from dalsegno.system.imports import require_extra

from .folder import RunFolder, make_names_unique
from .formats.source import BOOKKEEPING, Skipped
from .log import TrainingLog

Target = Literal["csv", "parquet", "json", "tensorboard"]


@check_types
def export_log(log: TrainingLog, to: Target, path: str | Path | BinaryIO) -> None:
    """Write the records of a log.

    Args:
        to: ``csv``, ``parquet``: one row per record; ``json``: an array of records; ``tensorboard``: an event file
            with evaluation metrics under ``eval/`` and training metrics under ``train/``, of a directory of runs one in
            a subdirectory for each run.
        path: path or open file; for ``tensorboard`` a directory, in which no event file is where one is to be written.

    Raises:
        ConfigurationError: for an unknown format, a directory with event files, or if what writes it is not installed:
            Polars for ``csv`` and ``parquet``, or tensorboard.
    """
    path = Path(path) if isinstance(path, str) else path
    if to in ("csv", "parquet"):
        require_extra("analysis", "polars", f"writing {to}")
    if to == "tensorboard":
        if not isinstance(path, Path):
            raise ConfigurationError("TensorBoard reads directories: pass the path of one")
        _write_runs(log, path)
    elif not isinstance(path, Path):
        _write(log, to, path)
    else:
        with filesystem.output_file(path) as file:
            _write(log, to, file)


def _write(log: TrainingLog, to: Target, file: BinaryIO) -> None:
    if to == "csv":
        log.frame().write_csv(file)
    elif to == "parquet":
        log.frame().write_parquet(file)
    else:
        file.write(JSON_ARRAY.head)
        for number, record in enumerate(log.records()):
            file.write(JSON_ARRAY.append(encode(record), first=number == 0))
        file.write(JSON_ARRAY.foot)


def _write_runs(log: TrainingLog, folder: Path) -> None:
    """TensorBoard takes each directory for a run."""
    require_extra(None, "tensorboard", "writing event files")
    runs = {folder: log}
    if isinstance(log, RunFolder):
        make_names_unique(log.runs)
        runs = {folder / run.name: run for run in log}
    for place in runs:
        if any(place.glob("*tfevents*")):
            raise ConfigurationError(
                f"{place}: already has event files, which TensorBoard would mix with these; name another directory"
            )
    skipped = Skipped()
    for place, run in runs.items():
        _write_events(run.records(), place)
        skipped.include(run.name, run.skipped)
    if isinstance(log, RunFolder):
        log.skipped = skipped


def _write_events(records: Iterator[Record], folder: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for record in records:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in _tagged(record).items()]
        if values:
            event = Event(step=int(record["global_step"]), summary=Summary(value=values))
            if is_number(record.get("timestamp")):
                event.wall_time = record["timestamp"]
            writer.add_event(event)
    writer.close()


def _tagged(record: Record) -> dict[str, float]:
    """``loss`` becomes ``train/loss``, ``eval_loss`` becomes ``eval/loss``."""
    metrics = {name: float(value) for name, value in record.items() if name not in BOOKKEEPING[:3] and is_number(value)}
    if record["kind"] == "eval":
        return {f"eval/{name.removeprefix('eval_')}": value for name, value in metrics.items()}
    return {name if "/" in name else f"train/{name}": value for name, value in metrics.items()}
