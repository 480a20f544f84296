"""Cerebras's dialect: the callbacks of the Model Zoo's trainer.

The trainer is each method's first argument; :class:`.trainer.Trainer` stands in for it. :data:`ROWS` is the whole
order. Step and batch methods are called for each micro-batch; the end of the last one comes after the optimizer step.
``on_train_start`` and ``on_train_end`` enclose each stretch of training between validations.

Two calls come in another order than in the Model Zoo. ``on_enter_fit`` comes after the checkpoint is loaded, so that
what it opens is always closed. A validation belongs to the step at whose end it is due: the checkpoint of that step
is saved after the validation.

The state is what ``on_save_checkpoint``, ``postprocess_checkpoint`` and ``on_save_trainer_state`` put into their dicts.
Each callback has separate dicts, and gets them back in ``on_load_trainer_state``, ``preprocess_checkpoint`` and
``on_load_checkpoint``.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

from dalsegno.events.callback import Answer, Binder
from dalsegno.events.contexts import BeforeForwardContext
from dalsegno.events.registration import GlobalHandle, register_global_callback
from dalsegno.events.table import Event
from dalsegno.interop.stand_in import Row, TableAdapter
from dalsegno.state import Handler
from dalsegno.stateful.component import State

from .trainer import PACKAGES, SharedState, is_logger


class Callback:
    """Base class with the Model Zoo's methods. Override only those that are needed.

    Inside ``with callback:``, every run that starts there calls it.
    """

    _handle: GlobalHandle

    def __enter__(self) -> Self:
        self._handle = register_global_callback(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.remove()

    def pre_setup(self, trainer: Any) -> None: ...
    def setup(self, trainer: Any) -> None: ...
    def post_setup(self, trainer: Any) -> None: ...
    def finalize(self) -> None: ...
    def on_enter_fit(self, trainer: Any, stack: Any, train_dataloader: Any, val_dataloader: Any, loop: Any) -> None: ...
    def on_fit_start(self, trainer: Any, train_dataloader: Any, val_dataloader: Any, loop: Any) -> None: ...
    def on_fit_end(self, trainer: Any, loop: Any) -> None: ...
    def on_fit_exception(self, trainer: Any, exception: Any) -> None: ...
    def on_enter_train(self, trainer: Any, stack: Any, train_dataloader: Any, loop: Any, loop_idx: Any) -> None: ...
    def on_train_start(self, trainer: Any, model: Any, train_dataloader: Any, loop: Any, loop_idx: Any) -> None: ...
    def on_train_end(self, trainer: Any, model: Any, loop: Any, loop_idx: Any) -> None: ...
    def on_train_exception(self, trainer: Any, exception: Any) -> None: ...
    def on_train_step_start(self, trainer: Any, model: Any, batch: Any) -> None: ...
    def on_train_step_end(self, trainer: Any, model: Any, outputs: Any, batch: Any) -> None: ...
    def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: Any) -> None: ...
    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: Any) -> None: ...
    def run_validation(self, trainer: Any, loop_idx: Any, is_last: Any) -> None: ...
    def on_enter_validate(self, trainer: Any, stack: Any, val_dataloader: Any, loop: Any) -> None: ...
    def on_validate_start(self, trainer: Any, model: Any, val_dataloader: Any, loop: Any) -> None: ...
    def on_validate_end(self, trainer: Any, model: Any, loop: Any) -> None: ...
    def on_validate_exception(self, trainer: Any, exception: Any) -> None: ...
    def on_validate_step_start(self, trainer: Any, model: Any, batch: Any) -> None: ...
    def on_validate_step_end(self, trainer: Any, model: Any, outputs: Any, batch: Any) -> None: ...
    def on_validate_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: Any) -> None: ...
    def on_validate_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: Any) -> None: ...
    def on_enter_validate_all(
        self, trainer: Any, stack: Any, val_dataloaders: Any, loop: Any, ckpt_paths: Any
    ) -> None: ...
    def on_before_forward(self, trainer: Any, model: Any, batch: Any, args: Any, kwargs: Any) -> None: ...
    def on_after_forward(self, trainer: Any, model: Any, outputs: Any, batch: Any) -> None: ...
    def on_before_backward(self, trainer: Any, model: Any, outputs: Any) -> None: ...
    def on_after_backward(self, trainer: Any, model: Any, outputs: Any) -> None: ...
    def on_before_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None: ...
    def on_after_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None: ...
    def on_before_optimizer_zero_grad(self, trainer: Any, model: Any, optimizer: Any) -> None: ...
    def on_after_optimizer_zero_grad(self, trainer: Any, model: Any, optimizer: Any) -> None: ...
    def on_before_scheduler_step(self, trainer: Any, model: Any, optimizer: Any, scheduler: Any) -> None: ...
    def on_after_scheduler_step(self, trainer: Any, model: Any, optimizer: Any, scheduler: Any) -> None: ...
    def on_save_checkpoint(self, trainer: Any, state_dict: Any) -> None: ...
    def on_save_trainer_state(self, trainer: Any, state_dict: Any) -> None: ...
    def on_after_save_trainer_state(self, trainer: Any, trainer_state_file: Any) -> None: ...
    def postprocess_checkpoint(self, trainer: Any, state_dict: Any) -> None: ...
    def on_after_save_checkpoint(self, trainer: Any, ckpt_path: Any) -> None: ...
    def on_before_load_checkpoint(self, trainer: Any, ckpt_path: Any) -> None: ...
    def preprocess_checkpoint(self, trainer: Any, state_dict: Any) -> None: ...
    def on_load_checkpoint(self, trainer: Any, state_dict: Any) -> None: ...
    def on_load_trainer_state(self, trainer: Any, state_dict: Any) -> None: ...


class Logger(Callback):
    """Base class of callbacks that get every record."""

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None: ...


_SET_UP = ("pre_setup", "setup", "post_setup")
_SAVE = ("on_save_checkpoint", "postprocess_checkpoint", "on_save_trainer_state")
_LOAD = ("on_load_trainer_state", "preprocess_checkpoint", "on_load_checkpoint")

_LOG_METRICS = "log_metrics"
"""Called for the library's loggers only, and without the trainer; other callbacks may have a method of this name."""

