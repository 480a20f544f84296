"""Bridge: dalsegno's callbacks in Lightning's Trainer; Lightning's callbacks here: ``dialect``.

::

    trainer = lightning.Trainer(..., callbacks=[Bridge([JsonLogger(), DivergenceDetector(patience=3)])])
    trainer.fit(module, loader, ckpt_path="last")

Lightning's loop calls the Bridge as follows::

    load_state_dict → (states kept until training begins)
    on_train_start → init_end, before_load, (states restored) load, train_begin
    on_train_batch_start → epoch_begin before an epoch's first batch, step_begin before a step's first, microbatch_begin
    on_before_optimizer_step → gradients_ready → (clipping) → pre_optimizer_step
    (the optimizer's hook) → optimizer_step
    on_train_batch_end → microbatch_end; at a step's last batch step_skipped, step_end, and log_step, log if due
    on_validation_start → evaluate_begin
    on_validation_end → evaluate_end, log_step, log, evaluate
    state_dict → before_save, (states captured)
    on_train_epoch_end → step_done, epoch_end
    on_train_end → final log_step, log; train_end
    on_exception → exception, train_end
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.utils.hooks import RemovableHandle

from dalsegno.args import TrainingArguments
from dalsegno.data.loader import sample_count
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError
from dalsegno.events.table import Event
from dalsegno.interop.leg import INSIDE_THE_STEP, Leg, checked, wrap
from dalsegno.interop.states import Packed
from dalsegno.state import TrainerState
from dalsegno.witness import OnResume

UNSUPPORTED_EVENTS = dict.fromkeys(
    [*INSIDE_THE_STEP, Event.PREDICT, Event.SAVE],
    "Lightning's Trainer has no callback for; use dalsegno.Trainer, or another callback",
)
"""Events that the Bridge never fires. A callback that handles one of them raises EventNotFired."""


CAUSES = {
    "data": "Lightning finds the place in an epoch again only for a loader with state_dict, and does not restore the "
    "random numbers from which shuffle=True draws an order",
    "random numbers": "Lightning does not restore them",
    "record": "the steps are equal, so a callback has a state that no checkpoint contains, or an evaluation came after "
    "the checkpoint of its step",
}
"""What it means under Lightning's Trainer if a repeated step differs."""


def _callback_classes() -> tuple[type[Any], ...]:
    """The base class of callbacks in each installed package of Lightning, which accept only their own."""
    found = []
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            found.append(importlib.import_module(f"{package}.callbacks").Callback)
        except ModuleNotFoundError:
            continue
    if not found:
        raise ModuleNotFoundError("neither lightning nor pytorch_lightning is installed: pip install lightning")
    return tuple(found)


