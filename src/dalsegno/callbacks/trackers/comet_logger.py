"""CometLogger: writes to Comet."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dalsegno.policies.triggers import SaveTrigger

from .entries import Card, Entry, Histogram, Points, Return, Status, Text
from .tracker import TrackedRun, Tracker
from .tracker_logger import TrackerLogger

_KEY_LENGTH = 32
_FLUSH_TIMEOUT_S = 60


class CometTracker(Tracker):
    variables = ("COMET_PROJECT_NAME", "COMET_WORKSPACE", "COMET_URL_OVERRIDE")

    def __init__(self, project: str | None, workspace: str | None, *, online: bool) -> None:
        self._project, self._workspace, self._online = project, workspace, online
        self._experiment: Any = None
        self.stores_at_once = online  # an archive is written at the end only, from a temporary directory

    def open(self, run: TrackedRun) -> None:
        import comet_ml

        archives = run.directory / "comet"
        archives.mkdir(parents=True, exist_ok=True)
        key = hashlib.sha256(run.id.encode()).hexdigest()[:_KEY_LENGTH]
        is_begun = not self._online and any(map(_has_content, archives.glob(f"{key}*.zip")))
        self._experiment = comet_ml.start(
            workspace=self._workspace,
            project_name=self._project,
            experiment_key=key,
            online=self._online,
            mode="get_or_create" if self._online else "get" if is_begun else "create",
            experiment_config=comet_ml.ExperimentConfig(
                name=run.name,
                offline_directory=str(archives),
                auto_output_logging=False,
                auto_param_logging=False,
                auto_metric_logging=False,
                auto_log_co2=False,
                parse_args=False,  # a command line may contain a secret
                log_code=False,
                log_graph=False,
                log_git_patch=False,
                display_summary_level=0,
            ),
        )
        self._experiment.log_parameters(dict(run.settings))
        self._experiment.log_others({f"code/{name}": value for name, value in run.code.items()})

    def send(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if isinstance(entry, Points):
                self._experiment.log_metrics(entry.values, step=entry.step)
            elif isinstance(entry, Text):
                self._experiment.log_text(entry.text, step=entry.step, metadata={"tag": entry.tag})
            elif isinstance(entry, Card):
                self._experiment.log_asset_data(entry.text, name=f"checkpoints/{entry.name}.md", step=entry.step)
            elif isinstance(entry, Histogram):
                content = {"edges": entry.edges, "counts": entry.counts}
                self._experiment.log_asset_data(content, name=f"{entry.tag}/step-{entry.step:08}.json", step=entry.step)
        if self._online and not self._experiment.flush(timeout=_FLUSH_TIMEOUT_S):
            raise TimeoutError(f"Comet has not accepted all entries within {_FLUSH_TIMEOUT_S} s")

    def return_to(self, point: Return) -> None:
        self._experiment.log_other(f"timeline {point.timeline}", f"from step {point.step}")
        super().return_to(point)

    def close(self, status: Status) -> None:
        self._experiment.end()


class CometLogger(TrackerLogger):
    """Logs to Comet: one experiment for all legs of the run. docs/trackers.md describes what all trackers share.

    The API key is read by Comet, from ``COMET_API_KEY`` or its configuration. Offline, each leg ends with an archive in
    ``logs/comet``, all with the same experiment key; ``comet upload`` uploads them in their order.

    Args:
        project: None: ``COMET_PROJECT_NAME``, or Comet's default.
        workspace: None: ``COMET_WORKSPACE``, or the user's default.
        online: False: write archives.
        cards: of which checkpoints a model card is logged: ``OnBest()``, ``Every(steps=1000)``, or that as text; None:
            of none.
        wait_s: seconds that the end of training waits for Comet.
        name: the key of its state in checkpoints; None: the class's name.

    Raises:
        ConfigurationError: if comet_ml is not installed, or for an invalid value.
    """

    tracker_class = CometTracker
    package, extra = "comet_ml", "comet"

    def __init__(
        self,
        project: str | None = None,
        *,
        workspace: str | None = None,
        online: bool = True,
        cards: SaveTrigger | str | None = None,
        wait_s: float = 30.0,
        name: str | None = None,
    ) -> None:
        super().__init__(
            {"project": project, "workspace": workspace, "online": online}, cards=cards, wait_s=wait_s, name=name
        )


def _has_content(archive: Path) -> bool:
    """Whether Comet has finished the archive: the one of a process that was killed is empty."""
    with zipfile.ZipFile(archive) as opened:
        return "experiment.json" in opened.namelist()
