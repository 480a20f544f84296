"""RunLifecycle: a run over its legs in this process. Locks its directory, restores it, and remembers how it ended."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

from torch import nn

from dalsegno.args import TrainingArguments
from dalsegno.control import CommandQueue
from dalsegno.data import NOT_EXACT, TrainingData
from dalsegno.data.step_batch import LossWeight, agreed_position
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import are_finite
from dalsegno.errors import ConfigurationError, Locked
from dalsegno.logs import RecordLog, RunFile
from dalsegno.stateful.component import Stateful
from dalsegno.system.filesystem import make_directory
from dalsegno.system.lock import DirectoryLock, is_visible

from .checkpointer import Checkpointer
from .chosen_start import ChosenStart, ResumeOptions
from .commands import CommandExecutor
from .contents import CheckpointContents
from .evaluation import Evaluation, expect_evaluations
from .learning_rate import planned_steps
from .parts import RunParts
from .result import TrainResult
from .resume import Resumer
from .rollback import Rollbacks
from .run_json import LastLeg, LegRecorder
from .session import Session
from .settings import RecordedSettings, UserSupplied
from .step_boundary import StepBoundary
from .stopping import Requeue, SignalWatcher, TimeLimit

logger = logging.getLogger("dalsegno")


_UNSAVED: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Models whose weights a leg in this process has changed since its last checkpoint; and in which step."""


