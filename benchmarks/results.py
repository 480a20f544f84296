"""Results as JSON: the rows of each benchmark, with the machine and the versions that they were measured with.

A benchmark that is measured again replaces its own rows in the file and leaves the others', so that a long table can be
measured in pieces, whenever the machine is quiet.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .row import Row

VERSIONS = ("dalsegno", "torch", "numpy", "polars", "safetensors")


class NotResults(ValueError):
    """A file has other content than the results of benchmarks."""


def read(path: Path) -> dict[str, Any]:
    """The results by name of the benchmark; none if there is no file.

    Raises:
        NotResults: if the file has other content.
    """
    if not path.exists():
        return {}
    try:
        benchmarks: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["benchmarks"]
    except (ValueError, KeyError, TypeError) as error:
        raise NotResults(f"{path} does not contain results of benchmarks; name another file") from error
    return benchmarks


def rows_of(path: Path, name: str) -> list[Row]:
    """The rows of one benchmark in a file."""
    return [Row(**row) for row in read(path)[name]["rows"]]


def add(path: Path, name: str, rows: Sequence[Row], machine: dict[str, str | int]) -> None:
    """Write the rows of a benchmark into the file, in place of former ones of the same benchmark."""
    measured = {
        "timestamp": time.time(),
        "machine": machine,
        "versions": versions(),
        "rows": [*map(asdict, rows)],
    }
    whole = {"benchmarks": {**read(path), name: measured}}
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_text(f"{json.dumps(whole, indent=2, ensure_ascii=False)}\n", encoding="utf-8")
    unfinished.replace(path)


def machine() -> dict[str, str | int]:
    """What the figures depend on; the load is that of the last minute."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in VERSIONS}}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()
