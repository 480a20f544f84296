"""Hugging Face's dialect, and Forgather's, which extends it; in ``bridge``, dalsegno's callbacks in its Trainer.

A handler is called as ``on_step_end(args, state, control, **kwargs)``, with Hugging Face's keyword arguments:
``model`` (unwrapped), ``processing_class``, ``optimizer``, ``lr_scheduler``, ``train_dataloader``, ``eval_dataloader``,
and ``logs`` or ``metrics``. Handlers of Forgather's callbacks, those with a parameter ``trainer``, and those that take
any keyword and belong to a callback based on :class:`TrainerCallback` also get the trainer; those with a
parameter ``tokenizer`` (Hugging Face's name until 2024) also get the processing class under that name. What differs
for Forgather's callbacks is in :data:`FORGATHER`.

As under Hugging Face's Trainer, a record and an evaluation's metrics contain the epoch, and each record is in
``state.log_history`` before ``on_log``. A leg that begins or ends inside an epoch calls ``on_epoch_begin`` or
``on_epoch_end`` of a stateless callback there; a stateful callback gets each of them once per epoch, over all legs.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, TypedDict

import torch
from torch.distributed.tensor import DTensor

from dalsegno.checkpoint import Checkpoint
from dalsegno.checkpoint.export import pretrained_files, write_pretrained
from dalsegno.distributed import collectives
from dalsegno.errors import CannotSave, ConfigurationError
from dalsegno.events import contexts
from dalsegno.events.adapters import CallbackAdapter
from dalsegno.events.callback import Answer, Binder, Callback, Name
from dalsegno.events.dispatcher import number_in_record
from dalsegno.events.table import Event
from dalsegno.interop.hf.trainer import RANK_PEAK_MEM, SharedRecord, SharedState, record_of
from dalsegno.state import Handler
from dalsegno.stateful.component import State, Stateful
from dalsegno.stateful.schema import Count, Must
from dalsegno.system import filesystem

logger = logging.getLogger("dalsegno")

# --- which method is called at which event, and how the call differs from the event ----------------------------------

Call = Callable[[Any, Any], Answer]
"""``(adapted, ctx)``"""


Invoke = Callable[..., Answer]
"""``(adapted, ctx, added)``: calls a method with the arguments of every event, and with those that this one adds."""

Wrapper = Callable[[Invoke, Binder], Call]
"""Makes the call of a method at an event of one run."""

Wrappers = Mapping[tuple[Event, str], Wrapper]
"""The calls of a library's methods. Those at the same event are made in this order."""

KEYWORDS = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")


def invoke_with_event(function: Callable[..., Any], shared: SharedState) -> Invoke:
    """Return a caller of ``function``. Everything that is constant over a run is looked up once, here."""
    context, args, state, state_at = shared.context, shared.args, shared.state, shared.state_at
    live, model, processing_class = context.state, context.model, context.processing_class
    optimizer, lr_scheduler = context.optimizer, context.lr_scheduler
    train_dataloader = shared.train_dataloader

    def invoke(adapted: Any, ctx: contexts.Context, added: Mapping[str, Any] | None = None) -> Answer:
        method = partial(function, **added) if added else function  # ** in the call below would cost time at every step
        answer: Answer = method(
            args,
            state if ctx.state is live else state_at(ctx.state),
            ctx.control,
            model=model,
            processing_class=processing_class,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            train_dataloader=train_dataloader,
            eval_dataloader=shared.eval_dataloader,
        )
        return answer

    return invoke


def direct(invoke: Invoke, binder: Binder) -> Call:
    return invoke


def under(condition: Callable[[SharedState, Any], bool]) -> Wrapper:
    """Call if the condition, of the shared state and the context, holds."""

    def wrapper(invoke: Invoke, binder: Binder) -> Call:
        shared = binder.shared(SharedState)
        return lambda adapted, ctx: invoke(adapted, ctx) if condition(shared, ctx) else None

    return wrapper


