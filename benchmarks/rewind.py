"""Rewind a log of 1 GB by 1 MB. The peer reads and parses the whole log, as one does who keeps the good records."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from dalsegno.logs import RecordLog

from .row import Row, count, duration, three_digits
from .timing import figure

SIZE = 1_000_000_000
CUT = 1_000_000
PEER_SHARE = 10
"""The peer reads one part in so many; its time grows in proportion to the size, and is scaled up."""
REPEATS = 5
LIMIT = 0.020

SMALL = {"size": 3_000_000, "cut": 100_000, "repeats": 1}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


def run(size: int = SIZE, cut: int = CUT, repeats: int = REPEATS) -> list[Row]:
    """Medians of the repeats."""
    with tempfile.TemporaryDirectory(
        prefix=".benchmark-", dir=Path.cwd()
    ) as directory:  # on a disk, where /tmp may be memory
        log, line = _log_of(size - cut, Path(directory))
        state = log.state()
        ours = figure([_rewind(log, state, line, cut) for _ in range(repeats)])
        peer = PEER_SHARE * figure([_parse(log.path, size // PEER_SHARE) for _ in range(repeats)])
        log.close()
    return [
        Row(
            f"rewind a log of {count(size)}B by {count(cut)}B",
            duration(ours),
            f"read and parse it all: {duration(peer)} (from {100 // PEER_SHARE} % of it)",
            f"{three_digits(ours / peer)} ×",
            f"≤ {duration(LIMIT)}",
            ours <= LIMIT,
            ours.spread,
        )
    ]


def _log_of(size: int, directory: Path) -> tuple[RecordLog, bytes]:
    """An open log of about ``size`` bytes of ordinary records, and one such line."""
    record = {"timestamp": 1.7e9, "global_step": 123456, "epoch": 0.5, "loss": 2.3025850929940455, "lr": 3e-4}
    log = RecordLog("train.jsonl", directory)
    log.open()
    log.append(record)
    state = log.state()
    line = log.path.read_bytes()
    copies = size // len(line)
    with log.path.open("ab") as file:
        for _ in range(0, copies - 1, 10_000):
            file.write(line * 10_000)
    log.close()
    log.open(_state_at_end(state, log.path))
    return log, line


def _state_at_end(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """The state of a log that has come to the end of ``path``, without appending millions of records one by one."""
    import xxhash

    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(size - 4096)
        tail = xxhash.xxh3_128_hexdigest(file.read())
    return {**state, "offset": size, "records": size // state["offset"], "tail": tail}


def _rewind(log: RecordLog, state: dict[str, Any], line: bytes, cut: int) -> float:
    """Seconds from the open call to a log that can be appended to; the ``cut`` bytes behind it are written before."""
    log.close()
    with log.path.open("ab") as file:
        file.write(line * (cut // len(line)))
    began = time.perf_counter()
    report = log.open(state)
    seconds = time.perf_counter() - began
    assert report.action == "rewound", report
    return seconds


def _parse(path: Path, size: int) -> float:
    began = time.perf_counter()
    read = 0
    with path.open("rb") as file:
        for line in file:
            json.loads(line)
            read += len(line)
            if read >= size:
                break
    return time.perf_counter() - began
