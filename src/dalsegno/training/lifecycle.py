"""RunLifecycle: a run over its legs in this process. Locks its directory, restores it, and remembers how it ended."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.data import IterableDataset

from dalsegno.args import TrainingArguments
from dalsegno.checkpoint import Checkpoint, LoadReport
from dalsegno.control import CommandQueue
from dalsegno.data import NOT_EXACT, TrainingData
from dalsegno.data.generators import OwnStates
from dalsegno.data.step_batch import LossWeight, agreed_position
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import are_finite, check_materialized
from dalsegno.errors import ConfigurationError, DamagedCheckpoint, Locked, NotFound, first_few
from dalsegno.events.callback import Callback
from dalsegno.logs import RecordLog, RunFile
from dalsegno.policies.recovery import Rollback
from dalsegno.state import TrainerControl, TrainerState
from dalsegno.stateful.annotations import check_types
from dalsegno.stateful.component import Stateful, is_stateful, stateful_behind
from dalsegno.system import filesystem
from dalsegno.system.exit_status import ExitStatus
from dalsegno.system.lock import DirectoryLock, is_visible
from dalsegno.witness import Unsaved

from .checkpoint_contents import CheckpointContents, RecordedSettings, UserSupplied
from .checkpoint_sources import CheckpointSources
from .chosen_start import ChosenStart, ResumeOptions
from .commands import CommandExecutor
from .evaluation import Evaluation, expect_evaluations
from .leg_recorder import LastLeg, LegRecorder
from .result import TrainResult
from .rollback import RollbackDecisions
from .run_parts import RunParts
from .save_coordinator import SaveCoordinator
from .session import Session
from .step_boundary import StepBoundary
from .stop_requests import Requeue, SignalWatcher, TimeLimit
from .variables import Variables

logger = logging.getLogger("dalsegno")


_LEFT: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Models with weights of a leg in this process that has not saved them, or was stopped in time; and these, in words."""