def adding(get: Callable[[SharedState, Any], dict[str, Any]]) -> Wrapper:
    """Call with further keyword arguments, of the shared state and the context."""

    def wrapper(invoke: Invoke, binder: Binder) -> Call:
        shared = binder.shared(SharedState)
        return lambda adapted, ctx: invoke(adapted, ctx, get(shared, ctx))

    return wrapper


with_metrics = adding(lambda shared, ctx: {"metrics": shared.metrics_of(ctx)})
with_step_metrics = adding(lambda shared, ctx: {"metrics": shared.metrics_of(ctx), **_of_step(ctx)})
with_mutable_record = adding(lambda shared, ctx: {"logs": ctx.logs})
"""The record itself: what the method adds to it is logged."""
unless_last = under(lambda shared, ctx: not ctx.is_last)
if_epoch_joined = under(lambda shared, ctx: shared.joined_epoch)
if_epoch_left = under(lambda shared, ctx: ctx.kind == "final" and shared.inside_epoch)
"""The leg ends inside an epoch: at its final record, the last event but one."""


def with_mutable_metrics(invoke: Invoke, binder: Binder) -> Call:
    """Call with a copy of an evaluation's metrics. Numbers that the method adds to it, on rank 0, may select the best
    model, and are known to all handlers after this one; not those of a callback that other ranks do not call."""
    shared = binder.shared(SharedState)
    live = shared.context.state

    def call(adapted: Any, ctx: contexts.EvaluateContext) -> Answer:
        metrics = shared.metrics_of(ctx)
        before = set(metrics)
        answer = invoke(adapted, ctx, {"metrics": metrics})
        if ctx.state is live and adapted.ranks == "all":  # in the background, it comes too late
            added = {name: float(metrics[name]) for name in metrics.keys() - before if _is_number(metrics[name])}
            added = collectives.broadcast(added, f"metrics that {adapted.key} adds")
            for each in (ctx.metrics, ctx.all_metrics):
                each.update(added)
        return answer

    return call


def _is_number(value: object) -> bool:
    is_element = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_element or (isinstance(value, Real) and not isinstance(value, bool))


def with_record(invoke: Invoke, binder: Binder) -> Call:
    return sharing(binder.shared(SharedState).record, invoke)


def sharing(record: SharedRecord, invoke: Invoke) -> Call:
    """Call with the shared record. What the method adds to it is in the logs for all handlers after this one, but not
    in an evaluation's metrics, which decide over checkpoints."""

    def call(adapted: Any, ctx: contexts.LogContext) -> Answer:
        logs = record.of(ctx)
        before = set(logs)
        answer = invoke(adapted, ctx, {"logs": logs})
        for name in logs.keys() - before:
            if isinstance(logs[name], torch.Tensor):  # else the next save fails, at the history of records
                logs[name] = number_in_record(name, logs[name], adapted.key)
        if ctx.kind != "eval":
            ctx.logs.update({name: logs[name] for name in logs.keys() - before})
        return answer

    return call


def with_checkpoint_view(invoke: Invoke, binder: Binder) -> Call:
    """Call with the checkpoint in Hugging Face's layout, if the callback uploads it."""
    shared = binder.shared(SharedState)

    def call(adapted: Any, ctx: contexts.SaveContext) -> Answer:
        if not (ctx.state.is_world_process_zero and uploads_checkpoints(adapted.__wrapped__)):
            return invoke(adapted, ctx)
        with ExitStack() as inside:
            try:
                inside.enter_context(checkpoint_view(ctx, shared))
            except (CannotSave, OSError) as error:  # the checkpoint is safe, and training continues
                logger.error("%s.on_save is left out at step %d: %s", adapted.key, ctx.step, error)
                return None
            return invoke(adapted, ctx)

    return call


def ignoring_last_step(invoke: Invoke, binder: Binder) -> Call:
    """For ``DefaultFlowCallback``, which stops training at the last step: dalsegno ends there by itself."""
    state = binder.shared(SharedState).state

    def call(adapted: Any, ctx: contexts.Context) -> Answer:
        control = ctx.control
        was_stopping = control.should_training_stop
        answer = invoke(adapted, ctx)
        if not was_stopping and state.global_step >= state.max_steps:
            control.should_training_stop = False
        return None if answer is control else answer

    return call


