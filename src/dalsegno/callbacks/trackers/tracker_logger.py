"""TrackerLogger: base class of the loggers that write to an experiment tracker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypedDict

from dalsegno.callbacks.argument_checks import number
from dalsegno.callbacks.loggers.json_logger import warn_not_writing
from dalsegno.callbacks.loggers.summary_writer import RewoundWriter
from dalsegno.callbacks.trackers.outbox import Sender
from dalsegno.callbacks.trackers.tracker import code_versions, model_card, public
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError
from dalsegno.events import contexts
from dalsegno.logs import RunFile
from dalsegno.logs.values import to_json
from dalsegno.policies.triggers import SaveTrigger, save_trigger
from dalsegno.stateful import schema
from dalsegno.system.imports import require_extra

from .outbox import OUTBOXES, Outbox
from .tracker import Card, Entry, Histogram, Points, Status, Text, TrackedRun, Tracker

logger = logging.getLogger("dalsegno")

_STATUS: dict[str, Status] = {"exception": "failed", "aborted": "failed", "interrupted": "killed"}
"""By the reason for which a leg ended, if it is not "finished"."""


class TrackerState(TypedDict):
    run_id: str
    position: schema.Count


class TrackerLogger(RewoundWriter):
    """Writes the numbers of each record, model cards, texts and histograms to one run of a tracker.

    A record is first appended to ``logs/trackers/<key>/outbox.jsonl``; a thread of its own hands it to the tracker's
    client. So training does not wait for the network, and what the tracker does not accept now is sent later, also by a
    later leg. The tracker's run is the same over all legs. A resumed run does not send repeated records again; if they
    differ from those of the killed leg, the tracker's run is rewound, or the step at which they differ is marked.

    It may be the ``summary_writer`` of other callbacks: ``TextgenCallback(summary_writer=tracker)``.
    """

    package: ClassVar[str]
    """Of the client; dalsegno's extra of the same name installs it."""

    ranks = "zero"
    state_compared = False  # the length of the outbox, which only rank 0 knows
    state_varies = ("run_id", "position")
    state_schema: Any = TrackerState | None

    def __init__(
        self, new_tracker: Callable[[], Tracker], *, cards: SaveTrigger | str | None, wait_s: float, name: str | None
    ) -> None:
        """``new_tracker`` is called for each call of ``train()``; the other arguments are those of the subclasses."""
        self.name = name
        self._new_tracker = new_tracker
        try:
            self._cards = None if cards is None else save_trigger(cards)
        except ConfigurationError as error:
            raise ConfigurationError(f"{type(self).__name__}: cards={cards!r}: {error}") from None
        self._wait_s = number(type(self).__name__, "wait_s", wait_s, least=0)
        require_extra(self.package, self.package, type(self).__name__)
        self._outbox: Outbox | None = None  # on rank 0, while training runs
        self._sender: Sender | None = None
        self._saved: TrackerState | None = None

    # -- events -----------------------------------------------------------------------------------------------------

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        directory = ctx.args.directory / "logs"
        if self._saved is None:
            run = RunFile(ctx.args.directory).load()
            run_id = run.run_id if run is not None else f"{time.time_ns():016x}"
            self._saved = {"run_id": run_id, "position": 0}
        run_id = self._saved["run_id"]
        outbox = self._outbox = Outbox(directory / OUTBOXES / self.key)
        outbox.replay_from(self._saved["position"])
        settings = public(to_json(ctx.args.to_dict()))
        name = ctx.args.run_name or ctx.args.directory.name

        def describe() -> TrackedRun:
            return TrackedRun(run_id, name, directory, settings, code_versions())

        self._sender = Sender(self.key, self._new_tracker(), outbox, describe)

    def on_log(self, ctx: contexts.LogContext) -> None:
        values = {
            name: float(value) if isinstance(value, float) else int(value)
            for name, value in ctx.logs.items()
            if isinstance(value, (int, float)) and name != "step"
        }
        if values:
            self._add(Points(ctx.state.global_step, time.time(), values))

    def on_save(self, ctx: contexts.SaveContext) -> None:
        if self._cards is not None and (self._cards.at_step(ctx.step) or (self._cards.on_best and ctx.is_best)):
            self._add(Card(ctx.step, time.time(), ctx.path.name, model_card(ctx)))

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        outbox, sender, self._outbox, self._sender = self._outbox, self._sender, None, None
        if outbox is None or sender is None or self._saved is None:
            return
        self._saved = {**self._saved, "position": outbox.position}
        outbox.make_durable()
        sender.close(_STATUS.get(ctx.reason, "finished"), self._wait_s)
        outbox.close()

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> TrackerState | None:
        if self._saved is None or self._outbox is None:
            return self._saved
        return {**self._saved, "position": self._outbox.position}

    def load_state_dict(self, state: Any) -> None:
        """Expect the entries after the checkpoint again: at once in training (rollback), else when it begins."""
        self._saved = state
        if self._outbox is not None:
            self._outbox.replay_from(0 if state is None else state["position"])

    def make_durable(self) -> None:
        """Fsync the outbox: its length in a checkpoint must be on disk before the checkpoint is published."""
        if self._outbox is not None:
            self._outbox.make_durable()

    # -- as a summary writer ----------------------------------------------------------------------------------------

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Send one point."""
        self._add(Points(global_step, time.time(), {tag: float(scalar_value)}))

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        """Send a text in Markdown."""
        self._add(Text(global_step, time.time(), tag, text_string))

    def add_histogram_raw(
        self,
        tag: str,
        min: float,
        max: float,
        num: int,
        sum: float,
        sum_squares: float,
        bucket_limits: Sequence[float],
        bucket_counts: Sequence[float],
        global_step: int,
    ) -> None:
        """Send a histogram: of each bucket the right edge and the count, ascending from ``min``. ``max``, ``num``,
        ``sum`` and ``sum_squares``, which TensorBoard stores beside them, are not sent."""
        edges = [float(min), *map(float, bucket_limits)]
        self._add(Histogram(global_step, time.time(), tag, edges, [*map(float, bucket_counts)]))

    def _add(self, entry: Entry) -> None:
        if collectives.rank() != 0:
            return
        if self._outbox is None:
            warn_not_writing(self)
            return
        try:
            self._outbox.add(entry)
        except OSError as error:
            logger.error("%s: the entry of step %d is lost (%s); training continues", self.key, entry.step, error)
