"""Resumer: selects the checkpoint that a leg resumes from, restores it, and archives what came after it."""

from __future__ import annotations

import logging
from pathlib import Path

from dalsegno.checkpoint import Checkpoint, LoadReport
from dalsegno.errors import ConfigurationError, DamagedCheckpoint, NotFound
from dalsegno.logs.recoveries import Recovery
from dalsegno.system import archive

from .checkpointer import Checkpointer
from .chosen_start import ChosenStart, ResumeOptions
from .commands import CommandExecutor
from .parts import RunParts
from .rollback import Rollbacks
from .step_boundary import StepBoundary

logger = logging.getLogger("dalsegno")


class Resumer:
    """Brings a run to where a leg begins. All methods are collective."""

    def __init__(
        self,
        parts: RunParts,
        checkpointer: Checkpointer,
        boundary: StepBoundary,
        commands: CommandExecutor,
        rollbacks: Rollbacks,
        chosen: ChosenStart,
    ) -> None:
        self._parts = parts
        self._output_dir = parts.args.directory
        self._dispatcher = parts.dispatcher
        self._state = parts.state
        self._checkpointer = checkpointer
        self._boundary = boundary
        self._commands = commands
        self._rollbacks = rollbacks
        self._chosen = chosen
        self._options = ResumeOptions()  # of the leg

    def select_checkpoint(self, options: ResumeOptions, *, model_modified: bool) -> Checkpoint | None:
        """The verified checkpoint that the leg resumes from; None: it begins at step 0. Fires on_before_load.

        With ``load_components``, a checkpoint of this run still comes first: the run has begun with them already.

        Args:
            model_modified: whether the model in memory has been trained, or loaded, in this process.

        Raises:
            NotFound: if there is no checkpoint at the path.
            DamagedCheckpoint: if the checkpoint at the path is damaged, or none verifies.
            ConfigurationError: if the leg would begin at step 0, but the model is modified.
        """
        self._options = options
        self._continue_rollback(options)
        checkpoint = self._requested_checkpoint(options, model_modified)
        if checkpoint is not None:
            self._dispatcher.before_load.fire_with(checkpoint.path, checkpoint.step)
        elif not options.load_components:
            self._dispatcher.before_load.fire_with(None, 0)
        return checkpoint

    def load(self, checkpoint: Checkpoint, options: ResumeOptions) -> None:
        """Restore everything, and archive what is later on the timeline. Fires on_load.

        Raises:
            StateMismatch: before anything is changed, if a saved state does not fit its object here.
        """
        is_own = self._checkpointer.owns(checkpoint.path, checkpoint.step)
        with self._commands.restoring(checkpoint.step if is_own else 0, goes_back=options.chooses):
            report = self._checkpointer.load(
                checkpoint, strict_callbacks=options.strict_callbacks, allowed=options.allow_changes
            )
            self._continue_from(checkpoint, is_own=is_own)
            if options.chooses:
                self._archive_after(checkpoint.step if is_own else None, self._chosen.record(checkpoint.path), report)
                self._rollbacks.drop("the user has chosen another beginning")
            self._rollbacks.complete()
        if options.chooses:
            self._chosen.complete(is_own=is_own)
        logger.info("resumed from %s\n%s", checkpoint.path, report.table())
        self._report(checkpoint.path, checkpoint.step, report)

    def roll_back(self, recovery: Recovery) -> None:
        """Go back within the leg, as it was decided: archive the later checkpoints, restore everything from the chosen
        one, and fire on_rollback.

        Raises:
            SaveFailed: if ``recoveries.jsonl`` cannot be written.
            NotFound, DamagedCheckpoint: if the checkpoint has been removed or damaged since the decision; the next leg
                goes back to the one before.
        """
        parts, step = self._parts, self._state.global_step
        checkpoint = self._checkpointer.verified(self._checkpointer.path_of(recovery.to_step))
        self._archive_rolled_back(recovery)
        parts.loader.close()
        parts.control.clear_timeline()
        self._state.clock.stop()
        self._commands.go_back(checkpoint.step)
        self._checkpointer.load(checkpoint, strict_callbacks=False, allowed=self._options.allow_changes)
        self._continue_from(checkpoint, is_own=True)
        self._rollbacks.complete()
        parts.witness.go_back(step, checkpoint.step)
        parts.buffers.begin_leg()
        self._boundary.begin_timeline()
        self._state.clock.start()
        self._dispatcher.rollback.fire_with(step, checkpoint.step, recovery.reason)

    def _continue_rollback(self, options: ResumeOptions) -> None:
        """Continue a rollback that was decided in an earlier leg, which ended before it was done."""
        self._rollbacks.begin_leg()
        pending = self._parts.recoveries.pending
        if pending is None:
            return
        if options.chooses:
            self._rollbacks.set_aside()
            return
        self._archive_rolled_back(pending)

    def _archive_rolled_back(self, recovery: Recovery) -> None:
        place = archive.new_archive_dir(self._output_dir) / "checkpoints"
        self._checkpointer.archive_after(recovery.to_step, place)

    def load_components(self, options: ResumeOptions) -> None:
        """Load only ``options.load_components``, as the beginning of a new run. Fires on_before_load and on_load.

        Raises:
            UnknownName: for a name that this run, or the checkpoint, does not have.
            StateMismatch: before anything is changed, if a saved state does not fit its object here.
        """
        path = Path(str(options.origin))
        load = self._checkpointer.component_load(path, options.load_components, options.allow_changes)
        self._dispatcher.before_load.fire_with(path, 0)
        report = load()
        logger.info("initialized with parts of %s\n%s", path, report.table())
        self._report(path, 0, report)

    def _requested_checkpoint(self, options: ResumeOptions, model_modified: bool) -> Checkpoint | None:
        if options.origin is False:
            if model_modified:
                raise ConfigurationError(
                    "resume_from_checkpoint=False: this model is trained already; build a new trainer"
                )
            self._chosen.begin_anew()
            self._rollbacks.begin_leg()
            return None
        if options.origin is not True and not options.load_components:
            return self._checkpointer.verified(Path(options.origin))
        checkpoint = self._checkpointer.newest(strict=options.strict)
        if checkpoint is None and not options.load_components and (origin := self._chosen.origin()) is not None:
            return self._other_runs(origin)
        if checkpoint is None and model_modified:
            raise ConfigurationError(
                "the last train() was aborted or interrupted inside a step, and there is no checkpoint to resume from; "
                "build a new trainer (or Run), which begins at step 0"
            )
        return checkpoint

    def _other_runs(self, path: Path) -> Checkpoint:
        try:
            return self._checkpointer.verified(path)
        except (NotFound, DamagedCheckpoint) as error:
            error.add_note(
                "this run began with it and has no checkpoint of its own yet; restore it, or pass "
                "resume_from_checkpoint= another one, or False to start anew"
            )
            raise

    def _continue_from(self, checkpoint: Checkpoint, *, is_own: bool) -> None:
        """Set what the leg knows of the checkpoint: nothing of its path, metrics and end, if it is another run's."""
        self._boundary.saves.set_latest(*(self._checkpointer.latest_on_disk(checkpoint) if is_own else (None, 0)))
        self._boundary.evaluations.set_metrics(checkpoint.manifest.metrics if is_own else {})
        if not is_own:
            state = self._state
            state.best_metric, state.best_global_step, state.best_model_checkpoint = None, 0, None
            state.given_up = None

    def _archive_after(self, step: int | None, place: Path, report: LoadReport) -> None:
        """Keep one timeline: move the checkpoints after a chosen one's step away; all of them, if it is another run's
        (None)."""
        moved = self._checkpointer.archive_after(step, place / "checkpoints")
        if step is None:
            self._rollbacks.archive(place)
        if moved:
            report.notes.append(f"{len(moved)} later checkpoint(s) are now in {place / 'checkpoints'}")

    def _report(self, path: Path, step: int, report: LoadReport) -> None:
        """Warn about changes since the save, then fire on_load."""
        changes = [str(change) for change in report.changes if change.severity != "info"]
        if changes and self._state.is_world_process_zero:
            logger.warning("the run resumes with changes:\n  %s", "\n  ".join(changes))
        self._dispatcher.load.fire_with(path, step, report)