_OF_STEP = ("loss", "grad_norm", "tokens")


def _of_step(ctx: contexts.MetricsContext) -> dict[str, Any]:
    """Return Forgather's numbers of a step, which have no tokens where the batches have none."""
    return {name: ctx.metrics.get(name, 0 if name == "tokens" else None) for name in _OF_STEP}


WRAPPERS: Wrappers = {
    (Event.INIT_END, "on_init_end"): direct,
    (Event.TRAIN_BEGIN, "on_train_begin"): direct,
    (Event.TRAIN_BEGIN, "on_epoch_begin"): if_epoch_joined,
    (Event.EPOCH_BEGIN, "on_epoch_begin"): direct,
    (Event.STEP_BEGIN, "on_step_begin"): direct,
    (Event.MICROBATCH_BEGIN, "on_forward_backward_begin"): direct,
    (Event.MICROBATCH_END, "on_forward_backward_end"): direct,
    (Event.MICROBATCH_END, "on_substep_end"): unless_last,
    (Event.PRE_OPTIMIZER_STEP, "on_pre_optimizer_step"): direct,
    (Event.OPTIMIZER_STEP, "on_optimizer_step"): direct,
    (Event.STEP_END, "on_step_end"): direct,
    (Event.TRAIN_METRICS, "on_train_metrics"): with_step_metrics,
    (Event.LOG_STEP, "on_epoch_end"): if_epoch_left,
    (Event.LOG_STEP, "on_log_step"): with_mutable_record,
    (Event.LOG, "on_log"): with_record,
    (Event.PREDICTION_STEP, "on_prediction_step"): direct,
    (Event.EVALUATE, "on_evaluate"): with_mutable_metrics,
    (Event.PREDICT, "on_predict"): with_metrics,
    (Event.SAVE, "on_save"): with_checkpoint_view,
    (Event.EPOCH_END, "on_epoch_end"): direct,
    (Event.TRAIN_END, "on_train_end"): direct,
}
"""Hugging Face's."""


class IntervalState(TypedDict):
    squares: Annotated[float, Must("0 or more", lambda squares: not squares < 0)]
    norms: Count
    tokens: Count


class Interval(Callback):
    """The interval since the last record, shared by all of Forgather's callbacks in one run."""

    name = "forgather"
    sets_control_flags = False
    state_schema = IntervalState

    def __init__(self, context: contexts.Context) -> None:
        self.record = SharedRecord(context.state, self.record_of)
        self._squares: float | torch.Tensor = 0.0  # sum of the squared gradient norms, on their device
        self._norms = 0
        self._tokens = 0  # of the run at the last record
        self._record: dict[str, Any] = {}  # what the newest record of training has in place of dalsegno's numbers

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        norm = ctx.unread_grad_norm
        if norm is not None:
            self._squares = self._squares + torch.as_tensor(norm, dtype=torch.float64).square()
            self._norms += 1

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind != "train":
            return
        self._record = {"total_flos": ctx.state.total_flos}
        if "peak_mem" in ctx.logs:
            self._record["peak_mem"] = ctx.logs.get(RANK_PEAK_MEM, [ctx.logs["peak_mem"]])
        if self._norms:
            self._record["grad_norm"] = math.sqrt(float(self._squares) / self._norms)
        if "tokens" in ctx.logs:
            total = ctx.logs["tokens"]
            self._record |= {"tokens": total - self._tokens, "total_tokens": total}
            self._tokens = total
        if "learning_rate" in ctx.logs:
            self._record["learning_rate"] = float(ctx.optimizer.param_groups[0]["lr"])
        self._squares, self._norms = 0.0, 0

    def record_of(self, ctx: contexts.LogContext) -> dict[str, Any]:
        """Return a copy of the record, with Forgather's numbers."""
        return record_of(ctx) | (self._record if ctx.kind == "train" else {})

    def state_dict(self) -> IntervalState:
        return {"squares": float(self._squares), "norms": self._norms, "tokens": self._tokens}

    def load_state_dict(self, state: IntervalState) -> None:
        self._squares, self._norms, self._tokens = state["squares"], state["norms"], state["tokens"]