_LEAVE = "leave"
"""In place of a condition: closes the stack that the method has opened, if it is open."""

VALUES: Mapping[str, Callable[[SharedState, Any], Any]] = {
    "trainer": lambda shared, ctx: shared.trainer,
    "model": lambda shared, ctx: ctx.model,
    "optimizer": lambda shared, ctx: ctx.optimizer,
    "scheduler": lambda shared, ctx: ctx.scheduler,
    "train_dataloader": lambda shared, ctx: ctx.train_dataloader,
    "val_dataloaders": lambda shared, ctx: ctx.eval_dataloader,
    "val_dataloader": lambda shared, ctx: shared.loader,
    "loop": lambda shared, ctx: shared.trainer.loop,
    "val_loop": lambda shared, ctx: shared.trainer.loop.val_loop,
    "loop_idx": lambda shared, ctx: shared.stretch,
    "batch": lambda shared, ctx: ctx.batch,
    "batch_idx": lambda shared, ctx: shared.batch_idx,
    "val_batch_idx": lambda shared, ctx: shared.val_batch,
    "model_batch": lambda shared, ctx: shared.model_call[0][0],
    "args": lambda shared, ctx: shared.model_call[0],
    "kwargs": lambda shared, ctx: shared.model_call[1],
    "outputs": lambda shared, ctx: ctx.outputs,
    "last_outputs": lambda shared, ctx: shared.outputs,
    "last_batch": lambda shared, ctx: shared.batch,
    "metrics": lambda shared, ctx: dict(ctx.logs),
    "step": lambda shared, ctx: ctx.state.global_step,
    "ckpt_path": lambda shared, ctx: str(ctx.path),
    "exception": lambda shared, ctx: ctx.exception,
}

CONDITIONS: Mapping[str, Callable[[SharedState, Any], bool]] = {
    "a stretch begins": lambda shared, ctx: shared.begins_stretch,
    "a stretch ends": lambda shared, ctx: shared.ends_stretch,
    "validating": lambda shared, ctx: shared.val_name is not None,
    "a validation ends": lambda shared, ctx: shared.val_name is not None and ctx.kind == "eval",
    "more follow": lambda shared, ctx: not ctx.is_last,
    "the fit ends well": lambda shared, ctx: shared.ends_well,
    "validation broke": lambda shared, ctx: "validate" in shared.broken and isinstance(ctx.exception, Exception),
    "training broke": lambda shared, ctx: "train" in shared.broken and isinstance(ctx.exception, Exception),
    "the fit broke": lambda shared, ctx: "fit" in shared.broken and isinstance(ctx.exception, Exception),
}


