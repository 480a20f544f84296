"""Content of a URL and of a log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dalsegno.checkpoint.remote.store import Store

TIMED = ("timestamp", "_runtime", "_per_second", "peak_mem", "tok_per_sec", "mfu")


def steps_at(store: Store) -> list[int]:
    """Steps of the published checkpoints at the URL."""
    return sorted(int(name.split("/")[1][5:]) for name in store.sizes("checkpoints") if name.endswith("/manifest.json"))


def training(path: Path) -> list[dict[str, Any]]:
    """Training records of a log of either format, without fields that depend on time."""
    lines = [line.rstrip(",") for line in path.read_text().splitlines()]
    parsed = [json.loads(line) for line in lines if line.strip() not in ("[", "]", "")]
    return [
        {key: value for key, value in each.items() if not key.endswith(TIMED)}
        for each in parsed
        if each.get("kind") is None
    ]