def unless_evaluation(call: Call) -> Call:
    return lambda adapted, ctx: None if ctx.kind == "eval" else call(adapted, ctx)


def with_interval_record(invoke: Invoke, binder: Binder) -> Call:
    return unless_evaluation(sharing(binder.shared(Interval).record, invoke))


def with_mutable_interval_record(invoke: Invoke, binder: Binder) -> Call:
    """Call with a copy of the record; what the method adds or changes is logged."""
    interval = binder.shared(Interval)

    def call(adapted: Any, ctx: contexts.LogContext) -> Answer:
        logs = interval.record_of(ctx)
        before = dict(logs)
        answer = invoke(adapted, ctx, {"logs": logs})
        kept = {name for name, value in before.items() if logs.get(name) is value}
        ctx.logs.update({name: value for name, value in logs.items() if name not in kept})
        return answer

    return unless_evaluation(call)


def before_count(invoke: Invoke, binder: Binder) -> Call:
    def call(adapted: Any, ctx: contexts.MetricsContext) -> Answer:
        before = ctx.copy()
        before.state.global_step -= 1
        return invoke(adapted, before, _of_step(ctx))

    return call


FORGATHER: Wrappers = {
    **WRAPPERS,
    (Event.LOG_STEP, "on_log_step"): with_mutable_interval_record,
    (Event.LOG, "on_log"): with_interval_record,
    (Event.TRAIN_METRICS, "on_train_metrics"): before_count,
    (Event.TRAIN_METRICS, "on_step_end"): direct,  # in place of STEP_END, if the callback has both methods
}

ADDED: Mapping[Wrapper, Sequence[str]] = {
    **dict.fromkeys((with_record, with_mutable_record, with_interval_record, with_mutable_interval_record), ("logs",)),
    **dict.fromkeys((with_metrics, with_mutable_metrics), ("metrics",)),
    with_step_metrics: ("metrics", *_OF_STEP),
    before_count: _OF_STEP,
}
"""Keyword arguments that a wrapper adds."""


# --- the adapter, and the base class ----------------------------------------------------------------------------


_STEP_ENDS = (Event.STEP_END, "on_step_end"), (Event.TRAIN_METRICS, "on_step_end")
"""Where Forgather's ``on_step_end`` is called: after the event, or after ``on_train_metrics``, which precedes it."""


