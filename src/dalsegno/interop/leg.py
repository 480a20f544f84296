"""Leg: a leg of a run whose training loop belongs to another library; dalsegno's callbacks take part in it.

A library's ``Bridge`` is one of that library's callbacks. It creates a leg when training begins, copies the loop's
progress into :attr:`Leg.state`, fires the events that the library has callbacks for, and passes on to the library what
handlers request. The states of callbacks are saved with each checkpoint of the library: see :mod:`.states`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from dalsegno.args import TrainingArguments
from dalsegno.checkpoint import CALLBACKS, CallbackTensors, CheckpointManager, LoadReport
from dalsegno.checkpoint.compatibility import END_OF_SCHEDULE, reasons_to_differ
from dalsegno.control import CommandQueue
from dalsegno.distributed import collectives
from dalsegno.distributed.layout import Layout, environment_of
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.errors import ConfigurationError, DamagedCheckpoint, EventNotFired
from dalsegno.events.adapters import external_global_callbacks
from dalsegno.events.callback import Callback, components_of, global_callbacks
from dalsegno.events.dispatcher import Dispatcher, check_supported, note_failures, raise_first
from dalsegno.events.registration import check_callbacks
from dalsegno.events.table import Event
from dalsegno.logs.repeats import RecordDifference
from dalsegno.state import ControlRequests, ResumeProof, TrainerControl, TrainerState
from dalsegno.stateful.component import Component, TensorHolder
from dalsegno.system import filesystem
from dalsegno.witness import Unsaved, Witness

from .states import Packed, Progress, pack, remove_states, unpack, warn_of_new_states

logger = logging.getLogger("dalsegno")

INSIDE_THE_STEP = (
    *Event.between(Event.BEFORE_FORWARD, Event.AFTER_BACKWARD),
    *Event.between(Event.BEFORE_ZERO_GRAD, Event.AFTER_SCHEDULER_STEP),
    *(Event.TRAIN_METRICS, Event.PREDICTION_STEP),
)
"""Events that no Bridge fires: other trainers have no callback at these places."""


FELT = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16", "fp16", "seed", "data_seed"),
)
"""Settings that change what a step computes, of those that a library has too."""


class Unknown:
    """Stands for a number that the library does not pass to callbacks: only reading it raises."""

    def __init__(self, what: str, remedy: str) -> None:
        self._message = f"{what} is unknown here: {remedy}"

    def __float__(self) -> float:
        raise EventNotFired(self._message)


def checked(callbacks: Iterable[object], unsupported_events: Mapping[Event, str]) -> list[Callback]:
    found = check_callbacks(callbacks)
    check_supported(found, unsupported_events)
    return found


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one object: ``around`` is called with the original and its arguments. Returns the undo."""
    original, own = getattr(owner, name), vars(owner).get(name)

    @wraps(original)
    def wrapper(*args: Any, **named: Any) -> Any:
        return around(original, *args, **named)

    setattr(owner, name, wrapper)
    return partial(delattr, owner, name) if own is None else partial(setattr, owner, name, own)


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrapper, on which hooks would never run."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


