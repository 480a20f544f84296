"""OpenMetrics: a job's progress and everything that it logs, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from dalsegno.logs.values import from_json

from .feed import LiveJob

CONTENT_TYPE = CONTENT_TYPE_LATEST

_PLACE = {"job_id", "status", "timestamp", "logged_at", "global_step", "epoch", "max_steps"}


def open_metrics(job: LiveJob) -> bytes:
    """The metrics of ``job`` in the OpenMetrics text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Status(job.status()))
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text


class _Status(Collector):
    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        yield InfoMetricFamily("dalsegno_job", "The job.", value={"job_id": status["job_id"]})
        yield GaugeMetricFamily("dalsegno_global_step", "Finished optimizer steps.", value=status["global_step"])
        yield GaugeMetricFamily("dalsegno_epoch", "Passes over the data.", value=status["epoch"])
        yield GaugeMetricFamily("dalsegno_max_steps", "Steps at which the run ends; -1: unknown.", status["max_steps"])
        if status["logged_at"] is not None:
            yield GaugeMetricFamily(
                "dalsegno_logged_timestamp_seconds", "Time of the last log.", value=status["logged_at"]
            )
        logged = GaugeMetricFamily("dalsegno_logged", "Last value of everything that is logged.", labels=["name"])
        for name, value in status.items():
            number = from_json(value)
            if name not in _PLACE and isinstance(number, (int, float)) and not isinstance(number, bool):
                logged.add_metric([name], _as_float(number))
        yield logged


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer beyond all floats
        return float("inf") if number > 0 else float("-inf")
