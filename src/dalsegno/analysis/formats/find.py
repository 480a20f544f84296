"""Which log a path holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from dalsegno.errors import ConfigurationError

from .json_lines import JsonLines
from .source import Source

LOOKED_FOR = "logs/train.jsonl, any other *.jsonl or *.json with records of steps"

_SIDE_LOGS = re.compile(r"(gradient|parameter)_norms(-\d+)?\.jsonl?")
_OTHERS = {"run.json"}


def find_source(path: Path, step_key: str | None = None) -> Source | None:
    """The log that a file is, or that lies in a run's folder; None if there is none.

    Raises:
        ConfigurationError: for a file of no known format.
    """
    if path.is_file():
        return source_of_file(path, step_key)
    for place in (path / "logs", path):
        logs = [file for pattern in ("*.jsonl", "*.json") for file in sorted(place.glob(pattern)) if _may_be_log(file)]
        own = [file for file in logs if file.stem.startswith("train")]
        if own:
            return source_of_file(own[-1], step_key)
        if len(logs) == 1:
            return source_of_file(logs[0], step_key)
    return None


def source_of_file(path: Path, step_key: str | None) -> Source:
    """
    Raises:
        ConfigurationError: if it is of no known format.
    """
    make = _BY_SUFFIX.get(path.suffix)
    if make is None:
        raise ConfigurationError(f"{path}: not a log that dalsegno can read; it reads {', '.join(_BY_SUFFIX)}")
    return make(path, step_key)


_BY_SUFFIX: dict[str, Callable[[Path, str | None], Source]] = {".jsonl": JsonLines, ".json": JsonLines}


def _may_be_log(path: Path) -> bool:
    return path.name not in _OTHERS and not _SIDE_LOGS.fullmatch(path.name)