class RunLifecycle:
    """Shared by the Trainer and a hand-written loop. Lives as long as the user's object; a
    :class:`~dalsegno.training.session.Session` lives for one leg. All methods are collective.
    """

    def __init__(
        self,
        parts: RunParts,
        *,
        evaluations: Sequence[Evaluation],
        data: TrainingData,
        supplied: UserSupplied,
        others: Mapping[str, Stateful],
        functions: Mapping[str, Any],
    ) -> None:
        """``functions``: of the user's, by argument; ``loss_weight`` weighs the batches of a step."""
        args = parts.args
        self._parts = parts
        self._loss_weight: LossWeight | None = functions.get("loss_weight")
        self._unsaved = _unsaved(parts, data, others, functions)
        self._signals = SignalWatcher(parts.control)
        self._time_limit = TimeLimit(parts.control, args.max_seconds)
        self._requeue = Requeue(enabled=args.requeue)
        self._run_file = RunFile(args.directory)
        self._chosen = ChosenStart(args.directory, has_url=args.url is not None)
        self._settings = RecordedSettings(parts, supplied, data)
        contents = CheckpointContents(parts, self._settings, others)
        self._checkpoints = CheckpointSources(parts, contents, self._settings, self._run_file, self._chosen)
        self._saves = SaveCoordinator(parts, contents, self._checkpoints, self._run_file, self._time_limit)
        self._commands = CommandExecutor(parts, self._settings, evaluates=bool(evaluations))
        self.commands = self._commands.queue
        """Accepts commands to the run."""
        self._rollbacks = RollbackDecisions(parts, self._checkpoints, self._run_file)
        sources = self._signals, self._time_limit, self._saves, self._commands, self._checkpoints
        self.boundary = StepBoundary(
            parts,
            self._saves,
            evaluations,
            [each.poll for each in sources],
            self._commands,
            self._rollbacks,
            self._checkpoints.lease_loss,
        )
        self._session: Session | None = None  # of the newest leg; None if the run was finished before it
        self._result: TrainResult | None = None  # of the previous leg in this process
        self._options = ResumeOptions()  # of the leg
        self.resumed_from: Path | None = None
        """The checkpoint that the leg resumed from."""
        self._model_modified = False  # trained, or loaded, in this process
        self._repeats = False  # the leg resumes from a checkpoint of this run, and not to roll back
        self._changed: list[str] = []  # settings, since the checkpoint from which the leg resumes

    @contextmanager
    def leg(self, options: ResumeOptions) -> Iterator[Session | TrainResult]:
        """Hold the run's directory for this process, watch for signals and the end of the job, and restore: see
        ``Trainer.train``. Yields the session to be entered; or how the run ended, if it is finished already.

        At the end, a job that was stopped in time is requeued: no file of the run is open any more.
        """
        parts = self._parts
        self._time_limit.start()
        with self._signals.listening():
            with locked_run_dir(parts.args), self._checkpoints.opened():
                self._session = None  # not before: the lock refuses a leg inside another one, which continues
                try:
                    vars(parts.args)["_in_leg"] = id(parts.args)
                    self.resumed_from = self.restore(options)
                    finished = self._finished_result()
                    yield self._new_session() if finished is None else finished
                finally:  # the next leg puts the commands in force again
                    self._commands.undo_settings()
                    del vars(parts.args)["_in_leg"]
                    if self._session is not None:
                        _LEFT.pop(parts.model, None)
                        step, folder, result = parts.state.global_step, parts.args.output_dir, self._session.result
                        if not self._saves.is_on_disk():
                            _LEFT[parts.model] = (
                                f"weights that no checkpoint contains, left in this model by step {step} of the run in "
                                f"{folder}: in another process it would begin with others. Build the model anew, or "
                                "load a checkpoint into it"
                            )
                        elif result is not None and result.exit_status is ExitStatus.RUN_AGAIN:
                            _LEFT[parts.model] = (
                                f"the weights of step {step}, at which the run in {folder} was stopped ({result.why}): "
                                "without that stop it would begin with others. End the program after a stop: "
                                "if status := trainer.train().exit_status: sys.exit(status)"
                            )
            if self._session is not None and self._session.result is not None:
                self._result = self._session.result  # without an exception: the next leg may start from memory
                self._requeue.end_leg(self._result)

    # -- restore ------------------------------------------------------------------------------------------------

    def restore(self, options: ResumeOptions) -> Path | None:
        """Restore what the leg begins with: see ``Trainer.train``. The checkpoint that it resumes from."""
        parts = self._parts
        parts.callbacks.rebind()
        expect_evaluations(parts.args, parts.callbacks.bound, has_sets=self.boundary.evaluations.has_sets)
        parts.control.clear()
        parts.state.max_steps = parts.plan()  # for on_before_load; commands may change it
        parts.state.num_train_epochs = parts.args.num_train_epochs
        self._settings.begin_session()
        path = self._restored(options)
        self._checkpoints.start_uploads(path)
        return path

    def _restored(self, options: ResumeOptions) -> Path | None:
        parts, former = self._parts, self._result
        self._repeats = False
        with collectives.rank_zero_ahead():
            self._checkpoints.manager.remove_partial()
            options = self._options = self._chosen.completed(options)
            is_in_memory = former is not None and self._is_in_memory(former)
            if not is_in_memory:
                self._rollbacks.begin_leg()
                pending = parts.rollback_effects.pending  # decided in an earlier leg, which ended before it was done
                if pending is not None and options.chooses:
                    self._rollbacks.set_aside()
                elif pending is not None:
                    self._archive_rolled_back(pending)
                checkpoint = self._select_checkpoint()
        if former is not None and is_in_memory:
            self._commands.restore(parts.state.global_step)
            parts.flags.keep()
            return former.checkpoint
        parts.random_state.start()  # an imported checkpoint has no state of it
        if checkpoint is not None:
            parts.dispatcher.before_load.fire_with(checkpoint.path, checkpoint.step)
            self._model_modified = True  # even if the load fails
            goes_back = parts.rollback_effects.pending is not None
            self._load(checkpoint)
            self._repeats = not goes_back and self._checkpoints.owns(checkpoint.path, checkpoint.step)
            return checkpoint.path
        if not options.load_components:
            parts.dispatcher.before_load.fire_with(None, 0)
        self._commands.restore(0)
        if options.load_components:
            self._load_components()
        elif (left := _LEFT.get(parts.model)) is not None:
            logger.warning("this run begins with %s", left, extra={NOT_EXACT: True})
        self._rollbacks.complete()
        return None

    def _is_in_memory(self, result: TrainResult) -> bool:
        """Whether memory still holds the state in which ``result``, of the previous leg in this process, left the run.

        After an abort it does not count: what was trained since the newest checkpoint is not to be kept, and may be
        NaN. So the next leg loads that checkpoint, as it would in a new process.
        """
        args, options = self._parts.args, self._options
        if options.origin is not True or args.load_best_model_at_end:  # memory holds the best model, not the last
            return False
        if result.reason != "aborted":
            return True
        return not options.continue_stopped and LastLeg.read(self._run_file, args).ended_run

    def _select_checkpoint(self) -> Checkpoint | None:
        """The verified checkpoint that the leg resumes from; None: it begins at step 0.

        With ``load_components``, a checkpoint of this run still comes first: the run has begun with them already.
        """
        options = self._options
        if options.origin is False:
            if self._model_modified:
                raise ConfigurationError(
                    "resume_from_checkpoint=False: this model is trained already; build a new trainer"
                )
            self._chosen.begin_anew()
            self._rollbacks.begin_leg()
            return None
        if options.origin is not True and not options.load_components:
            return self._checkpoints.verified(Path(options.origin))
        checkpoint = self._checkpoints.newest(strict=options.strict)
        if checkpoint is None and not options.load_components and (origin := self._chosen.origin()) is not None:
            try:
                return self._checkpoints.verified(origin)
            except (NotFound, DamagedCheckpoint) as error:
                error.add_note(
                    "this run began with it and has no checkpoint of its own yet; restore it, or pass "
                    "resume_from_checkpoint= another one, or False to start anew"
                )
                raise
        if checkpoint is None and self._model_modified:
            raise ConfigurationError(
                "the last train() was aborted or interrupted inside a step, and there is no checkpoint to resume from; "
                "build a new trainer (or Run), which begins at step 0"
            )
        return checkpoint

    def _load(self, checkpoint: Checkpoint) -> None:
        """Restore everything, and archive what is later on the timeline. Fires on_load."""
        options, is_own = self._options, self._checkpoints.owns(checkpoint.path, checkpoint.step)
        with self._commands.restoring(checkpoint.step if is_own else 0, goes_back=options.chooses):
            report = self._checkpoints.load(
                checkpoint, strict_callbacks=options.strict_callbacks, allowed=options.allow_changes
            )
            self._continue_from(checkpoint, is_own=is_own)
            if options.chooses:
                place = self._chosen.record(checkpoint.path)  # of what comes later; all of it, if it is another run's
                moved = self._checkpoints.archive_after(checkpoint.step if is_own else None, place / "checkpoints")
                if not is_own:
                    self._rollbacks.archive(place)
                if moved:
                    report.notes.append(f"{len(moved)} later checkpoint(s) are now in {place / 'checkpoints'}")
                self._rollbacks.drop("the user has chosen another beginning")
            self._rollbacks.complete()
        if options.chooses:
            self._chosen.complete(is_own=is_own)
        logger.info("resumed from %s\n%s", checkpoint.path, report.table())
        self._report(checkpoint.path, checkpoint.step, report)

    def _load_components(self) -> None:
        """Load only ``load_components``, as the beginning of a new run. Fires on_before_load and on_load."""
        options, path = self._options, Path(str(self._options.origin))
        load = self._checkpoints.component_load(path, options.load_components, options.allow_changes)
        self._parts.dispatcher.before_load.fire_with(path, 0)
        report = load()
        logger.info("initialized with parts of %s\n%s", path, report.table())
        self._report(path, 0, report)

    def _continue_from(self, checkpoint: Checkpoint, *, is_own: bool) -> None:
        """Set what the leg knows of the checkpoint: nothing of its path, metrics and end, if it is another run's."""
        self._saves.set_latest(*(self._checkpoints.latest_on_disk(checkpoint) if is_own else (None, 0)))
        self.boundary.evaluations.set_metrics(checkpoint.manifest.metrics if is_own else {})
        if not is_own:
            state = self._parts.state
            state.best_metric, state.best_global_step, state.best_model_checkpoint = None, 0, None
            state.given_up = None

    def _report(self, path: Path, step: int, report: LoadReport) -> None:
        """Warn about changes since the save, then fire on_load."""
        self._changed = [str(change) for change in report.changes]
        changes = [str(change) for change in report.changes if change.severity != "info"]
        if changes and self._parts.state.is_world_process_zero:
            logger.warning("the run resumes with changes:\n  %s", "\n  ".join(changes))
        self._parts.dispatcher.load.fire_with(path, step, report)

    def _roll_back(self, rollback: Rollback) -> None:
        """Go back within the leg. If the checkpoint was removed or damaged since the decision, this raises, and the
        next leg goes back to the one before."""
        parts, state = self._parts, self._parts.state
        step = state.global_step
        checkpoint = self._checkpoints.verified(self._checkpoints.manager.path_of(rollback.to_step))
        self._archive_rolled_back(rollback)
        parts.loader.close()
        parts.control.clear_timeline()
        state.clock.stop()
        self._commands.go_back(checkpoint.step)
        self._checkpoints.load(checkpoint, strict_callbacks=False, allowed=self._options.allow_changes)
        self._continue_from(checkpoint, is_own=True)
        self._rollbacks.complete()
        parts.witness.go_back(step, checkpoint.step)
        parts.buffers.begin_leg()
        self.boundary.begin_timeline()
        state.clock.start()
        parts.dispatcher.rollback.fire_with(step, checkpoint.step, rollback.reason)

    def _archive_rolled_back(self, rollback: Rollback) -> None:
        place = filesystem.new_archive_dir(self._parts.args.directory) / "checkpoints"
        self._checkpoints.archive_after(rollback.to_step, place)

    # -- the leg ------------------------------------------------------------------------------------------------

    def _finished_result(self) -> TrainResult | None:
        """The result of the leg that ended this run, unless none did or the user asks for more.

        None also if that leg was killed on its way out: then ``state.given_up`` remains, and the next one only ends.
        """
        args, state = self._parts.args, self._parts.state
        place = agreed_position(self._parts.loader, self._parts.layout)
        is_done = state.global_step >= args.max_steps if args.max_steps > 0 else place >= state.num_train_epochs
        last = LastLeg.read(self._run_file, args)
        asks_for_more = self._options.chooses or self._options.continue_stopped
        if asks_for_more or not last.run_is_given_up(state, args):
            state.given_up = None
            if not is_done:
                return None
        result = self._result or last.result(state, self._saves.newest, self._checkpoints.manager.path_of)
        if result is not None:
            if not is_done and state.is_world_process_zero:
                last.warn_gave_up()
            self._checkpoints.load_best_model()
        return result

    def _new_session(self) -> Session:
        """A leg from the present state: from now on, memory may hold the middle of a step. Raises CannotSave if the
        first checkpoint would fail, because a state contains what cannot be saved."""
        self._saves.check_serializable()
        self._saves.make_room_in_memory()
        is_finite = are_finite(self._parts.model)  # collective
        if not is_finite and self._parts.state.is_world_process_zero:
            logger.warning(
                "the model's weights contain NaN or infinity as training begins at step %d; to resume from before, "
                "pass resume_from_checkpoint= an older checkpoint",
                self._parts.state.global_step,
            )
        self._requeue.begin_leg()
        self._result, self._model_modified = None, True
        recorder = LegRecorder(self._parts, self._run_file, self._checkpoints.memory.name, self._changed)
        self._session = Session(
            self._parts,
            self.boundary,
            self._checkpoints,
            recorder,
            begin_witness=partial(self._begin_witness, recorder),
            roll_back=self._roll_back,
            loss_weight=self._loss_weight,
            resumed_from=self.resumed_from,
        )
        return self._session

    def _begin_witness(self, recorder: LegRecorder) -> None:
        if [leg.by for leg in self._run_file.legs()][-2:-1] == ["on_resume"]:  # its records were the wrong ones
            RecordLog.stop_comparing(self._parts.args.directory)
        self._parts.witness.begin_leg(
            self._parts.state.global_step,
            self._settings.state_dict(),
            is_resumed=self._repeats,
            explain=self._settings.differences_from,
            report=recorder.prove,
            unsaved=self._unsaved,
        )


