"""MLflowLogger: writes to an MLflow server, or to its local store."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from dalsegno.policies.triggers import SaveTrigger

from .tracker import Card, Entry, Histogram, Points, Return, Status, Text, TrackedRun, Tracker
from .tracker_logger import TrackerLogger

RUN_TAG = "dalsegno.run_id"
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100
"""In one call, by MLflow's REST API."""
_LONGEST_VALUE = 500
"""Characters of a parameter's value, by MLflow's oldest stores."""
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}

T = TypeVar("T")


class MLflowTracker(Tracker):
    """Points that are sent again have the same time, so that MLflow's SQL stores ignore them."""

    def __init__(self, experiment: str | None, tracking_uri: str | None) -> None:
        self._experiment, self._tracking_uri = experiment, tracking_uri
        self._client: Any = None
        self._run_id = ""
        self._histories: dict[str, set[tuple[int, int]]] = {}
        """Step and time of each point of a metric, as the server had them when the connection was opened."""

    def open(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        client = self._client = MlflowClient(tracking_uri=self._tracking_uri)
        self._histories = {}
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        experiment = client.get_experiment_by_name(name)
        experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
        found = client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{run.id}'", max_results=1)
        begun = found[0] if found else client.create_run(experiment_id, run_name=run.name, tags={RUN_TAG: run.id})
        self._run_id = begun.info.run_id
        client.update_run(self._run_id, status="RUNNING")
        self._describe(run, begun.data.params)

    def _describe(self, run: TrackedRun, there: Mapping[str, str]) -> None:
        """Log settings as parameters, which cannot change; what has changed since, and the code, as tags."""
        from mlflow.entities import Param, RunTag

        values = {name: str(value)[:_LONGEST_VALUE] for name, value in run.settings.items()}
        parameters = [Param(name, value) for name, value in values.items() if name not in there]
        for some in _pieces(parameters, _MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=some)
        tags = {f"changed.{name}": value for name, value in values.items() if there.get(name, value) != value}
        tags |= {f"code.{name}": value for name, value in run.code.items()}
        if "git_commit" in run.code:
            tags["mlflow.source.git.commit"] = run.code["git_commit"]
        self._client.log_batch(self._run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def has(self, entry: Entry) -> bool:
        """Texts, histograms and cards are files, which are replaced."""
        return isinstance(entry, Points) and all(
            (entry.step, _milliseconds(entry)) in self._history(name) for name in entry.values
        )

    def _history(self, name: str) -> set[tuple[int, int]]:
        if name not in self._histories:
            points = self._client.get_metric_history(self._run_id, _key(name))
            self._histories[name] = {(point.step, point.timestamp) for point in points}
        return self._histories[name]

    def send(self, entries: Sequence[Entry]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_key(name), float(value), _milliseconds(entry), entry.step)
            for entry in entries
            if isinstance(entry, Points)
            for name, value in entry.values.items()
        ]
        for some in _pieces(metrics, _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=some)
        for entry in entries:
            if isinstance(entry, Card):
                self._client.log_text(self._run_id, entry.text, f"checkpoints/{entry.name}.md")
            elif isinstance(entry, Text):
                self._client.log_text(self._run_id, entry.text, f"{entry.tag}/step-{entry.step:08}.md")
            elif isinstance(entry, Histogram):
                content = {"edges": entry.edges, "counts": entry.counts}
                self._client.log_dict(self._run_id, content, f"{entry.tag}/step-{entry.step:08}.json")

    def return_to(self, point: Return) -> None:
        self._client.set_tag(self._run_id, f"dalsegno.timeline-{point.timeline}", f"from step {point.step}")
        super().return_to(point)

    def close(self, status: Status) -> None:
        self._client.set_terminated(self._run_id, _STATUS[status])


class MLflowLogger(TrackerLogger):
    """Logs to MLflow: one MLflow run for all legs of the run. docs/guides/trackers.md has what trackers share.

    The run has the tag ``dalsegno.run_id``, by which later legs find it. Credentials are read by MLflow, from
    ``MLFLOW_TRACKING_USERNAME``, ``MLFLOW_TRACKING_TOKEN`` and so on.

    Args:
        experiment: created if it does not exist; None: ``MLFLOW_EXPERIMENT_NAME``, or MLflow's default.
        tracking_uri: a server or a local store; None: ``MLFLOW_TRACKING_URI``, or MLflow's default.
        cards: of which checkpoints a model card is logged, as ``checkpoints/<name>.md``: ``OnBest()``,
            ``Every(steps=1000)``, or that as text; None: of none.
        wait_s: seconds that the end of training waits for MLflow.
        name: the key of its state in checkpoints; None: the class's name.
    """

    package = "mlflow"

    def __init__(
        self,
        experiment: str | None = None,
        tracking_uri: str | None = None,
        *,
        cards: SaveTrigger | str | None = None,
        wait_s: float = 30.0,
        name: str | None = None,
    ) -> None:
        super().__init__(partial(MLflowTracker, experiment, tracking_uri), cards=cards, wait_s=wait_s, name=name)


def _pieces(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    return (items[begin : begin + most] for begin in range(0, len(items), most))


def _milliseconds(entry: Entry) -> int:
    return int(entry.time * 1000)


def _key(name: str) -> str:
    """Return the name with ``_`` for what MLflow does not allow in names of metrics."""
    return "".join(char if char.isalnum() or char in "_-. /:" else "_" for char in name)