def _before_count(shared: SharedState, ctx: Any) -> AbstractContextManager[None]:
    """The trainer has not counted the step yet whose last micro-batch ends."""
    before = ctx.state.copy()
    before.global_step -= 1
    return shared.trainer.as_of(before)


@contextmanager
def _in_training(shared: SharedState, ctx: Any) -> Iterator[None]:
    """The trainer is not in the validation yet, at the end of a stretch."""
    name, shared.val_name = shared.val_name, None
    try:
        yield
    finally:
        shared.val_name = name


@contextmanager
def _model_call(shared: SharedState, ctx: BeforeForwardContext) -> Iterator[None]:
    """``args`` is ``[batch]``; the model is called with what the method leaves in ``args`` and ``kwargs``."""
    batch = ctx.batch
    if isinstance(batch, Mapping):  # as one batch, so that changes inside it take effect
        batch = ctx.call_kwargs
    elif isinstance(batch, list):
        batch = ctx.call_args
    else:
        batch = tuple(ctx.call_args) if isinstance(batch, tuple) else ctx.call_args[0]
    args: list[Any] = [batch]
    kwargs: dict[str, Any] = {}
    shared.model_call = args, kwargs
    yield
    batch, *more = args
    named = dict(batch) if isinstance(batch, Mapping) else {}
    listed = [] if isinstance(batch, Mapping) else list(batch) if isinstance(batch, (tuple, list)) else [batch]
    ctx.call_args[:] = [*listed, *more]
    ctx.call_kwargs.clear()
    ctx.call_kwargs.update({**named, **kwargs})


