"""Wall-clock fields: those of time, speed and memory, the only ones in which two equal runs may differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

WALL_CLOCK = ("timestamp", "tok_per_sec", "mfu", "peak_mem", "rank_peak_mem")
WALL_CLOCK_BEGINNING = "memory/"
WALL_CLOCK_ENDINGS = ("_runtime", "_per_second")


def is_wall_clock(key: str) -> bool:
    """Whether this field may differ between two equal runs."""
    return key in WALL_CLOCK or key.startswith(WALL_CLOCK_BEGINNING) or key.endswith(WALL_CLOCK_ENDINGS)


_MEASURED = re.compile(
    r"(^|[^a-z])(time|times|seconds|secs?|ms|duration|elapsed|eta|latency|speed|throughput|fps|it_s|memory|mem|vram|util|"
    r"utilization|temperature|temp|power|watts?|cpu|gpu|mfu)([^a-z]|$)|per_?sec|/s$",
    re.IGNORECASE,
)


def sounds_measured(key: str) -> bool:
    """Whether this metric of the user's own may, by its name, be measured by a clock or a counter of the machine."""
    return _MEASURED.search(key) is not None


def drop_wall_clock(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``record`` without its wall-clock fields."""
    return {key: value for key, value in record.items() if not is_wall_clock(key)}
