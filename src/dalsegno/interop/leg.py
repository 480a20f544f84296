"""Leg: a leg of a run whose training loop belongs to another library; dalsegno's callbacks take part in it.

A library's ``Bridge`` is one of that library's callbacks. It creates a leg when training begins, copies the loop's
progress into :attr:`Leg.state`, fires the events that the library has callbacks for, and passes on to the library what
handlers request. The states of callbacks are saved with each checkpoint of the library: see
:mod:`dalsegno.interop.states`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypedDict
from weakref import WeakValueDictionary

from torch import nn
from torch.optim import Optimizer

from dalsegno.args import TrainingArguments
from dalsegno.checkpoint import CALLBACKS, CallbackTensors, CheckpointManager, LoadReport
from dalsegno.checkpoint.load.compatibility import END_OF_SCHEDULE, reasons_to_differ
from dalsegno.control import CommandQueue
from dalsegno.distributed import collectives
from dalsegno.distributed.environment import environment_of
from dalsegno.distributed.layout import Layout
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.errors import ConfigurationError, DamagedCheckpoint, EventNotFired, StateMismatch
from dalsegno.events.adapters import external_global_callbacks
from dalsegno.events.callback import Callback, components_of, global_callbacks
from dalsegno.events.dispatcher import Dispatcher
from dalsegno.events.failures import note_failures, raise_first
from dalsegno.events.records import fire_record
from dalsegno.events.table import Event
from dalsegno.logs.repeats import RecordDifference
from dalsegno.state import ControlRequests, ResumeProof, TrainerControl, TrainerState
from dalsegno.stateful.component import Component, TensorHolder
from dalsegno.stateful.schema import Count
from dalsegno.witness import Witness

from .states import remove_states

logger = logging.getLogger("dalsegno")

INSIDE_THE_STEP = (
    Event.BEFORE_FORWARD,
    Event.AFTER_FORWARD,
    Event.BEFORE_BACKWARD,
    Event.AFTER_BACKWARD,
    Event.BEFORE_ZERO_GRAD,
    Event.AFTER_ZERO_GRAD,
    Event.BEFORE_SCHEDULER_STEP,
    Event.AFTER_SCHEDULER_STEP,
    Event.TRAIN_METRICS,
    Event.PREDICTION_STEP,
)
"""Events that no Bridge fires: other trainers have no callback at these places."""


_FELT = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "bf16",
    "fp16",
    "seed",
    "data_seed",
)
"""Settings that change what a step computes, of those that a library has too."""


class Unknown:
    """Stands for a number that the library does not pass to callbacks: only reading it raises."""

    def __init__(self, what: str, remedy: str) -> None:
        self._message = f"{what} is unknown here: {remedy}"

    def __float__(self) -> float:
        raise EventNotFired(self._message)


def expect_evaluations(callbacks: Iterable[Callback], *, are_due: bool, remedy: str) -> None:
    """Raises ConfigurationError if a callback needs evaluations, and none are due."""
    for callback in callbacks:
        if callback.needs_evaluations and not are_due:
            raise ConfigurationError(f"{callback.key} needs evaluations: {remedy}")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The objects of a library's loop, as dalsegno's contexts have them."""

    args: TrainingArguments
    model: nn.Module
    """The user's module, without DDP's wrapper."""
    optimizer: Optimizer
    """The one whose hooks fire, without wrappers."""
    lr_scheduler: Any = None
    processing_class: Any = None
    train_dataloader: Any = None
    eval_dataloader: Any = None


class ProgressState(TypedDict):
    epochs_begun: Count
    epochs_ended: Count
    timeline: str
    run: str


class _Progress:
    """Epoch events that have fired, a fingerprint of the library's own history, which distinguishes timelines, and a
    name that distinguishes runs."""

    state_schema = ProgressState
    state_compared = False  # records, of which the fingerprint is made, contain times of each rank's clock

    def __init__(self, timeline: str) -> None:
        self.epochs_begun = self.epochs_ended = 0
        self.timeline = timeline
        self.run = ""

    def check_state(self, state: ProgressState) -> None:
        if state["timeline"] != self.timeline:
            raise StateMismatch(
                "these callback states were saved with a different checkpoint than the one from which training "
                "resumes: its history differs. Either that is in another folder (then pass the Bridge its path: "
                "resume_from_checkpoint=), or the job was killed while it overwrote this checkpoint (then resume from "
                "an earlier one)"
            )

    def state_dict(self) -> ProgressState:
        return {
            "epochs_begun": self.epochs_begun,
            "epochs_ended": self.epochs_ended,
            "timeline": self.timeline,
            "run": self.run,
        }

    def load_state_dict(self, state: ProgressState) -> None:
        self.epochs_begun, self.epochs_ended = state["epochs_begun"], state["epochs_ended"]
        self.run = state["run"]