ROWS = (
    *(Row(Event.INIT_END, method, once="trainer") for method in _SET_UP),
    *(Row(Event.BEFORE_LOAD, method, once="trainer") for method in _SET_UP),  # for a callback that was added later
    Row(Event.BEFORE_LOAD, "on_before_load_checkpoint", "ckpt_path"),
    *(Row(Event.TRAIN_BEGIN, method, once="trainer") for method in _SET_UP),  # where no checkpoint is loaded
    Row(Event.TRAIN_BEGIN, "on_enter_fit", "train_dataloader val_dataloaders loop"),
    Row(Event.TRAIN_BEGIN, "on_fit_start", "train_dataloader val_dataloaders loop"),
    # a stretch of training
    Row(Event.STEP_BEGIN, "on_enter_train", "train_dataloader loop loop_idx", "a stretch begins"),
    Row(Event.STEP_BEGIN, "on_train_start", "model train_dataloader loop loop_idx", "a stretch begins"),
    Row(Event.MICROBATCH_BEGIN, "on_train_batch_start", "model batch batch_idx"),
    Row(Event.MICROBATCH_BEGIN, "on_train_step_start", "model batch"),
    Row(Event.BEFORE_FORWARD, "on_validate_batch_start", "model batch val_batch_idx", "validating"),
    Row(Event.BEFORE_FORWARD, "on_validate_step_start", "model batch", "validating"),
    Row(Event.BEFORE_FORWARD, "on_before_forward", "model model_batch args kwargs", scope=_model_call),
    Row(Event.AFTER_FORWARD, "on_after_forward", "model outputs batch"),
    Row(Event.BEFORE_BACKWARD, "on_before_backward", "model outputs"),
    Row(Event.AFTER_BACKWARD, "on_after_backward", "model outputs"),
    Row(Event.MICROBATCH_END, "on_train_step_end", "model outputs batch", "more follow"),
    Row(Event.MICROBATCH_END, "on_train_batch_end", "model outputs batch batch_idx", "more follow"),
    Row(Event.GRADIENTS_READY, "on_before_optimizer_step", "model optimizer"),
    Row(Event.OPTIMIZER_STEP, "on_after_optimizer_step", "model optimizer"),
    Row(Event.BEFORE_ZERO_GRAD, "on_before_optimizer_zero_grad", "model optimizer"),
    Row(Event.AFTER_ZERO_GRAD, "on_after_optimizer_zero_grad", "model optimizer"),
    Row(Event.BEFORE_SCHEDULER_STEP, "on_before_scheduler_step", "model optimizer scheduler"),
    Row(Event.AFTER_SCHEDULER_STEP, "on_after_scheduler_step", "model optimizer scheduler"),
    Row(Event.STEP_END, "on_train_step_end", "model last_outputs last_batch", scope=_before_count),
    Row(Event.STEP_END, "on_train_batch_end", "model last_outputs last_batch batch_idx"),
    Row(Event.EVALUATE_BEGIN, "on_train_end", "model loop loop_idx", "a stretch ends", scope=_in_training),
    Row(Event.EVALUATE_BEGIN, "on_enter_train", when=_LEAVE),
    # a validation
    Row(Event.EVALUATE_BEGIN, "on_enter_validate", "val_dataloader val_loop"),
    Row(Event.EVALUATE_BEGIN, "on_validate_start", "model val_dataloader val_loop"),
    Row(Event.PREDICTION_STEP, "on_validate_step_end", "model outputs batch", "validating"),
    Row(Event.PREDICTION_STEP, "on_validate_batch_end", "model outputs batch val_batch_idx", "validating"),
    Row(Event.LOG_STEP, "on_validate_end", "model val_loop", "a validation ends"),
    Row(Event.EVALUATE, "on_enter_validate", when=_LEAVE),
    Row(Event.LOG, _LOG_METRICS, "metrics step"),
    Row(Event.SAVE, "on_after_save_checkpoint", "ckpt_path", scope=lambda shared, ctx: shared.trainer.as_of(ctx.state)),
    # teardown; after an exception innermost first
    Row(Event.EXCEPTION, "on_enter_validate", when=_LEAVE),
    Row(Event.EXCEPTION, "on_validate_exception", "exception", "validation broke"),
    Row(Event.EXCEPTION, "on_enter_train", when=_LEAVE),
    Row(Event.EXCEPTION, "on_train_exception", "exception", "training broke"),
    Row(Event.EXCEPTION, "on_enter_fit", when=_LEAVE),
    Row(Event.EXCEPTION, "on_fit_exception", "exception", "the fit broke"),
    Row(Event.TRAIN_END, "on_enter_validate", when=_LEAVE),  # of an interrupted validation, which the next leg repeats
    Row(Event.TRAIN_END, "on_train_end", "model loop loop_idx", "a stretch ends"),
    Row(Event.TRAIN_END, "on_enter_train", when=_LEAVE),
    Row(Event.TRAIN_END, "on_fit_end", "loop", "the fit ends well"),
    Row(Event.TRAIN_END, "on_enter_fit", when=_LEAVE),
)

_REGISTRY = "GLOBAL_CALLBACK_REGISTRY"  # filled by the library's ``with callback:``
_REGISTRIES = ("cerebras.modelzoo.trainer.callbacks", "cerebras.modelzoo.trainer.callbacks.callback")


