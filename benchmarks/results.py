"""Results as JSON: the rows, with the machine and the versions that they were measured with."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from .row import Row

VERSIONS = ("dalsegno", "torch", "numpy", "polars", "safetensors")


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows of one or several benchmarks."""
    result = {"timestamp": time.time(), "machine": machine(), "versions": versions(), "rows": [*map(asdict, rows)]}
    path.write_text(f"{json.dumps(result, indent=2, ensure_ascii=False)}\n", encoding="utf-8")


def read(path: Path) -> list[Row]:
    """The rows of a file that :func:`write` has written."""
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]


def machine() -> dict[str, str | int]:
    """What the figures depend on."""
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
