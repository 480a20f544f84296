"""SaveCoordinator: who saves. The saves of one leg, on disk and in memory, from the request to the outcome.

At most one save is in progress beside training; the next one waits for it, so every checkpoint that was requested
exists. When all ranks have finished a save, they are notified of it at the same step boundary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from dalsegno.checkpoint.async_save import AsyncSave
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import are_finite
from dalsegno.errors import SaveFailed
from dalsegno.logs import RunFile
from dalsegno.state import NO_REQUESTS, ControlRequests

from .checkpoint_contents import CheckpointContents
from .checkpoint_sources import CheckpointSources
from .control_sync import expect_lease, requests_against_save
from .full_disk import FailedSaves
from .run_parts import Comparison, RunParts
from .stop_requests import TimeLimit

logger = logging.getLogger("dalsegno")

_SAVE_DONE = ControlRequests(save_done=True)


@dataclass(frozen=True, slots=True)
class _PublishedSave:
    """The save of a checkpoint that the leg resumes from: as an :class:`AsyncSave` that is done."""

    step: int
    path: Path
    is_best: bool
    done: ClassVar = True
    failure: ClassVar = None

    def wait(self) -> None: ...


class SaveCoordinator:
    """Runs requested saves one at a time, fires on_before_save and on_save, and counts failed saves.

    Methods are collective, unless their text says otherwise. Those that capture raise CannotSave on every rank, if a
    state contains what cannot be saved, or the ranks' models differ.
    """

    def __init__(
        self,
        parts: RunParts,
        contents: CheckpointContents,
        checkpoints: CheckpointSources,
        run_file: RunFile,
        time_limit: TimeLimit,
    ) -> None:
        self._parts = parts
        self._args = parts.args
        self._state = parts.state
        self._contents = contents
        self._checkpoints = checkpoints
        self._run_file = run_file
        self._time_limit = time_limit
        self._current: AsyncSave | _PublishedSave | None = None  # in progress, or done and not yet finalized
        self._captured_state = parts.state  # as of the save in progress
        self._best_before: str | None = None  # the best checkpoint before the save in progress
        self._pretrained: Mapping[str, bytes] | None = None
        self.set_latest(None)
        self.begin_leg()

    def begin_leg(self) -> None:
        """Forget the failures of the previous leg."""
        self.captured_step: int | None = None
        """The newest step of this leg whose state was captured, for a checkpoint on disk or in memory."""
        self.failed = FailedSaves(self._args.max_failed_saves)
        self._is_prepared = not (self._args.saving and self._args.save_in_background)
        self._memory_is_prepared = not self._args.saving_in_memory

    def set_latest(self, checkpoint: Path | None, step: int = 0) -> None:
        """Set the run's newest checkpoint. Its on_save fires again, where it would without an interruption, if that
        came after the restored state: so what handlers logged there, and the rewind has cut off, is logged again."""
        self.newest = checkpoint
        """The newest published checkpoint."""
        self._published_step = self._requested_step = None if checkpoint is None else step
        self._current = None
        if checkpoint is not None and self._state.save_owed == step:
            is_best = self._state.best_model_checkpoint == self._relative(checkpoint)
            self._current, self._captured_state = _PublishedSave(step, checkpoint, is_best), self._state.copy()
        else:
            self._state.save_owed = None

    def is_on_disk(self) -> bool:
        """Whether the newest published checkpoint contains every finished step; one in memory may contain more."""
        return self._state.global_step <= (self._published_step or 0)

    def poll(self) -> ControlRequests:
        """Request :meth:`finalize` once a save is done on this rank: a source for ``ControlSync``."""
        return _SAVE_DONE if self._current is not None and self._current.done else NO_REQUESTS

    # -- before the first save ----------------------------------------------------------------------------------

    def check_serializable(self) -> None:
        """Capture every state as a save does, and write nothing; and what each save of this leg writes for
        ``from_pretrained`` beside weights."""
        if self._args.saving:
            with self._parts.random_state.kept():
                if self._args.saving_pretrained:
                    self._pretrained = collectives.run_on_all_ranks(self._contents.pretrained_files)
                self._checkpoints.manager.check_serializable(self._contents.sharded(), self._contents.components())

    def make_room_in_memory(self) -> None:
        """Free what no leg resumes from any more; reserve room, if this leg saves in memory. Raises ConfigurationError
        on all ranks, if the state does not fit."""
        when, base = self._args.saving_in_memory, self._checkpoints.manager.base
        self._checkpoints.memory.begin_leg(self._contents.sharded(), saving=bool(when), copies=when.copies, base=base)

    def prepare(self) -> None:
        """Allocate save buffers once in a leg, after its first step, when the optimizer has state."""
        if not self._is_prepared:
            self._is_prepared = True
            with self._parts.random_state.kept():
                if self._parts.comparison is Comparison.FROM_FIRST_STEP:
                    self._contents.expect_equal_ranks()
                self._checkpoints.manager.prepare(self._contents.sharded())
        if not self._memory_is_prepared:
            self._memory_is_prepared = True
            with self._parts.random_state.kept():
                self._checkpoints.memory.prepare(self._contents.sharded())

    # -- saves --------------------------------------------------------------------------------------------------

    def save_in_memory(self, metrics: Mapping[str, float]) -> ControlRequests:
        """Save this step in shared memory, unless it is saved to disk or a handler of on_before_save calls it off;
        returns the requests that do.

        While a save to disk is in progress, the state is only copied. A later copy replaces this one. It is published
        once the checkpoint on disk is; if that save fails, it is dropped. So a leg that resumes from this step finds
        the same checkpoints as an uninterrupted run.
        """
        memory, step = self._checkpoints.memory, self._state.global_step
        if self._requested_step == step:
            return NO_REQUESTS
        self._memory_is_prepared = True
        with self._parts.random_state.kept():
            called_off = self._announce(memory.path_of(step))
            if called_off.abort or called_off.roll_back:
                return called_off
            self._contents.expect_equal_ranks()
            sharded, components = self._contents.sharded(), self._contents.components()
            carried = self._checkpoints.manager.carried
            memory.capture(step, sharded, components, carried, metrics=metrics, is_finite=self._is_finite())
            self.captured_step = step
            if self._current is None:
                memory.publish()
        return called_off

    def save(self, metrics: Mapping[str, float], *, is_planned: bool = True) -> ControlRequests:
        """Save this step, unless that was requested before or a handler of on_before_save calls it off; returns the
        requests that do.

        ``metrics`` are of the evaluation at this step. ``is_planned``: a run that is not interrupted here saves it,
        too.
        """
        step = self._state.global_step
        if self._requested_step == step:
            return NO_REQUESTS
        self.finalize()
        self._is_prepared = True
        is_best = self._mark_if_best()
        with self._parts.random_state.kept():
            called_off = self._announce(self._checkpoints.manager.path_of(step))
            if called_off.abort or called_off.roll_back:
                return called_off
            self._state.save_owed = step if is_planned else None
            self._captured_state = self._state.copy()
            self._contents.expect_equal_ranks()
            self._checkpoints.memory.settle()  # its thread uses the same process group
            self._current = self._checkpoints.manager.save_async(
                step,
                self._contents.sharded(),
                self._contents.components(),
                metrics=metrics,
                is_best=is_best,
                is_finite=self._is_finite(),
                background=self._args.save_in_background,
                pretrained=self._pretrained if self._is_for_pretrained(is_best) else None,
                published=partial(self._record_published, step, time.monotonic()),
                settled=self._checkpoints.mirror.poll,
            )
        self._requested_step = self.captured_step = step
        self._parts.witness.note_captured(step)
        if not self._args.save_in_background:
            self.finalize()
        return NO_REQUESTS

    def _is_for_pretrained(self, is_best: bool) -> bool:
        when, state = self._args.saving_pretrained, self._state
        is_last = state.global_step >= state.max_steps or state.given_up is not None
        ends_epoch = state.epoch % 1 == 0 and when.at_epoch(int(state.epoch))
        return is_last or ends_epoch or when.at_step(state.global_step) or (is_best and when.on_best)

    def _announce(self, path: Path) -> ControlRequests:
        """Fire on_before_save; the requests against the save."""
        self._parts.dispatcher.before_save.fire_with(path, self._state.global_step)
        return requests_against_save(self._parts.control)

    def _is_finite(self) -> bool:
        """Whether this rank's weights are not known to contain NaN or infinity. Local."""
        return not self._parts.metrics.is_broken() or are_finite(self._parts.model)

    def _record_published(self, step: int, began: float) -> None:
        """On rank 0, on the thread that has saved."""
        self._run_file.progress(step)
        self._time_limit.allow_for(time.monotonic() - began)

    def amend(self, metrics: Mapping[str, float]) -> None:
        """Add ``metrics`` to this step's checkpoint, if it was saved before its evaluation."""
        step = self._state.global_step
        if self._requested_step == step:
            self.finalize()
        if self._published_step == step:
            self._checkpoints.manager.amend(step, metrics=metrics, is_best=self._mark_if_best())

    def _mark_if_best(self) -> bool:
        """Whether this step was evaluated as the best so far; if so, its checkpoint becomes the best one."""
        state = self._state
        self._best_before = state.best_model_checkpoint
        if state.best_metric is None or state.best_global_step != state.global_step:
            return False
        state.best_model_checkpoint = self._relative(self._checkpoints.manager.path_of(state.global_step))
        return True

    # -- outcomes -----------------------------------------------------------------------------------------------

    def finalize(self) -> None:
        """Wait for the save in progress, if any; fire on_save, or count its failure.

        Raises LeaseLost if it has failed because another process has taken the run over; SaveFailed if
        ``max_failed_saves`` in a row have failed.
        """
        save = self._current
        if save is None:
            return
        save.wait()
        self._current = self._state.save_owed = None
        if save.failure is not None:
            self._checkpoints.memory.drop()  # its state may name the failed one as the best
            expect_lease(self._checkpoints.lease_loss())
            self._note_failure(save, save.failure)
            return
        self._note_success(save)
        self._checkpoints.memory.publish()
        if self._parts.dispatcher.save:
            state = self._state if self._state.global_step == save.step else self._captured_state
            with self._parts.random_state.kept():  # the step at which it fires depends on the disk
                self._parts.dispatcher.fire_save(state, save.path, save.step, save.is_best)

    def finish(self) -> None:
        """Finalize the last save of a leg that ends without an exception. Raises SaveFailed if it has failed; LeaseLost
        on all ranks, if another process has taken the run over."""
        self.finalize()
        self.failed.expect_last()
        expect_lease(self._checkpoints.lease_loss())

    def close(self) -> None:
        """At the end of every leg: wait for a save still in progress, without callbacks. Not collective: after an
        exception the other ranks may be gone."""
        save, self._current = self._current, None
        if save is None:
            return
        try:
            save.wait()
            failure = save.failure
        except KeyboardInterrupt:
            failure = SaveFailed(f"{save.path.name} was cancelled by Ctrl-C")
        except SaveFailed as error:
            failure = error
        if failure is None:
            self._note_success(save)
        elif collectives.rank() == 0:
            logger.error("%s", failure)

    def _note_success(self, save: AsyncSave | _PublishedSave) -> None:
        self.failed.note_success()
        if self._published_step not in (None, save.step):
            self._parts.witness.note_published(self._published_step)
        self.newest, self._published_step = save.path, save.step

    def _note_failure(self, save: AsyncSave | _PublishedSave, failure: SaveFailed) -> None:
        self._requested_step = self._published_step
        if self._state.best_model_checkpoint == self._relative(save.path):
            self._state.best_model_checkpoint = self._best_before
        self.failed.note(failure)

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._args.directory).as_posix()
