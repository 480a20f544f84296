"""WandbLogger: writes to Weights & Biases."""

from __future__ import annotations

import html
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from dalsegno.analysis.formats.source import Naming, Skipped, named
from dalsegno.analysis.formats.trackers import wandb_files, wandb_rows
from dalsegno.policies.triggers import SaveTrigger

from .tracker import Card, Entry, Histogram, Points, Return, Status, Text, TrackedRun, Tracker
from .tracker_logger import TrackerLogger

logger = logging.getLogger("dalsegno")

STEP = "global_step"

_SERVICE_WAIT_S = 120
"""Seconds for W&B's service to start; its default of 30 is short for a machine whose cores are busy."""


class WandbTracker(Tracker):
    """A row of W&B's history has all values of a step; W&B writes it once a later step begins."""

    stores_at_once = False  # W&B's service keeps rows in memory

    def __init__(self, project: str | None, entity: str | None, mode: str | None, wait_s: float) -> None:
        self._project, self._entity, self._mode, self._wait_s = project, entity, mode, wait_s
        self._described: TrackedRun | None = None
        self._run: Any = None
        self._arrived: set[tuple[int, str]] = set()
        """Step and name of each value that earlier processes of an offline run have stored."""

    def open(self, run: TrackedRun) -> None:
        if self._described is not None:
            self._forget_failed()
        self._described = run
        self._begin(resume="allow")
        if self._run.offline:
            files = wandb_files(run.directory / "wandb", f"run-{run.id}.wandb")
            rows = enumerate(row for path in files for row in wandb_rows(path, Skipped()))
            # W&B writes a histogram or text as <name>._type and others.
            sound = named(rows, Naming(STEP, None, None), Skipped())
            self._arrived = {(row.get(STEP, -1), name.removesuffix("._type")) for row in sound for name in row}

    def _forget_failed(self) -> None:
        """Stop W&B's service, in which a run whose opening failed stays "in use"; not under a run of the user's own."""
        import wandb

        self._run = None
        if wandb.run is None:
            wandb.teardown()

    def _begin(self, **how: str) -> None:
        import wandb

        run = self._described
        assert run is not None, "open() has set it"
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            mode=self._mode,  # type: ignore[arg-type]
            name=run.name,
            id=run.id,
            dir=str(run.directory),
            config={**run.settings, "code": dict(run.code)},
            allow_val_change=True,
            reinit="create_new",  # a run of the user's own stays as it is
            settings=wandb.Settings(
                console="off", silent=True, finish_timeout=self._wait_s, x_service_wait=_SERVICE_WAIT_S
            ),
            **how,  # type: ignore[arg-type]
        )
        self._run.define_metric("*", step_metric=STEP)

    def has(self, entry: Entry) -> bool:
        names: list[str] = []
        if isinstance(entry, Points):
            names = [*entry.values]
        elif isinstance(entry, (Text, Histogram)):
            names = [entry.tag]
        if self._run.offline:
            return bool(names) and all((entry.step, name) in self._arrived for name in names)
        is_past = bool(entry.step < self._run.step - 1)  # the step before it may have arrived in part
        return is_past and bool(names)

    def send(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if isinstance(entry, Card):
                self._log_card(entry)
            else:
                row = {STEP: entry.step, **_values(entry)}
                self._run.log(row, step=entry.step if entry.step >= self._run.step else None)

    def _log_card(self, card: Card) -> None:
        import wandb

        assert self._described is not None
        artifact = wandb.Artifact(f"{self._described.id}-checkpoints", type="model-card", metadata={"step": card.step})
        with artifact.new_file("README.md") as file:
            file.write(card.text)
        self._run.log_artifact(artifact, aliases=[card.name])

    def return_to(self, point: Return) -> None:
        """Ask the server to rewind the run; offline, or if it refuses, mark the return in a new part of the run."""
        assert self._described is not None
        was_offline = self._run.offline
        self._run.finish()
        if not was_offline and self._rewound(point.step):
            return
        self._begin(resume="allow")
        super().return_to(point)

    def _rewound(self, step: int) -> bool:
        import wandb

        assert self._described is not None
        try:
            self._begin(resume_from=f"{self._described.id}?_step={step}")
        except wandb.Error as error:
            logger.warning("W&B does not rewind the run to step %d (%s); the return is marked", step, error)
            return False
        return True

    def close(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class WandbLogger(TrackerLogger):
    """Logs to Weights & Biases: one W&B run for all legs of the run. docs/guides/trackers.md describes what all
    trackers share.

    The API key is read by W&B, from ``WANDB_API_KEY`` or its own login. W&B's files are in ``logs/wandb``. Each leg of
    an offline run has a directory there, all with the same run id; ``wandb sync`` uploads them in their order.

    Args:
        project: None: ``WANDB_PROJECT``, or W&B's default.
        entity: user or team; None: ``WANDB_ENTITY``, or W&B's default.
        mode: ``online`` or ``offline``; None: ``WANDB_MODE``, or online.
        cards: of which checkpoints a model card is logged as an artifact: ``OnBest()``, ``Every(steps=1000)``, or that
            as text; None: of none.
        wait_s: seconds that the end of training waits for W&B.
        name: the key of its state in checkpoints; None: the class's name.
    """

    package = "wandb"

    def __init__(
        self,
        project: str | None = None,
        *,
        entity: str | None = None,
        mode: str | None = None,
        cards: SaveTrigger | str | None = None,
        wait_s: float = 30.0,
        name: str | None = None,
    ) -> None:
        tracker = partial(WandbTracker, project, entity, mode, wait_s)
        super().__init__(tracker, cards=cards, wait_s=wait_s, name=name)


def _values(entry: Entry) -> dict[str, Any]:
    import wandb

    if isinstance(entry, Text):
        return {entry.tag: wandb.Html(f"<pre>{html.escape(entry.text)}</pre>")}
    if isinstance(entry, Histogram):
        return {entry.tag: wandb.Histogram(np_histogram=(np.array(entry.counts), np.array(entry.edges)))}
    assert isinstance(entry, Points), "the sender calls return_to for a return"
    return dict(entry.values)