class Leg:
    """From the library's begin of training to its end. All ranks call every method.

    Args:
        callbacks: checked.
        surroundings: of the loop.
        loop: the library's object that stands for this call of its training.
        locate: path of the folder in which the states of a step are saved.
        unsupported_events: events that this library's loop cannot fire, with reason and remedy.
        causes: what it means under this library if a repeated step differs, as in :data:`~dalsegno.state.CAUSES`.
        excuse: why a repeated record differs under this library although nothing is wrong; None: something is.

    Raises:
        EventNotFired: for a callback that handles such an event.
        ConfigurationError: if another Bridge already takes part in this call of training.
    """

    _open_here: ClassVar[WeakValueDictionary[Path, Leg]] = WeakValueDictionary()

    def __init__(
        self,
        callbacks: Sequence[Callback],
        surroundings: Surroundings,
        *,
        loop: object,
        locate: Callable[[int], Path],
        unsupported_events: Mapping[Event, str],
        causes: Mapping[str, str],
        excuse: Callable[[RecordDifference], str | None] = lambda found: None,
    ) -> None:
        self.args = surroundings.args
        self.state = TrainerState(
            is_local_process_zero=collectives.local_rank() == 0, is_world_process_zero=collectives.rank() == 0
        )
        """Progress, which the Bridge keeps equal to the library's."""
        self.control = TrainerControl()
        fields = {name: getattr(surroundings, name) for name in Surroundings.__slots__}
        self.events = Dispatcher(
            lambda kind: kind(**fields, layout=Layout.flat(), state=self.state, control=self.control, trainer=self),
            is_rank_zero=self.state.is_world_process_zero,
            unsupported_events=unsupported_events,
        )
        self._loop = loop
        self._take_place()
        everywhere = [*global_callbacks(), *external_global_callbacks()]
        self.events.bind([*callbacks, *(each for each in everywhere if each not in callbacks)])
        self.callbacks = self.events.callbacks
        self.switched_off: frozenset[str] = frozenset()
        self._tensors = [
            CallbackTensors(f"{CALLBACKS}{each.key}", each, surroundings.model)
            for each in self.events.callbacks
            if isinstance(each, TensorHolder)
        ]
        self._surroundings = surroundings
        self.witness = Witness(
            self.args.directory,
            device_of(surroundings.model),
            self.args.on_resume,
            causes=causes,
            restores_generators=False,
            excuse=excuse,
        )
        self._saved_at = 0  # step of the newest checkpoint
        self._may_stop = False  # because of what the witness says
        self._manager = CheckpointManager(self.args.directory, locate=locate)
        self._progress = _Progress("")
        self._step_is_open = False  # on_step_done has not fired for it
        self._announced: int | None = None  # the newest step for which on_before_save has fired
        self._all_metrics: dict[str, Any] = {}  # of the sets measured so far in this evaluation
        self._newest: Path | None = None
        self._hook: Any = None  # of the optimizer
        self._has_ended = False

    def _take_place(self) -> None:
        """End what an exception has left open in this directory, of which libraries do not notify callbacks."""
        other = self._open_here.get(self.args.directory)
        if other is not None:
            if other._loop is self._loop:
                raise ConfigurationError(
                    f"two bridges take part in the training in {self.args.directory}; give all callbacks to one "
                    "Bridge, and that once"
                )
            other.end("exception", {})
        self._open_here[self.args.directory] = self

    # -- begin and end ----------------------------------------------------------------------------------------------

    def begin(self, folder: Path | None, timeline: str = "", *, saves: bool) -> None:
        """Restore the callbacks' states, then fire on_train_begin.

        Args:
            folder: of the states; None: there are none.
            timeline: fingerprint of the library's history, equal in the process that saved the states.
            saves: whether the library will save checkpoints.

        Raises:
            DamagedCheckpoint: if the states are damaged.
            StateMismatch: before anything is loaded, if a state does not fit, or was saved with another checkpoint.
            CannotSave: if a state contains what cannot be saved.
        """
        on, step = self.events, self.state.global_step
        on.init_end.fire_with()
        on.before_load.fire_with(folder, step if folder else 0)
        if folder is not None:
            self._progress.timeline = timeline
            report = self._load(folder)
            on.load.fire_with(folder, step, report)
        elif step:
            self._progress.epochs_begun = self._progress.epochs_ended = int(self.state.epoch)
        if saves:
            self._manager.check_serializable(self._tensors, self._components())
        self.state.clock.start()
        on.train_begin.fire_with(folder, None)
        self._begin_witness(is_resumed=folder is not None)

    def _begin_witness(self, *, is_resumed: bool) -> None:
        around, progress, step = self._surroundings, self._progress, self.state.global_step
        progress.run = progress.run or collectives.from_rank_zero(lambda: uuid.uuid4().hex)
        settings = {name: getattr(self.args, name) for name in _FELT}
        settings |= environment_of(device_of(around.model), Layout.flat()) | {"run": progress.run}
        if around.lr_scheduler:
            settings[END_OF_SCHEDULE] = self.state.max_steps
        self.witness.begin_leg(
            step,
            settings,
            is_resumed=is_resumed,
            explain=lambda used: None if used.get("run") != progress.run else reasons_to_differ(used, settings),
            report=self._prove,
        )
        self._saved_at, self._may_stop = step, self.args.on_resume == "stop" and self.witness.is_comparing
        self._hook = around.optimizer.register_step_pre_hook(self._see_gradients)

    def _prove(self, proof: ResumeProof) -> None:
        """Note whether the leg repeats the steps of the leg before; if not, stop it if the user asks for that."""
        self.state.resume_proof = proof
        if proof.verdict == "differs" and self.args.on_resume == "stop":
            self.control.stop(proof.line, save=False, by="on_resume")

    def end(self, reason: str, metrics: dict[str, Any]) -> None:
        """Fire on_train_end, once. Not collective.

        Raises:
            BaseException: what the first handler that failed has raised; all are called.
        """
        if self._has_ended:
            return
        self._has_ended = True
        self._open_here.pop(self.args.directory, None)
        self.state.clock.stop()
        self.witness.close(self.state.global_step)
        if self._hook is not None:
            self._hook.remove()
        train_end = self.events.train_end
        train_end.fill(reason, metrics, self._newest)
        raise_first(train_end.fire_all())

    def end_steps(self) -> None:
        """Fire on_step_done, and conclude about the steps that this leg repeated: no step follows. To be called before
        the final record. Collective."""
        self.finish()
        self.witness.conclude(self.state.global_step)

    def record_end(self) -> None:
        """Fire on_step_done and the final record: training has come to its end, or to a requested one."""
        self.end_steps()
        self.record({"train_runtime": self.state.elapsed(), "step": self.state.global_step}, "final")

    def complete(self, *, is_stopped: bool) -> None:
        """Fire on_train_end, after :meth:`record_end`."""
        is_aborted = self.control.should_abort_without_save
        self.end("aborted" if is_aborted else "stopped" if is_stopped else "finished", {})

    def fail(self, error: BaseException) -> None:
        """Fire on_exception and on_train_end. What a handler raises becomes a note of ``error``. Not collective."""
        failures: list[BaseException] = []
        if self.events.exception and not self._has_ended:
            self.events.exception.fill(error)
            failures += self.events.exception.fire_all()
        try:
            self.end("interrupted" if isinstance(error, KeyboardInterrupt) else "exception", {})
        except BaseException as late:
            failures.append(late)
        note_failures(error, failures)

    # -- epochs and steps -------------------------------------------------------------------------------------------

    def epoch_begin(self) -> None:
        """Fire on_epoch_begin, unless it has fired for this epoch before the checkpoint that the leg resumed from."""
        progress = self._progress
        self.finish()
        if progress.epochs_begun > progress.epochs_ended:
            if self.state.epoch < progress.epochs_begun:
                return
            self.epoch_end()  # the checkpoint was saved between the epoch's last step and on_epoch_end
        self.events.epoch_begin.fire_with(progress.epochs_begun)
        progress.epochs_begun += 1

    def epoch_end(self) -> None:
        """Fire on_epoch_end. For epochs that have come to their end."""
        self.finish()
        self.events.epoch_end.fire_with(self._progress.epochs_ended)
        self._progress.epochs_ended += 1

    def step_begin(self) -> None:
        self.finish()
        if self.state.global_step + 1 >= self.witness.next_step:
            self.witness.begin_step(self.state.global_step + 1)
        self.events.step_begin.fire_with()

    def see_batch(self, batch: Any) -> None:
        """Note a batch of the step in progress, before anything is computed from it."""
        if self.witness.is_recording:
            self.witness.add_batch(batch)

    def _see_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.witness.is_recording:
            self.witness.add_gradients(optimizer)

    def step_end(self, loss: Any, grad_norm: Any, lr: Any) -> None:
        """Fire on_step_end. An ``Unknown`` stands for a number that the library does not pass on."""
        if self.witness.is_recording:
            self.witness.end_step(*(None if isinstance(each, Unknown) else each for each in (loss, grad_norm, lr)))
        self.events.step_end.fire_with(loss, grad_norm, lr)
        self._step_is_open = True

    def finish(self) -> None:
        """Fire on_step_done, once the library has done all that was due at the end of the step, except for a save."""
        if self._step_is_open:
            self._step_is_open = False
            self.events.step_done.fire_with(self.state.global_step)

    # -- records and requests ---------------------------------------------------------------------------------------

    def record(self, logs: dict[str, Any], kind: str, evaluated_weights: str | None = None) -> None:
        """Fire on_log_step and on_log with one record, to which handlers may add: see :func:`fire_record`."""
        fire_record(self.events, logs, kind, evaluated_weights)

    def evaluated(
        self, metrics: dict[str, Any], name: str, evaluated_weights: str | None = None, *, is_last: bool = True
    ) -> None:
        """Fire on_evaluate for one evaluation set; ``is_last``: of the sets of this evaluation."""
        self._all_metrics |= metrics
        self.events.evaluate.fire_with(metrics, name, evaluated_weights, dict(self._all_metrics), is_last)
        if is_last:
            self._all_metrics = {}

    @property
    def evaluated_weights(self) -> str | None:
        """Key of the callback whose averages the newest evaluation has measured; None: it has measured the weights."""
        begin = self.events.evaluate_begin
        return begin.context.evaluated_weights if begin else None

    def may_request_each_step(self) -> bool:
        """Whether the ranks must exchange requests at the end of each step; equal on all ranks."""
        return self._may_stop or self.events.may_request_each_step()

    def requests(self) -> ControlRequests:
        """Return what callbacks on any rank have requested, equal on all ranks. Collective."""
        self._may_stop &= self.witness.is_comparing
        together = ControlRequests(*map(bool, collectives.all_reduce_max(self.control.requests(), "requests")))
        self.control.acknowledge(together)
        return together

    def warn_stops(self) -> None:
        """Log which callback ends the training, and why."""
        reasons = collectives.gather((self.control.stopped_by, self.control.stop_reason), "why training stops")
        by, why = next((each for each in reasons if each[0] is not None), (None, None))
        if self.state.is_world_process_zero:
            logger.warning("training ends at step %d: %s: %s", self.state.global_step, by, why or "no reason given")

    # -- for handlers: ctx.trainer ----------------------------------------------------------------------------------

    def log(self, metrics: MutableMapping[str, Any], kind: str = "user") -> None:
        self.record(dict(metrics), kind)

    def stop(self, reason: str = "ctx.trainer.stop() was called", *, save: bool = True) -> None:
        self.control.stop(reason, save=save)

    @property
    def commands(self) -> CommandQueue:
        raise EventNotFired("commands: this loop belongs to another library; commands need dalsegno's Trainer or Run")

    def skip_samples(self, samples: int) -> int:
        raise EventNotFired("skip_samples(): the data loader belongs to another library, whose batches are not skipped")

    # -- states of callbacks ----------------------------------------------------------------------------------------

    def announce_save(self) -> None:
        """Fire on_before_save for this step, once. Handlers may stop the training to prevent the save."""
        step = self.state.global_step
        if self._announced != step and not self._has_ended:
            self._announced = step
            self.events.before_save.fire_with(self._manager.path_of(step).parent, step)

    def save(self, timeline: str = "") -> Path:
        """Capture the callbacks' states of this step, and write them into their folder; its path.

        Raises:
            CannotSave: on every rank, if a state contains what cannot be saved.
            SaveFailed: on every rank, if the states could not be written. No partial folder remains.
        """
        step = self.state.global_step
        self.finish()
        self.announce_save()
        self._progress.timeline = timeline
        folder = self._manager.path_of(step)
        collectives.from_rank_zero(lambda: remove_states(folder))
        path = self._manager.save(step, self._tensors, self._components())
        self.witness.note_published(self._saved_at)  # by now the library has written it
        self.witness.note_captured(step)
        self._saved_at = step
        return path

    def saved(self, checkpoint: Path, *, is_best: bool = False) -> None:
        """Fire on_save: the library's checkpoint of this step is complete, with the states."""
        self._newest = checkpoint
        self.events.save.fire_with(checkpoint, self.state.global_step, is_best, self.state)

    def _components(self) -> list[Component]:
        own = [Component("bridge", self._progress), Component("clock", self.state.clock)]
        return [*own, *components_of(self.events.callbacks)]

    def _load(self, folder: Path) -> LoadReport:
        checkpoint = self._manager.find(folder)
        assert checkpoint is not None, "with a path, find() returns a checkpoint or raises"
        if checkpoint.step != self.state.global_step:
            raise DamagedCheckpoint(
                f"{folder}: its states are of step {checkpoint.step}, and training resumes at {self.state.global_step}"
            )
        report = self._manager.load(checkpoint, self._tensors, self._components())
        logger.info("callbacks' states restored from %s\n%s", folder, report.table())
        return report
