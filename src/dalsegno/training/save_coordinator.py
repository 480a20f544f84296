"""Saves: the checkpoints of a leg, from the wish for one to what has become of it.

At most one is on its way to the disk, beside the training: the next one waits for it, so that every checkpoint that was
asked for exists. Once it has landed on all ranks, they hear of it at the same step boundary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from dalsegno.args import TrainingArguments
from dalsegno.distributed import collectives
from dalsegno.errors import SaveFailed
from dalsegno.events.dispatcher import Dispatcher
from dalsegno.state import NO_REQUESTS, ControlRequests, TrainerState

logger = logging.getLogger("dalsegno")

_LANDED = ControlRequests(save_done=True)


class Flight(Protocol):
    """A save that is on its way, or has come to its end; the same end on all ranks."""

    step: int
    path: Path
    is_best: bool
    failure: SaveFailed | None

    @property
    def done(self) -> bool:
        """Whether this rank knows how it ended."""
        ...

    def wait(self) -> None:
        """Wait until it has landed. What breaks that off (Ctrl-C) gives it up.

        Raises:
            SaveFailed: if nothing moves any more.
        """
        ...


class Saver(Protocol):
    """Where checkpoints go."""

    def path_of(self, step: int) -> Path:
        """The folder of that step's checkpoint."""
        ...

    def rehearse(self) -> None:
        """Take the state of every component as a save does, and write nothing. Collective.

        Raises:
            CannotSave: on every rank, if a state holds what cannot be saved.
        """
        ...

    def prepare(self) -> None:
        """Make ready for the first save, once everything has its size. Collective."""
        ...

    def save(self, step: int, *, metrics: Mapping[str, float], is_best: bool) -> Flight:
        """Capture the state of every component, and send it on its way. Collective."""
        ...

    def amend(self, step: int, *, metrics: Mapping[str, float], is_best: bool) -> None:
        """Note in that step's checkpoint, which is published, what only came out afterwards. Collective."""
        ...

    def load_best_model(self) -> None:
        """Put the best checkpoint's weights into the model, if that is wanted and there is one. Collective."""
        ...


class SaveCoordinator:
    """What a boundary saves, and tells of it."""

    def __init__(
        self,
        args: TrainingArguments,
        on: Dispatcher,
        state: TrainerState,
        saver: Saver,
        *,
        is_called_off: Callable[[], bool],
    ) -> None:
        """``is_called_off``: asked behind on_before_save, whether a handler would rather have no checkpoint.
        Collective."""
        self._is_called_off = is_called_off
        self._args = args
        self._on = on
        self._state = state
        self._saver = saver
        self._flight: Flight | None = None
        self._best_before: str | None = None  # the best checkpoint, before the one in flight
        self.set_latest(None)
        self.begin_leg()

    def begin_leg(self) -> None:
        """No failure of a former leg is left."""
        self._failures: list[SaveFailed] = []  # in a row
        self._is_wanted = True
        self._is_prepared = not (self._args.saving and self._args.save_in_background)

    def set_latest(self, checkpoint: Path | None, step: int = 0) -> None:
        """The newest checkpoint of this run is that one."""
        self.newest = checkpoint
        """The newest that is published."""
        self._published_step = self._asked_step = None if checkpoint is None else step

    def poll(self) -> ControlRequests:
        """Whether a save has landed that nobody was told of: a source for the agreement."""
        return _LANDED if self._flight is not None and self._flight.done else NO_REQUESTS

    def prepare(self) -> None:
        """Once in a leg, after its first step: the optimizer has its state by then. Collective."""
        if not self._is_prepared:
            self._is_prepared = True
            self._saver.prepare()

    def save(self, metrics: Mapping[str, float]) -> None:
        """Ask for a checkpoint of this step, unless that has been done, or a handler calls it off. Collective.

        Raises:
            CannotSave: on every rank, if a state holds what cannot be saved.
        """
        on, step = self._on, self._state.global_step
        if self._asked_step == step:
            return
        self.finalize()
        self._is_prepared = True
        path, is_best = self._saver.path_of(step), self._is_best()
        if on.before_save:
            on.before_save.fill(path, step)
            on.before_save.fire()
        if self._is_called_off():
            return
        self._flight = self._saver.save(step, metrics=metrics, is_best=is_best)
        self._asked_step = step
        if not self._args.save_in_background:
            self.finalize()

    def amend(self, metrics: Mapping[str, float]) -> None:
        """Let this step's checkpoint know, if it was saved before the evaluation. Collective."""
        step = self._state.global_step
        if self._asked_step == step:
            self.finalize()
        if self._published_step == step:
            self._saver.amend(step, metrics=metrics, is_best=self._is_best())

    def _is_best(self) -> bool:
        """Whether this step's checkpoint, which is there or about to be, is the best; if so, that is remembered."""
        state = self._state
        self._best_before = state.best_model_checkpoint
        if state.best_metric is None or state.best_global_step != state.global_step:
            return False
        state.best_model_checkpoint = self._relative(self._saver.path_of(state.global_step))
        return True

    def finalize(self) -> None:
        """Wait for the save that is on its way, if there is one, and tell what has become of it. On all ranks.

        Raises:
            SaveFailed: if too many in a row have failed.
        """
        flight = self._flight
        if flight is None:
            return
        flight.wait()
        self._flight = None
        if flight.failure is not None:
            self._note_failure(flight, flight.failure)
            return
        self._note_success(flight)
        on = self._on
        if on.save:
            on.save.fill(flight.path, flight.step, flight.is_best)
            on.save.fire()

    def skip_final_save(self) -> None:
        """All ranks have agreed to end this leg without a checkpoint: that the last one has failed is no error then."""
        self._is_wanted = False

    def settle(self) -> None:
        """Before a leg ends by itself: wait for the last save, tell of it, and let nothing be lost silently.

        Raises:
            SaveFailed: if it has failed.
        """
        self.finalize()
        if self._failures and self._is_wanted:
            raise self._failures[-1]

    def leave(self) -> None:
        """On the way out of an exception: wait for the save all the same, but tell no callback. No collective."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        try:
            flight.wait()
            failure = flight.failure
        except KeyboardInterrupt:
            failure = SaveFailed(f"{flight.path.name} was given up on Ctrl-C")
        except SaveFailed as error:
            failure = error
        if failure is None:
            self._note_success(flight)
        elif collectives.rank() == 0:
            logger.error("%s", failure)

    def _note_success(self, flight: Flight) -> None:
        self._failures.clear()
        self.newest, self._published_step = flight.path, flight.step

    def _note_failure(self, flight: Flight, failure: SaveFailed) -> None:
        self._failures.append(failure)
        self._asked_step = self._published_step
        if self._state.best_model_checkpoint == self._relative(flight.path):
            self._state.best_model_checkpoint = self._best_before
        if len(self._failures) >= self._args.max_failed_saves:
            failure.add_note(f"max_failed_saves={self._args.max_failed_saves} in a row")
            raise failure
        if collectives.rank() == 0:
            logger.error("%s; training goes on, and the next save is tried as if nothing had happened", failure)

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._args.directory).as_posix()