def _unsaved(
    parts: RunParts, data: TrainingData, others: Mapping[str, Stateful], functions: Mapping[str, Any]
) -> Unsaved:
    """What a loader of the user's reads is read again, or saved by it."""
    is_read_again = data.loader is not None or isinstance(data.dataset, IterableDataset)
    dataset = None if is_read_again or is_stateful(data.dataset) else data.dataset
    collate = None if stateful_behind(data.collate_fn) else data.collate_fn
    given = {**others, **functions, **parts.modules, "optimizer": parts.optimizer, "lr_scheduler": [*parts.schedulers]}
    generators = OwnStates(dataset=data.dataset, collate_fn=data.collate_fn)
    saved = [each.values if isinstance(each, Variables) else each for each in others.values()]
    kept = [*parts.modules.values(), parts.optimizer, *parts.schedulers, *saved]
    return Unsaved(
        lambda: parts.callbacks.bound,
        given | {"train_dataset": dataset, "data_collator": collate},
        lambda: [*kept, *generators.find().values()],
    )


@contextmanager
def locked_run_dir(args: TrainingArguments) -> Iterator[None]:
    """Create ``args.directory`` and hold its lock. Collective."""
    directory = args.directory
    lock = DirectoryLock(directory, take_over=args.take_over_lock)

    def open_directory() -> str:
        filesystem.make_directory(directory)
        return lock.acquire()

    try:
        token = collectives.from_rank_zero(open_directory)
    except Locked:
        raise
    except (OSError, ConfigurationError) as error:
        why = f"cannot be written to: {error}"
        if directory.is_symlink() and not directory.exists():
            why = f"is a symbolic link to {directory.readlink()}, which does not exist"
        raise ConfigurationError(f"output_dir={str(directory)!r}: {why}") from error
    try:
        _check_is_shared(directory, token)
        yield
    finally:
        lock.release()


