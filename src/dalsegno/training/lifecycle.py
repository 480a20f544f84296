"""Assembly: the parts of a run put together, for the Trainer and for a hand-written loop alike.

An object of this module lives as long as the user's trainer; a :class:`~dalsegno.training.session.Run` lives one leg.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dalsegno.args import TrainingArguments
from dalsegno.callbacks import default_callbacks
from dalsegno.checkpoint import (
    CALLBACKS,
    LOSS,
    SETTINGS,
    CallbackTensors,
    CheckpointManager,
    ModelState,
    OptimizerState,
    ShardedState,
)
from dalsegno.checkpoint.remote import mirror_of
from dalsegno.data import ResumableLoader, TrainingData
from dalsegno.data.step_batch import LossWeight, agreed_place
from dalsegno.distributed import collectives
from dalsegno.distributed.buffers import SharedBuffers
from dalsegno.distributed.rng import RandomState
from dalsegno.distributed.sharded_tensors import are_finite, device_of
from dalsegno.errors import ConfigurationError, Locked
from dalsegno.events.adapters import external_global_callbacks
from dalsegno.events.callback import Callback, components_of, global_callbacks
from dalsegno.events.dispatcher import Dispatcher
from dalsegno.events.registration import check_callbacks
from dalsegno.events.table import Event
from dalsegno.logs import RunFile
from dalsegno.state import TrainerControl, TrainerState
from dalsegno.stateful.component import Component, Stateful, TensorHolder
from dalsegno.system.filesystem import make_directory
from dalsegno.system.lock import DirectoryLock, is_seen

from .last_leg import LastLeg
from .metric_checks import expect_evaluations
from .metrics import MetricAccumulator
from .optim import InitialHyperparameters, form_check
from .result import TrainResult
from .resume import ResumeOptions, Resumer, load_best
from .save_coordinator import Flight
from .session import Run
from .settings import RecordedSettings, UserSupplied, planned_steps
from .signals import SignalWatcher
from .step_boundary import StepBoundary
from .time_limit import TimeLimit
from .trained_parameters import expect_saved

_SCHEDULER = "scheduler."

logger = logging.getLogger("dalsegno")


class RunLifecycle:
    """A model, its optimizer, its data and its callbacks, with the checkpoints of their run."""

    def __init__(
        self,
        args: TrainingArguments,
        *,
        model: nn.Module,
        loss_fn: nn.Module | None = None,
        optimizer: Optimizer,
        schedulers: Sequence[Any],
        feed: ResumableLoader,
        callbacks: Iterable[object],
        core: Sequence[Callback] = (),
        others: Mapping[str, Stateful],
        data: TrainingData,
        brought: UserSupplied,
        context_fields: Mapping[str, Any],
        unsupported_events: Mapping[Event, str] | None = None,
    ) -> None:
        self.args = args
        self.feed = feed
        self.state = TrainerState(
            is_local_process_zero=collectives.local_rank() == 0, is_world_process_zero=collectives.rank() == 0
        )
        self.control = TrainerControl()
        self.meter = MetricAccumulator(device_of(model))
        self.random_state = RandomState(args.seed)
        self.user_callbacks = _with_defaults(check_callbacks(callbacks))
        self.dispatcher = Dispatcher(
            lambda context: context(
                args=args,
                state=self.state,
                control=self.control,
                model=model,
                optimizer=optimizer,
                lr_scheduler=schedulers[0] if len(schedulers) == 1 else schedulers,
                **context_fields,
            ),
            is_rank_zero=collectives.rank() == 0,
            unsupported_events=unsupported_events,
        )
        self._model = model
        self._model_state, self._loss_states = ModelState(model), _loss_states(loss_fn, model)
        self._optimizer_state = OptimizerState(model, optimizer, loss_fn)
        self.buffers = SharedBuffers([model] if loss_fn is None else [model, loss_fn])
        self._settings = RecordedSettings(
            args, brought, InitialHyperparameters(optimizer, schedulers), schedulers, feed, data, device_of(model)
        )
        own: dict[str, Stateful] = {
            SETTINGS: self._settings,
            "trainer": self.state,
            "clock": self.state.clock,
            "loader": feed,
            "rng": self.random_state,
            "meter": self.meter,
        }
        _check_state(others, taken=[self._model_state.key, self._optimizer_state.key, *own])
        expect_saved(optimizer, self._model_state, self._loss_states, others)
        own |= {f"{_SCHEDULER}{index}": each for index, each in enumerate(schedulers)}
        self._others = {**own, **others}
        self._manager = CheckpointManager(args.directory, keep=args.keeping)
        self._mirror = mirror_of(args.url, args.directory, args.keeping)
        self.run_file = RunFile(args.directory)
        self._interrupts = SignalWatcher(self.control)
        self._time_limit = TimeLimit(self.control, args.max_seconds)
        self.boundary = StepBoundary(
            args,
            self.dispatcher,
            self.state,
            self.control,
            meter=self.meter,
            saver=self,
            outside=[self._interrupts.poll, self._time_limit.poll],
        )
        self._core = core
        self._result: TrainResult | None = None  # of the former leg in this process
        self._has_trained = False
        self.set_callbacks(self.user_callbacks)

    def set_callbacks(self, callbacks: Sequence[Callback]) -> None:
        """Let exactly these listen: between the core's and the global ones."""
        everywhere = [*global_callbacks(), *external_global_callbacks()]
        present = [callback for callback in everywhere if callback not in callbacks]
        self.dispatcher.bind([*self._core, *callbacks, *present])
        self._held = [
            CallbackTensors(f"{CALLBACKS}{callback.key}", callback, self._model)
            for callback in self.dispatcher.callbacks
            if isinstance(callback, TensorHolder)
        ]
        self.user_callbacks = list(callbacks)

    # -- checkpoints: what a Run's boundary asks for ------------------------------------------------------------

    def path_of(self, step: int) -> Path:
        return self._manager.path_of(step)

    def rehearse(self) -> None:
        if self.args.saving:
            self._manager.check_serializable(self._sharded(), self._components())

    def prepare(self) -> None:
        self._manager.prepare(self._sharded())

    def save(self, step: int, *, metrics: Mapping[str, float], is_best: bool) -> Flight:
        self.random_state.step = step
        return self._manager.save_async(
            step,
            self._sharded(),
            self._components(),
            metrics=metrics,
            is_best=is_best,
            is_finite=not self.meter.is_broken() or are_finite(self._model),
            background=self.args.save_in_background,
            published=partial(self._note_published, step, time.monotonic()),
            settled=self._mirror.poll,
        )

    def _note_published(self, step: int, began: float) -> None:
        """On rank 0, on the thread that has saved."""
        self.run_file.progress(step)
        self._time_limit.allow_for(time.monotonic() - began)

    def amend(self, step: int, *, metrics: Mapping[str, float], is_best: bool) -> None:
        self._manager.amend(step, metrics=metrics, is_best=is_best)

    def load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if not self.args.load_best_model_at_end or best is None:
            return
        # With what callbacks hold: an average was measured in the weights' place.
        parts: list[ShardedState] = [self._model_state, *self._loss_states, *self._held]
        load_best(self._manager, self.args.directory / best, parts)

    def _sharded(self) -> list[ShardedState]:
        """What is spread over the ranks: model and loss, their optimizer, and what callbacks hold of that kind."""
        return [self._model_state, *self._loss_states, self._optimizer_state, *self._held]

    def _components(self) -> list[Component]:
        others = [Component(key, target, form_check(target)) for key, target in self._others.items()]
        return [*others, *components_of(self.dispatcher.callbacks)]

    # -- one leg ------------------------------------------------------------------------------------------------

    @contextmanager
    def lock_run_dir(self) -> Iterator[None]:
        """Hold the run's folder, for this process alone, and take care to leave it in time."""
        self._time_limit.start()
        with self._interrupts.listening(), self._held_directory():
            self._manager.remove_partial()
            yield

    @contextmanager
    def _held_directory(self) -> Iterator[None]:
        directory = self.args.directory
        lock = DirectoryLock(directory, take_over=self.args.take_over_lock)

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
            _check_directory_is_shared(directory, token)
            self._mirror.claim(take_over=self.args.take_over_lock)
            yield
        finally:
            try:
                self._manager.settle()
                self._mirror.end()
            finally:
                lock.release()

    def restore(self, resume: ResumeOptions) -> Path | None:
        """Bring everything to where the leg begins: see ``Trainer.train``. The checkpoint that it goes on from."""
        self.set_callbacks(self.user_callbacks)  # a global callback may have come or gone
        expect_evaluations(self.args, self.dispatcher.callbacks, has_sets=bool(self.boundary.evaluations))
        path, step = self._restored(resume), self.state.global_step
        is_own = path is not None and path.resolve() == self._manager.path_of(step).resolve()
        self._mirror.begin(step if is_own else None)
        return path

    def _restored(self, resume: ResumeOptions) -> Path | None:
        self.control.clear()  # no wish of a former leg sticks
        self.state.max_steps = planned_steps(self.args, self.feed)
        self.state.num_train_epochs = self.args.num_train_epochs
        self._settings.begin_session()
        if self._result is not None and self._is_in_memory(self._result, resume):
            return self._result.checkpoint
        beginning = Resumer(
            self._manager,
            self._mirror,
            self.args.directory,
            on=self.dispatcher,
            state=self.state,
            boundary=self.boundary,
            settings=self._settings,
            feed=self.feed,
        )
        checkpoint = beginning.select_checkpoint(resume, has_trained=self._has_trained)
        if checkpoint is None:
            self.random_state.start()
            if resume.load_components:
                beginning.load_parts(resume, self._sharded(), self._components())
            return None
        self._has_trained = True  # whatever becomes of it, the model is not what it was
        beginning.load(checkpoint, resume, self._sharded(), self._components())
        self.state.num_input_tokens_seen = self.meter.run_tokens + self.meter.tokens * collectives.world_size()
        return checkpoint.path

    def _is_in_memory(self, result: TrainResult, resume: ResumeOptions) -> bool:
        """Whether the run is where ``result``, of the last leg in this process, has left what is in memory.

        After an abort it is not: what was trained since the newest checkpoint is not to be kept, and may be NaN. So the
        next leg loads that checkpoint, as it would in a new process.
        """
        if resume.origin is not True or self.args.load_best_model_at_end:  # in memory is the best model, not the last
            return False
        return result.reason != "aborted" or LastLeg.read(self.run_file, self.args).stays_given_up(resume)

    def finished_result(self, resume: ResumeOptions) -> TrainResult | None:
        """The result of the leg that has ended this run, if one has, and nothing more is asked for."""
        args, state, place = self.args, self.state, agreed_place(self.feed)
        is_done = state.global_step >= args.max_steps if args.max_steps > 0 else place >= state.num_train_epochs
        last = LastLeg.read(self.run_file, args)
        if not is_done:
            if not last.stays_given_up(resume):
                return None
            if state.is_world_process_zero:
                last.say_given_up()
        result = self._result or last.result(state, self.boundary.saves.newest, self._manager.path_of)
        if result is not None:
            self.load_best_model()
        return result

    def session(self, resumed_from: Path | None, loss_weight: LossWeight | None = None) -> Run:
        """A run from where everything is now to its end."""
        return Run(
            self.args,
            on=self.dispatcher,
            state=self.state,
            control=self.control,
            feed=self.feed,
            meter=self.meter,
            boundary=self.boundary,
            saver=self,
            buffers=self.buffers,
            run_file=self.run_file,
            loss_weight=loss_weight,
            resumed_from=resumed_from,
        )

    def mark_started(self) -> None:
        """Note that a leg begins: from now on, what is in memory may be the middle of a step.

        Raises:
            CannotSave: if the first checkpoint would fail, because a state holds what cannot be saved.
        """
        self.rehearse()
        if not are_finite(self._model):
            logger.warning(
                "the model's weights hold NaN or infinity as training begins at step %d; to go on from before, give "
                "resume_from_checkpoint= an older checkpoint",
                self.state.global_step,
            )
        self._result, self._has_trained = None, True

    def mark_finished(self, result: TrainResult) -> TrainResult:
        """Note that a leg has come to its end by itself, so that another one may go on from what is in memory."""
        self._result = result
        return result