class HuggingFace(CallbackAdapter):
    """Adapts a ``TrainerCallback`` of Hugging Face, of Forgather, or dalsegno's own."""

    dialect = "huggingface"
    packages = ("transformers", "forgather", "trl", "dalsegno.interop.hf")
    bases = ("TrainerCallback",)
    parameters = ("args", "state", "control")
    background_safe = True
    calls = tuple(WRAPPERS)
    silent = ("on_push_begin",)  # dalsegno does not push to a hub
    instead = {
        "SyncRefModelCallback": "run TRL's own trainer with a dalsegno.interop.hf.Bridge",
        "LogCompletionsCallback": "use dalsegno.callbacks.TextgenCallback",
        "WeaveCallback": "use dalsegno.callbacks.TextgenCallback",
    }

    def __init__(self, foreign: object, name: str | None = None) -> None:
        self._is_forgather = any(cls.__module__.startswith("forgather.") for cls in type(foreign).__mro__)
        self._wrappers = FORGATHER if self._is_forgather else WRAPPERS
        super().__init__(foreign, name)

    def arguments(self, method: str) -> tuple[Sequence[str], Sequence[str]]:
        wrappers = [wrapper for (_, called), wrapper in self._wrappers.items() if called == method]
        added = dict.fromkeys(name for wrapper in wrappers for name in ADDED.get(wrapper, ()))
        return ("args", "state", "control"), (*KEYWORDS, *self._extras(method), *added)

    def overridden_calls(self) -> list[tuple[Event, str]]:
        has_state = isinstance(self, Stateful)
        unused = _STEP_ENDS[0] if self._is_forgather and self._defines("on_train_metrics") else _STEP_ENDS[1]
        return [
            call
            for call, wrapper in self._wrappers.items()
            if self._defines(call[1])
            and call != unused
            and not (has_state and wrapper in (if_epoch_joined, if_epoch_left))
        ]

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        check_uploads(self.__wrapped__, binder.shared(SharedState).context)
        return super().bound_handlers(binder)

    def call(self, event: Event, method: str, binder: Binder) -> Call:
        shared = binder.shared(SharedState)
        context = shared.context
        extras = {"trainer": context.trainer, "tokenizer": context.processing_class}
        function = getattr(self.__wrapped__, method)
        if named := {name: extras[name] for name in self._extras(method)}:
            function = partial(function, **named)
        is_default_flow = any(cls.__name__ == "DefaultFlowCallback" for cls in type(self.__wrapped__).__mro__)
        wrapper = ignoring_last_step if is_default_flow and event is Event.STEP_END else self._wrappers[event, method]
        return wrapper(invoke_with_event(function, shared), binder)

    def _extras(self, method: str) -> list[str]:
        """The keywords for this method that Hugging Face never passes, or no longer."""
        named = inspect.signature(getattr(self.__wrapped__, method)).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in named.values())
        gets_trainer = self._is_forgather or (isinstance(self.__wrapped__, TrainerCallback) and takes_all)
        return [name for name in ("trainer", "tokenizer") if name in named or (name == "trainer" and gets_trainer)]

    def state_methods(self) -> tuple[Callable[[], State], Callable[[State], object]] | None:
        """Use ``state_dict`` as Forgather does; else Hugging Face's ``ExportableState``."""
        foreign: Any = self.__wrapped__
        own = super().state_methods()
        if own is None and callable(getattr(foreign, "state", None)) and callable(getattr(foreign, "from_state", None)):
            return foreign.state, self._restore
        return own

    def _restore(self, state: State) -> None:
        """Restore the state into the existing object, which keeps its present constructor arguments."""
        foreign: Any = self.__wrapped__
        if foreign.from_state.__qualname__ == "ExportableState.from_state":
            restored = state["attributes"]
        else:  # the class defines from_state itself
            restored = vars(foreign.from_state(state))
        for name, value in restored.items():
            setattr(foreign, name, value)


class TrainerCallback:
    """Base class with Hugging Face's and Forgather's handlers. Override only those that are needed.

    A handler is called with the run's arguments, state and control, under Hugging Face's names, and with the keyword
    arguments ``model``, ``processing_class``, ``optimizer``, ``lr_scheduler``, ``train_dataloader``,
    ``eval_dataloader`` and ``trainer``. It may set flags of the control, or return a changed control. If the class has
    ``state_dict`` and ``load_state_dict``, its state is saved and restored::

        class SaveAtNight(ds.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if datetime.now().hour == 3:
                    control.should_save = True
    """

    name: str | None = Name()  # type: ignore[assignment]
    """Name in messages, and key under which the state is saved: by default the class's name."""

    @property
    def default_name(self) -> str:
        return type(self).__name__

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_forward_backward_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_forward_backward_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_train_metrics(self, args: Any, state: Any, control: Any, *, metrics: Any, **kwargs: Any) -> Any: ...
    def on_log_step(self, args: Any, state: Any, control: Any, *, logs: Any, **kwargs: Any) -> Any: ...
    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any, **kwargs: Any) -> Any: ...
    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Any, **kwargs: Any) -> Any: ...
    def on_predict(self, args: Any, state: Any, control: Any, *, metrics: Any, **kwargs: Any) -> Any: ...
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...


# --- the ``checkpoint-<step>`` folder that Hugging Face's integrations read in ``on_save`` --------------------------


