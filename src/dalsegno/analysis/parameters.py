"""Per-parameter logs beside a run's own: gradient norms and weight norms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from dalsegno.errors import NotFound, UnknownName
from dalsegno.logs import ReadReport, read_records

from .formats import Skipped
from .series import ParameterSeries

WHERE = {
    "grad_norm": ("gradient_norms", ("norms", "grad_norms")),
    "norm": ("parameter_norms", ("norms",)),
    "spectral_norm": ("parameter_norms", ("spectral_norms",)),
}
"""Metric → (stem of the file, keys under which a record may have the numbers)."""


_SEARCHED = 10
"""First records of a file that show whether it has a metric."""


def read_parameters(log: Path, run: str, metric: str, skipped: Skipped) -> ParameterSeries:
    """Read this metric from ``log`` itself, or else from the log beside it that usually has it.

    Raises:
        UnknownName: for a metric that is not in :data:`WHERE`.
        NotFound: if there is no such log.
    """
    if metric not in WHERE:
        raise UnknownName("metric of parameters", metric, WHERE)
    stem, keys = WHERE[metric]
    report = ReadReport()
    found = [
        (record["global_step"], norms)
        for record in read_records(log if _has(log, keys) else _file(log.parent, stem), report)
        for norms in (next((record[key] for key in keys if isinstance(record.get(key), dict)), None),)
        if norms is not None and isinstance(record.get("global_step"), int)
    ]
    for sentence in report.skipped:
        skipped.note(f"{stem}: {sentence}")
    names = tuple(dict.fromkeys(name for _, norms in found for name in norms))
    values = [[float(norms.get(name, np.nan)) for name in names] for _, norms in found]
    return ParameterSeries(
        name=metric,
        run=run,
        parameters=names,
        steps=np.array([step for step, _ in found], np.int64),
        values=np.array(values, np.float64).reshape(len(found), len(names)),
    )


def _has(log: Path, keys: Sequence[str]) -> bool:
    """Whether the first records have one of these keys for each parameter."""
    if log.suffix not in (".json", ".jsonl"):
        return False
    first = islice(read_records(log, ReadReport()), _SEARCHED)
    return any(isinstance(record.get(key), dict) for record in first for key in keys)


def _file(folder: Path, stem: str) -> Path:
    for suffix in (".jsonl", ".json"):
        if (path := folder / f"{stem}{suffix}").exists():
            return path
    raise NotFound(f"{folder / stem}.jsonl: no such log; add the callback that writes it, see docs/callbacks.md")