class Bridge(*_callback_classes()):  # type: ignore[misc]
    """A ``Callback`` of Lightning that calls dalsegno's callbacks.

    Their states are part of Lightning's checkpoints, and restored before training begins; their logs, in
    ``output_dir``, are cut back to that checkpoint. A record has the step's loss (the mean over the ranks), the
    learning rate, and what the module logs with ``self.log`` (rank 0's values; pass ``sync_dist=True`` for means). An
    evaluation's metrics are what validation logs, under names that begin with ``eval_`` in place of ``val_``.

    Args:
        callbacks: dalsegno's built-ins and your own.
        output_dir: where logs are written. None: the trainer's ``default_root_dir``.
        processing_class: a tokenizer, for callbacks that need one.
        on_resume: what happens if a resume is not exact, as in :class:`~dalsegno.TrainingArguments`.

    Raises:
        EventNotFired: for a callback that handles an event which the Trainer does not fire.
        ConfigurationError: for an object that is not a callback, or two callbacks with one key; when training begins,
            for manual optimization or several optimizers.
    """

    def __init__(
        self,
        callbacks: Iterable[object],
        *,
        output_dir: str | Path | None = None,
        processing_class: Any = None,
        on_resume: OnResume = "warn",
    ) -> None:
        super().__init__()
        self._callbacks = checked(callbacks, UNSUPPORTED_EVENTS)
        self._output_dir = output_dir
        self._processing_class = processing_class
        self._on_resume = on_resume
        self._leg: Leg | None = None  # since the newest fit() began to train
        self._is_training = False
        self._packed: Packed | None = None  # states that fit() has read, until training begins
        self._before: Mapping[str, Any] = {}  # metrics before the present batch or evaluation

    # -- begin and end ----------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise ConfigurationError("Bridge: needs automatic optimization with one optimizer: its steps are the run's")
        optimizer = Optimizer(trainer.optimizers[0])
        args = settings_of(trainer, Path(self._output_dir or trainer.default_root_dir), optimizer, self._on_resume)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        leg = Leg(
            self._callbacks,
            args,
            model=pl_module,
            optimizer=optimizer,  # type: ignore[arg-type]
            lr_scheduler=schedulers[0] if len(schedulers) == 1 else schedulers,
            processing_class=self._processing_class,
            train_dataloader=trainer.train_dataloader,
            eval_dataloader=trainer.val_dataloaders,
            loop=trainer.fit_loop,
            locate=lambda step: args.directory / ".dalsegno" / f"states-{step}",
            unsupported_events=UNSUPPORTED_EVENTS,
            causes=CAUSES,
            no_evaluations=None if trainer.enable_validation else "pass val_dataloaders= to fit()",
        )
        self._leg, self._is_training = leg, True
        _mirror(trainer, leg.state, _progress(trainer).current.processed % trainer.num_training_batches)
        full_batches = trainer.global_step * trainer.accumulate_grad_batches  # all, if a checkpoint has no states
        leg.state.samples_seen = full_batches * _batch_size(trainer)
        packed, self._packed = self._packed, None
        leg.begin_packed(packed, saves=bool(trainer.checkpoint_callbacks), checkpoint=str(trainer.ckpt_path))
        leg.installed.callback(trainer.optimizers[0].register_step_post_hook(lambda *_: leg.after_update()).remove)

        def clip(original: Callable[..., None], *given: Any, **named: Any) -> None:
            original(*given, **named)  # which is where Lightning has no callback after it
            optimizer.run_pre_hooks()
            leg.before_update(optimizer)

        leg.installed.callback(wrap(pl_module, "configure_gradient_clipping", clip))
        _pass_on(leg, trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        leg = self._leg
        if leg is None or not self._is_training:
            return
        leg.record_end()
        self._is_training = False
        leg.complete({}, is_stopped=leg.is_stopping)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if (leg := self._followed(trainer)) is not None:
            self._is_training = False
            leg.fail(exception)

    # -- epochs and steps -------------------------------------------------------------------------------------------

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if (leg := self._followed(trainer)) is not None:
            if _progress(trainer).is_last_batch:  # else training has stopped inside the epoch
                leg.epoch_end()
            _pass_on(leg, trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        leg = self._followed(trainer, batch_idx)
        if leg is None:
            return
        leg.epoch_begin()  # here, since Lightning calls no callback for an epoch that a resume begins with
        if batch_idx % trainer.accumulate_grad_batches == 0:
            leg.state.will_log = (leg.state.global_step + 1) % max(trainer.log_every_n_steps, 1) == 0
            leg.state.will_evaluate = _evaluates_after(trainer, batch_idx)
            leg.step_begin()
        leg.see_batch(batch)
        self._before = dict(trainer.callback_metrics)
        leg.events.microbatch_begin.fire_with(batch, batch_idx % trainer.accumulate_grad_batches, sample_count(batch))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if (leg := self._followed(trainer)) is not None:
            leg.events.gradients_ready.fire_with()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        leg = self._followed(trainer, batch_idx + 1)
        if leg is None:
            return
        accumulated = trainer.accumulate_grad_batches
        is_last = (batch_idx + 1) % accumulated == 0 or _progress(trainer).is_last_batch
        loss = outputs["loss"].detach() if outputs else None
        if loss is not None:
            leg.losses.append(loss)
        own_loss = None if loss is None else loss * accumulated
        found = outputs or {}
        leg.events.microbatch_end.fire_with(
            own_loss, found, batch, batch_idx % accumulated, sample_count(batch), is_last
        )
        if is_last:
            # Lightning divides each loss by the number of batches of a full step; an epoch's last step may have fewer.
            leg.losses = [loss * (accumulated / len(leg.losses)) for loss in leg.losses]
            self._end_step(leg, trainer)

    def _end_step(self, leg: Leg, trainer: Any) -> None:
        leg.step_end()
        is_due = leg.state.will_log
        if is_due or leg.may_request_each_step():
            is_due |= _pass_on(leg, trainer)
        if is_due:
            leg.record_step(self._new_metrics(trainer))
            _pass_on(leg, trainer)

    # -- evaluations, saves -----------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        leg = self._followed(trainer)
        if leg is None or trainer.sanity_checking:
            return
        self._before = dict(trainer.callback_metrics)
        leg.events.evaluate_begin.fire_with("eval")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        leg = self._followed(trainer)
        if leg is None or trainer.sanity_checking:
            return
        weights = leg.evaluated_weights
        leg.events.evaluate_end.fire_with("eval")
        new = self._new_metrics(trainer).items()
        metrics = {
            name if name.startswith("eval_") else f"eval_{name.removeprefix('val_')}": each for name, each in new
        }
        leg.events.fire_record(metrics, "eval", weights)
        leg.evaluated(metrics, "eval", weights, is_last=True)
        _pass_on(leg, trainer)

    def state_dict(self) -> dict[str, Any]:
        """Called on all ranks when a checkpoint is saved; rank 0 writes it."""
        leg = self._leg
        if leg is None:
            return {} if self._packed is None else {"dalsegno": self._packed}
        return {"dalsegno": leg.save_packed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._packed = state_dict.get("dalsegno")

    # -- between the two --------------------------------------------------------------------------------------------

    def _followed(self, trainer: Any, batches: int | None = None) -> Leg | None:
        """The leg, with the trainer's present progress; None if training does not run. ``batches``: of this epoch."""
        leg = self._leg if self._is_training else None
        if leg is not None:
            _mirror(trainer, leg.state, _progress(trainer).current.processed if batches is None else batches)
        return leg

    def _new_metrics(self, trainer: Any) -> dict[str, Any]:
        """Metrics that the module has logged since :attr:`_before` was noted: rank 0's, on all ranks. Collective."""
        new = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if self._before.get(name) is not value
        }
        return collectives.broadcast(new, "metrics of the module")


def _mirror(trainer: Any, state: TrainerState, batches: int) -> None:
    state.global_step = trainer.global_step
    state.max_steps = trainer.max_steps
    state.num_train_epochs = float(trainer.max_epochs or 0)
    state.epoch = trainer.current_epoch + batches / trainer.num_training_batches


def _pass_on(leg: Leg, trainer: Any) -> bool:
    """Do what callbacks on any rank request, on all ranks. Returns whether a record is wanted. Collective."""
    requests = leg.requests()
    if requests.evaluate or requests.end_epoch:
        raise ConfigurationError(
            "should_evaluate and should_epoch_stop: Lightning's Trainer has no such requests; leave them to "
            "val_check_interval= and limit_train_batches="
        )
    stops = leg.stops_now(requests)
    if requests.save or (stops and not requests.abort and trainer.checkpoint_callbacks):
        path = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        trainer.save_checkpoint(Path(path) / f"step={leg.state.global_step}.ckpt")
    trainer.should_stop |= stops
    return requests.log


class Optimizer:
    """The user's optimizer as callbacks see it.

    It runs the hooks before a step itself: Lightning's closure computes gradients after torch's.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._before_step: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        handle = RemovableHandle(self._before_step)
        self._before_step[handle.id] = hook
        return handle

    def run_pre_hooks(self) -> None:
        """Call the hooks: gradients are complete and clipped, and the update follows."""
        for hook in tuple(self._before_step.values()):
            hook(self._optimizer, (), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def settings_of(trainer: Any, directory: Path, optimizer: Any, on_resume: OnResume) -> TrainingArguments:
    precision = str(trainer.precision)
    return TrainingArguments(
        directory,
        max_steps=trainer.max_steps if trainer.max_steps > 0 else -1,
        num_train_epochs=float(trainer.max_epochs) if trainer.max_epochs and trainer.max_epochs > 0 else 1.0,
        per_device_train_batch_size=_batch_size(trainer) // trainer.world_size or 1,
        gradient_accumulation_steps=trainer.accumulate_grad_batches,
        learning_rate=float(optimizer.param_groups[0]["lr"]),
        max_grad_norm=float(trainer.gradient_clip_val or 0),
        bf16=precision.startswith("bf16"),
        fp16=precision.startswith("16"),
        logging_steps=trainer.log_every_n_steps,
        eval_strategy="epoch" if trainer.enable_validation else "no",
        save_strategy="epoch" if trainer.checkpoint_callbacks else "no",
        on_resume=on_resume,
    )


def _progress(trainer: Any) -> Any:
    """The batches of the present epoch."""
    return trainer.fit_loop.epoch_loop.batch_progress


def _evaluates_after(trainer: Any, batch_idx: int) -> bool:
    """Whether validation follows the step that begins with this batch."""
    if not trainer.enable_validation:
        return False
    every = trainer.check_val_every_n_epoch
    if every is not None and (trainer.current_epoch + 1) % every:
        return False
    last = min(batch_idx + trainer.accumulate_grad_batches, trainer.num_training_batches)
    return any(done % trainer.val_check_batch == 0 for done in range(batch_idx + 1, int(last) + 1))


def _batch_size(trainer: Any) -> int:
    """Samples of a batch on all ranks; 0 if the loader has no ``batch_size``."""
    return (getattr(trainer.train_dataloader, "batch_size", None) or 0) * int(trainer.world_size)