def _with_defaults(own: list[Callback]) -> list[Callback]:
    """The default callbacks, except those that the user gives settings of their own, then the user's."""
    taken = {callback.key for callback in own}
    return [*(callback for callback in default_callbacks() if callback.key not in taken), *own]


def _loss_states(loss_fn: nn.Module | None, model: nn.Module) -> list[ModelState]:
    """What is saved of a loss function: nothing, if it holds no tensor that is not the model's."""
    if loss_fn is None:
        return []
    state = ModelState(loss_fn, key=LOSS, apart_from=model)
    return [] if state.is_empty() else [state]


def _check_state(state: Mapping[str, object], *, taken: Sequence[str]) -> None:
    """
    Raises:
        ConfigurationError: if a name is ``taken`` by what a run saves by itself, or a thing has no state to save.
    """
    for name, thing in state.items():
        if not isinstance(name, str) or name in taken or name.startswith((CALLBACKS, _SCHEDULER)):
            raise ConfigurationError(
                f"state={{{name!r}: …}}: name it otherwise; a run saves something of its own under "
                f"{', '.join(taken)}, {_SCHEDULER}… and {CALLBACKS}…, and needs a text for a name"
            )
        if not isinstance(thing, Stateful):
            raise ConfigurationError(
                f"state={{{name!r}: …}}: a {type(thing).__name__} has no state_dict and load_state_dict, so there is "
                "nothing to save"
            )


def _check_directory_is_shared(directory: Path, token: str) -> None:
    """
    Raises:
        ConfigurationError: on all ranks, if one does not see what rank 0 has written. Else each host would have a part
            of every checkpoint.
    """
    me = (socket.gethostname(), collectives.rank() == 0 or is_seen(directory, token))
    told = collectives.gather(me, "who sees output_dir")
    if blind := [f"rank {rank} on {host}" for rank, (host, sees) in enumerate(told) if not sees]:
        more = f" and {len(blind) - 1} more" if blind[1:] else ""
        raise ConfigurationError(
            f"output_dir={str(directory)!r}: what rank 0 on {told[0][0]} has written there is not seen by {blind[0]}"
            f"{more}; name the same folder on all ranks, on a disk that all hosts share (for a URL: local_dir=)"
        )