def check_given(args: TrainingArguments, model: nn.Module, **functions: object) -> None:
    """Raises ConfigurationError for what a Trainer and a Run are both given and cannot work with: functions, each None
    or to be called; a model without weights; a directory that could not be created or written to."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ConfigurationError(f"{name}={function!r}; needs a function")
    check_materialized(model)
    directory = args.directory
    existing = next(path for path in [directory, *directory.absolute().parents] if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigurationError(f"output_dir={str(directory)!r}: {existing} is not a folder that can be written to")


def _check_is_shared(directory: Path, token: str) -> None:
    """Raises ConfigurationError on all ranks, if one does not see what rank 0 has written. Else each host would have a
    part of every checkpoint."""
    me = (socket.gethostname(), collectives.rank() == 0 or is_visible(directory, token))
    if not collectives.all_reduce_max([not me[1]], "who sees output_dir")[0]:
        return
    ranks = collectives.gather(me, "who sees output_dir")
    if blind := [f"rank {rank} on {host}" for rank, (host, sees) in enumerate(ranks) if not sees]:
        raise ConfigurationError(
            f"output_dir={str(directory)!r}: what rank 0 on {ranks[0][0]} has written there is not seen by "
            f"{first_few(blind)}; name the same folder on all ranks, on a disk that all hosts share (for a URL: "
            "local_dir=)"
        )


class OfRun:
    """What a Trainer and a hand-written loop's Run show of their run."""

    _parts: RunParts
    _lifecycle: RunLifecycle

    @property
    def state(self) -> TrainerState:
        return self._parts.state

    @property
    def control(self) -> TrainerControl:
        return self._parts.control

    @property
    def commands(self) -> CommandQueue:
        """Accepts commands, from any thread of rank 0: ``trainer.commands.submit("save_checkpoint", by="me")``."""
        return self._lifecycle.commands

    @property
    def callbacks(self) -> list[Callback]:
        """In calling order."""
        return self._parts.callbacks.bound

    @property
    def switched_off(self) -> frozenset[str]:
        """Keys of the callbacks that a command has switched off."""
        return self._parts.dispatcher.switched_off

    @check_types
    def log(self, metrics: Mapping[str, Any], kind: str = "user") -> None:
        """Log a record of your own, of any kind. To be called on all ranks, with the same values."""
        self._parts.dispatcher.fire_record(dict(metrics), kind)

    def stop(self, reason: str = "stop() was called", *, save: bool = True) -> None:
        """Request the end of training at this step's end; from any thread, on any rank."""
        self.control.stop(reason, save=save)

    def save(self) -> None:
        """Request a checkpoint at this step's end; from any thread, on any rank."""
        self.control.should_save = True

    @check_types
    def skip_samples(self, samples: int) -> int:
        """Skip this many samples, over all ranks, of the epoch that begins: see ``SkipSamples``.

        To be called in on_epoch_begin, on all ranks. Skipped samples of a map dataset are not loaded; other data is
        read and dropped, in whole micro-batches.

        Returns:
            Number of samples skipped: fewer if the epoch ends before, more if the last micro-batch exceeds the number.
        """
        return self._parts.loader.skip(samples)