class RunLifecycle:
    """Shared by the Trainer and a hand-written loop. Lives as long as the user's object; a
    :class:`~dalsegno.training.session.Session` lives for one leg.

    Args:
        data: the training data, for its fingerprint.
        supplied: which parts the user brings along.
        others: further objects with a state, by the key under which each is saved.
        loss_weight: weight of a batch's mean loss within its step; None: the number of its samples.

    Raises:
        ConfigurationError: as :class:`CheckpointContents` does.
    """

    def __init__(
        self,
        parts: RunParts,
        *,
        evaluations: Sequence[Evaluation],
        data: TrainingData,
        supplied: UserSupplied,
        others: Mapping[str, Stateful],
        loss_weight: LossWeight | None = None,
    ) -> None:
        self._parts = parts
        self._loss_weight = loss_weight
        self._signals = SignalWatcher(parts.control)
        self._time_limit = TimeLimit(parts.control, parts.args.max_seconds)
        self._run_file = RunFile(parts.args.directory)
        self._settings = RecordedSettings(parts, supplied, data)
        contents = CheckpointContents(parts, self._settings, others)
        self._chosen = ChosenStart(parts.args.directory, has_url=parts.args.url is not None)
        self._checkpointer = Checkpointer(
            parts, contents, self._settings, self._run_file, self._time_limit, self._chosen
        )
        self._commands = CommandExecutor(parts, self._settings, evaluates=bool(evaluations))
        self._rollbacks = Rollbacks(parts, self._checkpointer, self._run_file)
        sources = [self._signals.poll, self._time_limit.poll]
        self.boundary = StepBoundary(parts, self._checkpointer, evaluations, sources, self._commands, self._rollbacks)
        self._resumer = Resumer(parts, self._checkpointer, self.boundary, self._commands, self._rollbacks, self._chosen)
        self._requeue = Requeue(enabled=parts.args.requeue)
        self._session: Session | None = None  # of the newest leg; None if the run was finished before it
        self._result: TrainResult | None = None  # of the previous leg in this process
        self._options = ResumeOptions()  # of the leg
        self._model_modified = False
        self._repeats = False  # the leg resumes from a checkpoint of this run

    @contextmanager
    def lock_run_dir(self) -> Iterator[None]:
        """Hold the run's directory for this process, and watch for signals and the end of the job.

        At the end, a job that was stopped in time is requeued: no file of the run is open any more.
        """
        self._session = None
        self._time_limit.start()
        with self._signals.listening():
            with locked_run_dir(self._parts.args), self._checkpointer.opened():
                try:
                    yield
                finally:  # the next leg puts the commands in force again
                    self._commands.undo_settings()
                    self._note_unsaved_weights()
            if self._session is not None and self._session.result is not None:
                self._result = self._session.result  # without an exception: the next leg may start from memory
                self._requeue.end_leg(self._result)

    @property
    def commands(self) -> CommandQueue:
        """Accepts commands to the run."""
        return self._commands.queue

    def restore(self, options: ResumeOptions) -> Path | None:
        """Restore what the leg begins with: see ``Trainer.train``. The checkpoint that it resumes from. Collective."""
        parts = self._parts
        parts.callbacks.rebind()
        expect_evaluations(parts.args, parts.callbacks.bound, has_sets=self.boundary.evaluations.has_sets)
        parts.control.clear()
        parts.state.max_steps = planned_steps(parts.args, parts.loader)  # for on_before_load; commands may change it
        parts.state.num_train_epochs = parts.args.num_train_epochs
        self._settings.begin_session()
        self._options = options = self._chosen.completed(options)
        path = self._restored(options)
        self._checkpointer.start_uploads(path)
        return path

    def _restored(self, options: ResumeOptions) -> Path | None:
        self._repeats = False
        if self._result is not None and self._is_in_memory(self._result, options):
            self._commands.restore(self._parts.state.global_step)
            self._parts.flags.keep()
            return self._result.checkpoint
        checkpoint = self._resumer.select_checkpoint(options, model_modified=self._model_modified)
        if checkpoint is None:
            self._commands.restore(0)
            self._parts.random_state.start()
            if options.load_components:
                self._resumer.load_components(options)
            elif (leg := _UNSAVED.get(self._parts.model)) is not None:
                logger.warning(
                    "this run begins with weights that no checkpoint contains, left in this model by %s: in another "
                    "process it would begin with others. Build the model anew, or load a checkpoint into it",
                    leg,
                    extra={NOT_EXACT: True},
                )
            self._rollbacks.complete()
            return None
        self._model_modified = True  # even if the load fails
        self._resumer.load(checkpoint, options)
        self._repeats = self._checkpointer.owns(checkpoint.path, checkpoint.step)
        return checkpoint.path

    def _is_in_memory(self, result: TrainResult, options: ResumeOptions) -> bool:
        """Whether memory still holds the state in which ``result``, of the previous leg in this process, left the run.

        After an abort it does not count: what was trained since the newest checkpoint is not to be kept, and may be
        NaN. So the next leg loads that checkpoint, as it would in a new process.
        """
        args = self._parts.args
        if options.origin is not True or args.load_best_model_at_end:  # memory holds the best model, not the last
            return False
        if result.reason != "aborted":
            return True
        return not options.continue_stopped and LastLeg.read(self._run_file, args).ended_run

    def finished_result(self) -> TrainResult | None:
        """The result of the leg that ended this run, unless none did or the user asks for more. Collective.

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
        result = self._result or last.result(state, self.boundary.saves.newest, self._checkpointer.path_of)
        if result is not None:
            if not is_done and state.is_world_process_zero:
                last.warn_gave_up()
            self._checkpointer.load_best_model()
        return result

    def mark_started(self) -> None:
        """Note that a leg begins: from now on, memory may hold the middle of a step. Collective.

        Raises:
            CannotSave: if the first checkpoint would fail, because a state contains what cannot be saved.
            ConfigurationError: if memory checkpoints would not fit into memory.
        """
        self._checkpointer.check_serializable()
        self._checkpointer.memory.begin_leg()
        is_finite = are_finite(self._parts.model)  # collective
        if not is_finite and self._parts.state.is_world_process_zero:
            logger.warning(
                "the model's weights contain NaN or infinity as training begins at step %d; to resume from before, "
                "pass resume_from_checkpoint= an older checkpoint",
                self._parts.state.global_step,
            )
        self._requeue.begin_leg()
        self._result, self._model_modified = None, True

    def _note_unsaved_weights(self) -> None:
        if self._session is None:
            return
        _UNSAVED.pop(self._parts.model, None)
        if not self.boundary.saves.is_on_disk():
            step, folder = self._parts.state.global_step, self._parts.args.output_dir
            _UNSAVED[self._parts.model] = f"step {step} of the run in {folder}"

    def session(self, resumed_from: Path | None) -> Session:
        """A leg from the present state."""
        recorder = LegRecorder(self._parts, self._run_file, self._checkpointer.memory.checkpoints.name)
        self._session = Session(
            self._parts,
            self.boundary,
            self._checkpointer,
            recorder,
            begin_witness=partial(self._begin_witness, recorder),
            roll_back=self._resumer.roll_back,
            loss_weight=self._loss_weight,
            resumed_from=resumed_from,
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
        )


@contextmanager
def locked_run_dir(args: TrainingArguments) -> Iterator[None]:
    """Create ``args.directory`` and hold its lock. Collective.

    Raises:
        Locked: if another live process holds it.
        ConfigurationError: if the directory cannot be written to, or is not the same one on all ranks.
    """
    directory = args.directory
    lock = DirectoryLock(directory, take_over=args.take_over_lock)

    def open_directory() -> str:
        make_directory(directory)
        return lock.acquire()

    try:
        token = collectives.from_rank_zero(open_directory)
    except Locked:
        raise
    except OSError as error:
        raise ConfigurationError(f"output_dir={str(directory)!r}: cannot be written to: {error}") from error
    try:
        _check_is_shared(directory, token)
        yield
    finally:
        lock.release()


def check_writable(directory: Path) -> None:
    """Raises ConfigurationError if the directory could not be created or written to: now, not at the first
    checkpoint."""
    existing = next(path for path in [directory, *directory.absolute().parents] if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigurationError(f"output_dir={str(directory)!r}: {existing} is not a folder that can be written to")


def _check_is_shared(directory: Path, token: str) -> None:
    """Raises ConfigurationError on all ranks, if one does not see what rank 0 has written. Else each host would have a
    part of every checkpoint."""
    me = (socket.gethostname(), collectives.rank() == 0 or is_visible(directory, token))
    ranks = collectives.gather(me, "who sees output_dir")
    if blind := [f"rank {rank} on {host}" for rank, (host, sees) in enumerate(ranks) if not sees]:
        more = f" and {len(blind) - 1} more" if blind[1:] else ""
        raise ConfigurationError(
            f"output_dir={str(directory)!r}: what rank 0 on {ranks[0][0]} has written there is not seen by {blind[0]}"
            f"{more}; name the same folder on all ranks, on a disk that all hosts share (for a URL: local_dir=)"
        )
