"""TrackioLogger: writes to Trackio's local store, a self-hosted server or a Hugging Face Space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dalsegno.policies.triggers import SaveTrigger

from .entries import Card, Entry, Histogram, Points, Status, Text
from .tracker import TrackedRun, Tracker
from .tracker_logger import TrackerLogger


class TrackioTracker(Tracker):
    variables = ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
    stores_at_once = False  # a thread of Trackio's writes them

    def __init__(self, project: str, space_id: str | None) -> None:
        self._project, self._space_id = project, space_id
        self._run: Any = None

    def open(self, run: TrackedRun) -> None:
        import trackio

        name = f"{run.name}-{run.id[:6]}"
        self._run = trackio.init(
            self._project,
            name=name,
            space_id=self._space_id,
            config={**run.settings, "code": dict(run.code)},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        rows = trackio.SQLiteStorage.get_logs(self._project, name, max_points=None)
        self._arrived = {(row["step"], key) for row in rows for key in row}

    def send(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._run.log(_values(entry), step=entry.step)

    def close(self, status: Status) -> None:
        self._run.finish()


class TrackioLogger(TrackerLogger):
    """Logs to Trackio: one Trackio run for all legs of the run. docs/trackers.md describes what all trackers share.

    Trackio identifies a run by its name: the run's name and the first digits of its id.

    Args:
        project: None: ``dalsegno``.
        space_id: Space that shows the project; None: ``TRACKIO_SPACE_ID``, or the local store, in ``TRACKIO_DIR``.
        cards: of which checkpoints a model card is logged: ``OnBest()``, ``Every(steps=1000)``, or that as text; None:
            of none.
        wait_s: seconds that the end of training waits for Trackio.
        name: the key of its state in checkpoints; None: the class's name.

    Raises:
        ConfigurationError: if trackio is not installed, or for an invalid value.
    """

    tracker_class = TrackioTracker
    package, extra = "trackio", "trackio"

    def __init__(
        self,
        project: str | None = None,
        *,
        space_id: str | None = None,
        cards: SaveTrigger | str | None = None,
        wait_s: float = 30.0,
        name: str | None = None,
    ) -> None:
        super().__init__(
            {"project": project or "dalsegno", "space_id": space_id}, cards=cards, wait_s=wait_s, name=name
        )


def _values(entry: Entry) -> dict[str, Any]:
    import trackio

    if isinstance(entry, Points):
        return dict(entry.values)
    if isinstance(entry, Text):
        return {entry.tag: trackio.Markdown(entry.text)}
    if isinstance(entry, Card):
        return {f"checkpoints/{entry.name}": trackio.Markdown(entry.text)}
    assert isinstance(entry, Histogram), "the sender calls return_to for a return"
    return {entry.tag: trackio.Histogram(np_histogram=(np.array(entry.counts), np.array(entry.edges)))}
