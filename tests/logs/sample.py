"""Logs to try things on."""

import json
from pathlib import Path
from typing import Any

from dalsegno.logs import ReadReport, RecordLog, read_records

KEPT = 5
LOST = 4


def record(step: int) -> dict[str, Any]:
    return {"global_step": step, "loss": 1 / (step + 1), "text": "ö" * step}


def fill(log: RecordLog, first: int, count: int) -> None:
    for step in range(first, first + count):
        log.append(record(step))


def steps(path: Path) -> list[int]:
    """The steps of a sound log: not one line that is no record."""
    report = ReadReport()
    found = [line["global_step"] for line in read_records(path, report)]
    assert report.skipped == []
    if path.suffix == ".json":
        assert [entry["global_step"] for entry in json.loads(path.read_bytes())] == found
    return found


def begun(log: RecordLog) -> Any:
    """A log whose checkpoint knows KEPT records and that has LOST more. Returns the checkpoint's state."""
    log.open()
    fill(log, 0, KEPT)
    state = log.state()
    fill(log, KEPT, LOST)
    log.close()
    return state