class Leg:
    """From the library's begin of training to its end. All ranks call every method.

    Args:
        args: the library's settings as dalsegno's.
        model: the user's module, without DDP's wrapper.
        optimizer: the one whose hooks run, without wrappers.
        loop: the library's object that stands for this call of its training.
        locate: path of the folder in which the states of a step are saved.
        causes: what it means under this library if a repeated step differs, as in :data:`~dalsegno.state.CAUSES`.
        no_evaluations: what to set so that evaluations are due; None: they are.
        excuse: why a repeated record differs under this library although nothing is wrong; None: something is.
        samples_after: how many samples a number of steps has read, on all ranks; None: batches are counted.
        given: what else the library was given by the user, by name; no checkpoint contains its state.
    """

    _open_here: ClassVar[WeakValueDictionary[Path, Leg]] = WeakValueDictionary()

    switched_off: frozenset[str] = frozenset()
    grad_norm: torch.Tensor | None = None
    """Total norm of this step's gradients before clipping, over all ranks."""
    is_stopping = False
    """Whether the training ends because a callback has requested it."""
    _lr: float | None = None  # that the newest update used
    _is_updated = False  # whether this step has updated the weights, or is known not to
    _step_is_open = False  # on_step_done has not fired for it
    _saved_at = 0  # step of the newest checkpoint
    _announced: int | None = None  # the newest step for which on_before_save has fired
    _newest: Path | None = None
    _may_stop = False  # because of what the witness says
    _has_ended = False

    def __init__(
        self,
        callbacks: Sequence[Callback],
        args: TrainingArguments,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        lr_scheduler: Any = None,
        processing_class: Any = None,
        train_dataloader: Any = None,
        eval_dataloader: Any = None,
        loop: object,
        locate: Callable[[int], Path],
        unsupported_events: Mapping[Event, str],
        causes: Mapping[str, str],
        no_evaluations: str | None = None,
        excuse: Callable[[RecordDifference], str | None] = lambda found: None,
        samples_after: Callable[[int], int] | None = None,
        given: Mapping[str, object] | None = None,
    ) -> None:
        for callback in callbacks:
            if callback.needs_evaluations and no_evaluations is not None:
                raise ConfigurationError(f"{callback.key} needs evaluations: {no_evaluations}")
        self.args, self._optimizer, self._lr_scheduler = args, optimizer, lr_scheduler
        self._device = device_of(model)
        self.state = TrainerState(
            is_local_process_zero=collectives.local_rank() == 0, is_world_process_zero=collectives.rank() == 0
        )
        """Progress, which the Bridge keeps equal to the library's."""
        self.control = TrainerControl()
        self.events = Dispatcher(
            {
                "args": args,
                "layout": Layout.flat(),
                "state": self.state,
                "control": self.control,
                "model": model,
                "optimizer": optimizer,
                "lr_scheduler": lr_scheduler,
                "processing_class": processing_class,
                "train_dataloader": train_dataloader,
                "eval_dataloader": eval_dataloader,
                "trainer": self,
            },
            is_rank_zero=self.state.is_world_process_zero,
            unsupported_events=unsupported_events,
        )
        self._loop = loop
        self._take_place()
        self.events.evaluate_begin.fill("eval")  # none has begun yet: the weights are the model's own
        everywhere = [*global_callbacks(), *external_global_callbacks()]
        self.events.bind([*callbacks, *(each for each in everywhere if each not in callbacks)])
        self.callbacks = self.events.callbacks
        self.installed = ExitStack()
        """Undoes what the Bridge installs in the library's objects, when the leg ends."""
        self.losses: list[torch.Tensor] = []
        """Of this step's micro-batches, each divided by their number."""
        self._tensors = [
            CallbackTensors(f"{CALLBACKS}{each.key}", each, model)
            for each in self.events.callbacks
            if isinstance(each, TensorHolder)
        ]
        self.witness = Witness(
            args.directory, self._device, args.on_resume, causes=causes, restores_generators=False, excuse=excuse
        )
        kept = [each for each in (model, optimizer, lr_scheduler) if each is not None]
        self._unsaved = Unsaved(lambda: self.callbacks, {"model": model, **(given or {})}, lambda: kept)
        self._manager = CheckpointManager(args.directory, locate=locate)
        self._progress = Progress(samples_after)
        self._all_metrics: dict[str, Any] = {}  # of the sets measured so far in this evaluation

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
        """Restore the callbacks' states from their folder, if there is one; then fire on_train_begin. ``timeline`` is a
        fingerprint of the library's history, equal in the process that saved the states; ``saves`` tells whether the
        library will save checkpoints."""
        on, step = self.events, self.state.global_step
        self._progress.samples = self.state.samples_seen
        self._progress.show(self.state)
        on.init_end.fire_with()
        on.before_load.fire_with(folder, step if folder else 0)
        if folder is not None:
            self._progress.timeline = timeline
            report = self._load(folder)
            self._progress.show(self.state)
            on.load.fire_with(folder, step, report)
        elif step:
            self._progress.epochs_begun = self._progress.epochs_ended = int(self.state.epoch)
        if saves:
            self._manager.check_serializable(self._tensors, self._components())
        self.state.clock.start()
        on.train_begin.fire_with(folder, None)
        self._begin_witness(is_resumed=folder is not None)

    def begin_packed(self, packed: Packed | None, *, saves: bool, checkpoint: str) -> None:
        """:meth:`begin` with states from ``checkpoint``, which is one dict; None: no states were loaded."""
        if packed is None:
            if self.state.global_step:
                warn_of_new_states(checkpoint)
            return self.begin(None, saves=saves)
        folder = self.args.directory / ".dalsegno" / "restored"
        collectives.from_rank_zero(lambda: remove_states(folder))
        collectives.from_rank_zero(lambda: unpack(packed, folder))
        try:
            self.begin(folder, saves=saves)
        finally:
            collectives.from_rank_zero(lambda: filesystem.remove(folder))

    def _begin_witness(self, *, is_resumed: bool) -> None:
        progress, step = self._progress, self.state.global_step
        progress.run = progress.run or collectives.from_rank_zero(lambda: uuid.uuid4().hex)
        felt = {name: getattr(self.args, name) for name in FELT}
        settings = felt | environment_of(self._device, Layout.flat()) | {"run": progress.run}
        if self._lr_scheduler:
            settings[END_OF_SCHEDULE] = self.state.max_steps
        self.witness.begin_leg(
            step,
            settings,
            is_resumed=is_resumed,
            explain=lambda used: None if used.get("run") != progress.run else reasons_to_differ(used, settings),
            report=self._prove,
            unsaved=self._unsaved,
        )
        self._saved_at, self._may_stop = step, self.args.on_resume == "stop" and self.witness.is_comparing
        self.installed.callback(self._optimizer.register_step_pre_hook(self._see_gradients).remove)

    def _prove(self, proof: ResumeProof) -> None:
        """Note whether the leg repeats the steps of the leg before; if not, stop it if the user asks for that."""
        self.state.resume_proof = proof
        if proof.verdict == "differs" and self.args.on_resume == "stop":
            self.control.stop(proof.line, save=False, by="on_resume")

    def end(self, reason: str, metrics: dict[str, Any]) -> None:
        """Fire on_train_end, once. All handlers are called; what the first that failed has raised is raised then. Not
        collective."""
        if self._has_ended:
            return
        self._has_ended = True
        self.installed.close()
        self._open_here.pop(self.args.directory, None)
        self.state.clock.stop()
        self.witness.close(self.state.global_step)
        train_end = self.events.train_end
        train_end.fill(reason, metrics, self._newest)
        raise_first(train_end.fire_all())

    def end_steps(self) -> None:
        """Before the final record: no step follows. Collective."""
        self.finish()
        self.witness.conclude(self.state.global_step)

    def record_end(self) -> None:
        """Fire the final record: training has come to its end, or to a requested one."""
        self.end_steps()
        self.events.fire_record({"train_runtime": self.state.elapsed(), "step": self.state.global_step}, "final")

    def complete(self, metrics: dict[str, Any], *, is_stopped: bool) -> None:
        """Fire on_train_end, after the final record."""
        is_aborted = self.control.should_abort_without_save
        self.end("aborted" if is_aborted else "stopped" if is_stopped else "finished", metrics)

    def fail(self, error: BaseException) -> None:
        """Fire on_exception and on_train_end. What a handler raises becomes a note of ``error``. Not collective."""
        self.installed.close()
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

    def install_clipping(self, accelerator: Any) -> None:
        """Fire on_gradients_ready before an Accelerator clips, and keep the norm. The event does not fire with a
        gradient scaler, since only the accelerator's own clipping may unscale gradients."""

        def clip(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
            if accelerator.sync_gradients and accelerator.scaler is None:
                self.events.gradients_ready.fire_with()
            self.grad_norm = norm = original(*args, **named)
            return norm

        self.installed.callback(wrap(accelerator, "clip_grad_norm_", clip))

    def step_begin(self) -> None:
        self.finish()
        self.losses, self.grad_norm, self._is_updated = [], None, False
        self._progress.begin_step()
        if self.state.global_step + 1 >= self.witness.next_step:
            self.witness.begin_step(self.state.global_step + 1)
        self.events.step_begin.fire_with()

    def see_batch(self, batch: Any) -> None:
        """Note a batch of the step in progress, before anything is computed from it."""
        self._progress.add_batch(batch)
        if self.witness.is_recording:
            self.witness.add_batch(batch)

    def _see_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.witness.is_recording:
            self.witness.add_gradients(optimizer)

    def before_update(self, optimizer: Any) -> None:
        """Fire on_pre_optimizer_step: gradients are complete and clipped."""
        self._lr = float(optimizer.param_groups[0]["lr"])
        self.events.pre_optimizer_step.fire_with(self.grad_norm)

    def after_update(self) -> None:
        self._is_updated = True
        self.events.optimizer_step.fire_with()

    def skip_update(self) -> None:
        """Fire on_step_skipped. Without a call of this or of :meth:`after_update`, it fires at the step's end."""
        self._is_updated = True
        self.events.step_skipped.fire_with("the gradient scaler found NaN or infinity")

    @property
    def loss(self) -> torch.Tensor | None:
        """This rank's share of the step's loss, whose sum over the ranks is the mean that is logged."""
        if not self.losses:
            return None
        losses = [loss.to(torch.promote_types(loss.dtype, torch.float32)) for loss in self.losses]
        return torch.stack(losses).sum() / collectives.world_size()

    def step_end(self, unknown: Sequence[Unknown] | None = None) -> None:
        """Fire on_step_end. ``unknown``: in place of the loss and the norm, if the library does not pass them on."""
        if not self._is_updated:
            self.skip_update()
        self._progress.end_step(self.state)
        loss, norm = self.loss, self.grad_norm
        if self.witness.is_recording:
            self.witness.end_step(loss, norm, self._lr)
        shown: Sequence[Any] = unknown or (loss, norm)
        self.events.step_end.fire_with(shown[0], shown[1], self._lr)
        self._step_is_open = True

    def finish(self) -> None:
        """Fire on_step_done, once the library has done all that was due at the end of the step, except for a save."""
        if self._step_is_open:
            self._step_is_open = False
            self.events.step_done.fire_with(self.state.global_step)

    # -- records and requests ---------------------------------------------------------------------------------------

    def record(self, logs: dict[str, Any]) -> None:
        """Fire a record of training, with the number of tokens if that is known. Collective."""
        self._progress.sum_ranks(self.state)
        if self.state.num_input_tokens_seen:
            logs["tokens"] = self.state.num_input_tokens_seen
        self.events.fire_record(logs, "train")

    def record_step(self, logs: dict[str, Any]) -> None:
        """Fire a record of the step's loss, norm and learning rate, beside ``logs``. Collective."""
        if (loss := self.loss) is not None:
            logs["loss"] = collectives.sum_floats([float(loss)], "the loss of a record")[0]
        if self.grad_norm is not None:
            logs["grad_norm"] = float(self.grad_norm)
        self.record({**logs, "learning_rate": self._lr})

    def evaluated(self, metrics: dict[str, Any], name: str, evaluated_weights: str | None, is_last: bool) -> None:
        """Fire on_evaluate for one evaluation set; ``is_last``: of the sets of this evaluation."""
        self._all_metrics |= metrics
        self.events.evaluate.fire_with(metrics, name, evaluated_weights, dict(self._all_metrics), is_last)
        if is_last:
            self._all_metrics = {}

    @property
    def evaluated_weights(self) -> str | None:
        """Key of the callback whose averages the newest evaluation has measured; None: it has measured the weights."""
        return self.events.evaluate_begin.context.evaluated_weights

    def may_request_each_step(self) -> bool:
        """Whether the ranks must exchange requests at the end of each step; equal on all ranks."""
        return self._may_stop or self.events.may_request_each_step()

    def requests(self) -> ControlRequests:
        """What callbacks on any rank have requested, equal on all ranks. Collective."""
        self._may_stop &= self.witness.is_comparing
        together = ControlRequests(*map(bool, collectives.all_reduce_max(self.control.requests(), "requests")))
        self.control.acknowledge(together)
        return together

    def stops_now(self, requests: ControlRequests) -> bool:
        """Whether the training ends because of these requests, and not already; logs which callback ends it, and why.
        Collective."""
        if self.is_stopping or not (requests.stop or requests.abort):
            return False
        self.is_stopping = True
        reasons = collectives.gather((self.control.stopped_by, self.control.stop_reason), "why training stops")
        by, why = next((each for each in reasons if each[0] is not None), (None, None))
        if self.state.is_world_process_zero:
            logger.warning("training ends at step %d: %s: %s", self.state.global_step, by, why or "no reason given")
        return True

    # -- for handlers: ctx.trainer ----------------------------------------------------------------------------------

    def log(self, metrics: MutableMapping[str, Any], kind: str = "user") -> None:
        self.events.fire_record(dict(metrics), kind)

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
        """Capture the callbacks' states of this step, and write them into their folder; its path."""
        step = self.state.global_step
        self.finish()
        self.announce_save()
        self._progress.sum_ranks(self.state)
        self._progress.timeline = timeline
        folder = self._manager.path_of(step)
        collectives.from_rank_zero(lambda: remove_states(folder))
        path = self._manager.save(step, self._tensors, self._components())
        self.witness.note_published(self._saved_at)  # by now the library has written it
        self.witness.note_captured(step)
        self._saved_at = step
        return path

    def save_packed(self) -> Packed:
        """:meth:`save` for a checkpoint that is one dict: the states, equal on all ranks."""
        folder = self.save()
        try:
            return collectives.from_rank_zero(lambda: pack(folder))
        finally:
            collectives.from_rank_zero(lambda: filesystem.remove(folder))

    def saved(self, checkpoint: Path, *, is_best: bool = False) -> None:
        """Fire on_save: the library's checkpoint of this step is complete, with the states."""
        self._newest = checkpoint
        self.events.fire_save(self.state, checkpoint, self.state.global_step, is_best)

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
