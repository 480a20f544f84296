"""Reads a log of JSON lines as others read it: seconds for each, of the readers that are installed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path


def with_pyarrow(path: str) -> None:
    from pyarrow import json as arrow

    arrow.read_json(path)


def with_orjson(path: str) -> None:
    import orjson

    with Path(path).open("rb") as file:
        for line in file:
            orjson.loads(line)


def with_pandas(path: str) -> None:
    import pandas

    pandas.read_json(path, lines=True)


def with_json(path: str) -> None:
    with Path(path).open("rb") as file:
        for line in file:
            json.loads(line)


READERS: dict[str, Callable[[str], None]] = {
    "PyArrow": with_pyarrow,
    "orjson, a line at a time": with_orjson,
    "pandas": with_pandas,
    "json, a line at a time": with_json,
}

if __name__ == "__main__":
    path, warm = sys.argv[1:]
    found = {}
    for name, read in READERS.items():
        try:
            read(warm)  # what it takes to import it is another matter
        except ImportError:
            continue
        began = time.perf_counter()
        read(path)
        found[name] = time.perf_counter() - began
    print(json.dumps(found))