class Cerebras(TableAdapter):
    """Adapts a ``Callback`` of the Model Zoo."""

    dialect = "cerebras"
    packages = PACKAGES
    bases = ("Callback", "CoreCallback", "ValidationCallback", "Logger")
    rows = ROWS
    shared_kind = SharedState
    leading = ("trainer",)
    values = VALUES
    conditions = CONDITIONS
    state_hooks = dict.fromkeys((*_SAVE, *_LOAD), "state_dict")
    silent = (
        *state_hooks,
        # dalsegno has no restart by a supervisor, and no validation that callbacks run
        *("finalize", "run_validation", "on_enter_validate_all", "on_after_save_trainer_state"),
    )
    instead = {
        "Checkpoint": "set save_steps=, or save=",
        "KeepNCheckpoints": "set save_total_limit=, or keep=Latest(n)",
        "SaveCheckpointState": "export the model of a checkpoint: dalsegno checkpoints export",
        "LoadCheckpointStates": "pass load_components= to train()",
        "Lora": "wrap the model before it is passed to the Trainer, e.g. with peft",
        "SamplesStreamedInfo": "use dalsegno.callbacks.SamplesStreamedInfo",
        "SkipSamples": "use dalsegno.callbacks.SkipSamples",
        "FlopUtilization": "use dalsegno.callbacks.FlopUtilization",
        "ComputeNorm": "use dalsegno.callbacks.ComputeNorm",
        "ComputeNormGNS": "use dalsegno.callbacks.GradientNoiseScale",
        "DumpAvailableTensorNames": "use dalsegno.callbacks.DumpActivations",
        "SavePerformanceData": "use dalsegno.callbacks.RateProfiler, and dalsegno logs summary --json",
        "RunSchedule": "set max_steps= and eval_steps=",
        "SelectiveGrad": "freeze parameters by requires_grad_(False), or mask gradients in on_pre_optimizer_step",
        "LogSparsity": "add the share of zeros in the weights to ctx.logs in on_log_step",
    }

    state_rehearsed = False  # on_save_checkpoint must be called for real saves only
    sets_control_flags = False  # except through trainer.early_exit, which SharedState polls

    @classmethod
    def registered_globally(cls) -> Iterable[object]:
        modules = [sys.modules[name] for name in _REGISTRIES if name in sys.modules]
        held = {id(each): each for module in modules for each in getattr(module, _REGISTRY, {}).values()}
        return held.values()

    def arguments(self, method: str) -> tuple[Sequence[str], Sequence[str]]:
        (trainer, *given), keywords = super().arguments(method)
        if method == _LOG_METRICS:
            return given, keywords
        return ((trainer, "stack", *given) if method.startswith("on_enter_") else (trainer, *given)), keywords

    def overridden_calls(self) -> list[tuple[Event, str]]:
        logs = is_logger(self.__wrapped__)
        return [call for call in super().overridden_calls() if logs or call[1] != _LOG_METRICS]

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        self._stacks: dict[str, ExitStack] = {}  # what is open, by the method that has opened it
        return super().bound_handlers(binder)

    def call(self, event: Event, method: str, binder: Binder) -> Callable[[Any, Any], Answer]:
        if self._table[event, method].when != _LEAVE:
            return super().call(event, method, binder)

        def close(_: Any, ctx: Any) -> None:
            stack, error = self._stacks.pop(method, None), getattr(ctx, "exception", None)
            if stack is not None:
                stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

        return close

    def method(self, name: str) -> Callable[..., Any]:
        method = super().method(name)

        def enter(trainer: object, *given: Any) -> None:
            stack = self._stacks[name] = ExitStack()
            method(trainer, stack, *given)

        if name == _LOG_METRICS:
            return lambda trainer, metrics, step: method(metrics, step)
        return enter if name.startswith("on_enter_") else method

    def state_methods(self) -> tuple[Callable[[], State], Callable[[State], object]] | None:
        if any(self._defines(method) for method in self.state_hooks):
            return self._save, self._load
        return super().state_methods()

    def _save(self) -> State:
        if self._shared is None or not self._shared.fitting:  # whether it can be saved is tried without their hooks
            return {}
        state: dict[str, dict[str, Any]] = {"checkpoint": {}, "trainer_state": {}}
        self._call(_SAVE, state)
        saved: State = encode_deques(state)
        return saved

    def _load(self, state: State) -> None:
        self._call(_LOAD, decode_deques(state))

    def _call(self, hooks: Sequence[str], state: Mapping[str, dict[str, Any]]) -> None:
        for hook in hooks:
            if self._defines(hook):
                part = "trainer_state" if hook.endswith("trainer_state") else "checkpoint"
                getattr(self.__wrapped__, hook)(self._shared.trainer, state.get(part, {}))


_MARK = "__deque__"


def encode_deques(tree: Any) -> Any:
    """Return ``tree`` with every deque as a dict of its items and its greatest length."""
    if type(tree) is deque:
        return {_MARK: [encode_deques(item) for item in tree], "maxlen": tree.maxlen}
    return _with_parts(tree, encode_deques)


def decode_deques(tree: Any) -> Any:
    """Undo :func:`encode_deques`."""
    if type(tree) is dict and tree.keys() == {_MARK, "maxlen"}:
        return deque((decode_deques(item) for item in tree[_MARK]), tree["maxlen"])
    return _with_parts(tree, decode_deques)


def _with_parts(tree: Any, change: Callable[[Any], Any]) -> Any:
    if type(tree) is dict:
        return {key: change(value) for key, value in tree.items()}
    return type(tree)(map(change, tree)) if type(tree) in (list, tuple) else tree