_MARK = "dalsegno.json"
"""File that distinguishes a folder made here from a checkpoint of Hugging Face's Trainer."""

_UPLOADS: Mapping[str, Callable[[Any], object]] = {
    "WandbCallback": lambda callback: callback._log_model == "checkpoint",
    "MLflowCallback": lambda callback: callback._log_artifacts,
    "ClearMLCallback": lambda callback: callback._log_model,
    "FlyteCallback": lambda callback: callback.sync_checkpoints,
    "NeptuneCallback": lambda callback: callback._log_checkpoints,
}
"""By the class's name, whether an integration uploads checkpoints. Most decide in ``on_train_begin``."""


def uploads_checkpoints(callback: object) -> bool:
    """Whether ``callback`` reads ``checkpoint-<step>``: by its settings, or else by the code of its ``on_save``."""
    for cls in type(callback).__mro__:
        if cls.__name__ in _UPLOADS and cls.__module__.startswith("transformers."):
            return bool(_UPLOADS[cls.__name__](callback))
    code = getattr(getattr(type(callback), "on_save", None), "__code__", None)
    if code is None:
        return False
    texts = [each for each in code.co_consts if isinstance(each, str)]
    return any("checkpoint-" in text for text in texts) or "PREFIX_CHECKPOINT_DIR" in code.co_names


@contextmanager
def checkpoint_view(ctx: contexts.SaveContext, shared: SharedState) -> Iterator[None]:
    """Have ``checkpoint-<step>`` below ``output_dir``: weights, configuration, tokenizer and ``trainer_state.json``.
    What else is in it at the end is moved into the checkpoint's directory. All are copies: a callback may write to
    them."""
    folder = ctx.args.directory / f"checkpoint-{ctx.step}"
    if folder.exists():
        if not (folder / _MARK).exists():
            raise ConfigurationError(
                f"{folder}: exists already, and a callback would upload it as this run's; move it away"
            )
        filesystem.remove(folder)  # of a leg that was killed during an upload
    filesystem.make_directory(folder)
    try:
        filesystem.replace_durably(folder / _MARK, json.dumps({"made_from": ctx.path.name}).encode())
        write_pretrained(Checkpoint.open(ctx.path), folder, pretrained_files(ctx.model, ctx.processing_class))
        shared.state_at(ctx.state).save_to_json(str(folder / "trainer_state.json"))
        ours = sorted(folder.rglob("*"), reverse=True)  # a folder after what is in it
        try:
            yield
        finally:
            _move_others(folder, ours, ctx.path)
    finally:
        filesystem.remove(folder)


def _move_others(folder: Path, ours: Sequence[Path], target: Path) -> None:
    for each in ours:
        if each.is_dir():
            with suppress(OSError):  # it has more in it
                each.rmdir()
        else:
            filesystem.remove(each)
    for each in sorted(folder.glob("*")):
        place = target / each.name
        filesystem.rename(each, filesystem.numbered(target, each.name) if place.exists() else place)


def check_uploads(callback: Any, context: contexts.Context) -> None:
    """Refuse a callback that uploads the final model in a way that cannot work here."""
    names = {cls.__name__ for cls in type(callback).__mro__ if cls.__module__.startswith("transformers.")}
    export = "dalsegno.checkpoint.export_model(result.checkpoint, folder)"
    if "DVCLiveCallback" in names and callback._log_model is True:
        raise ConfigurationError(
            "DVCLiveCallback(log_model=True): builds Hugging Face's Trainer at the end of training, which needs "
            f"arguments of its own class; use log_model='all', or log a folder made by {export}"
        )
    is_sharded = any(isinstance(parameter, DTensor) for parameter in context.model.parameters())
    if "WandbCallback" in names and callback._log_model.value != "false" and is_sharded:
        raise ConfigurationError(
            f"WANDB_LOG_MODEL={callback._log_model.value}: saves the model from rank 0's memory at the end, "
            f"where a sharded model is not whole; unset it, and log a folder made by {export}"
        )
