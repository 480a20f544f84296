"""Hugging Face's dialect, and Forgather's, which says a little more.

A handler is called as ``on_step_end(args, state, control, **kwargs)``, with what Hugging Face gives as keywords:
``model`` (unwrapped), ``processing_class``, ``optimizer``, ``lr_scheduler``, ``train_dataloader``, ``eval_dataloader``,
and ``logs`` or ``metrics``. One of Forgather's, or one that names the parameter, is given ``trainer`` too; one that
names ``tokenizer``, as they were written until 2024, the processing class.

What their Trainer does around its events happens here too: a record and an evaluation's metrics carry the epoch, and
each record is in ``state.log_history`` before ``on_log``. A leg that begins or ends inside of an epoch begins or ends
that epoch for a callback without state; for one with state, an epoch is begun and ended once, in whichever leg.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dalsegno.callback import Answer, Binder
from dalsegno.component import State, Stateful
from dalsegno.contexts import Context, LogContext, SaveContext
from dalsegno.events import Event
from dalsegno.foreign import Adapted

from .company import Company, record_of

_GIVEN = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
_ADDED = {
    "on_log": ("logs",),
    "on_log_step": ("logs",),
    "on_train_metrics": ("metrics",),
    "on_evaluate": ("metrics",),
    "on_predict": ("metrics",),
}
_OF_A_LEG = ((Event.TRAIN_BEGIN, "on_epoch_begin"), (Event.LOG_STEP, "on_epoch_end"))
"""What begins and ends an epoch that a leg begins or ends inside of: its last event but one is its final record."""

Call = Callable[[Any, Any], Answer]


class HuggingFace(Adapted):
    """A ``TrainerCallback`` of Hugging Face's, of Forgather's, or of our own."""

    dialect = "huggingface"
    packages = ("transformers", "forgather", "dalsegno.dialects.hf")
    bases = ("TrainerCallback",)
    parameters = ("args", "state", "control")
    observes = True
    calls = (
        (Event.INIT_END, "on_init_end"),
        (Event.TRAIN_BEGIN, "on_train_begin"),
        (Event.TRAIN_BEGIN, "on_epoch_begin"),
        (Event.EPOCH_BEGIN, "on_epoch_begin"),
        (Event.STEP_BEGIN, "on_step_begin"),
        (Event.MICROBATCH_BEGIN, "on_forward_backward_begin"),
        (Event.MICROBATCH_END, "on_forward_backward_end"),
        (Event.MICROBATCH_END, "on_substep_end"),
        (Event.PRE_OPTIMIZER_STEP, "on_pre_optimizer_step"),
        (Event.OPTIMIZER_STEP, "on_optimizer_step"),
        (Event.STEP_END, "on_step_end"),
        (Event.TRAIN_METRICS, "on_train_metrics"),
        (Event.LOG_STEP, "on_epoch_end"),
        (Event.LOG_STEP, "on_log_step"),
        (Event.LOG, "on_log"),
        (Event.PREDICTION_STEP, "on_prediction_step"),
        (Event.EVALUATE, "on_evaluate"),
        (Event.PREDICT, "on_predict"),
        (Event.SAVE, "on_save"),
        (Event.EPOCH_END, "on_epoch_end"),
        (Event.TRAIN_END, "on_train_end"),
    )
    silent = ("on_push_begin",)  # nothing is pushed to a hub

    def arguments(self, method: str) -> tuple[Sequence[str], Sequence[str]]:
        return ("args", "state", "control"), (*_GIVEN, *self._extras(method), *_ADDED.get(method, ()))

    def own_calls(self) -> list[tuple[Event, str]]:
        has_state = isinstance(self, Stateful)
        return [call for call in super().own_calls() if not (has_state and call in _OF_A_LEG)]

    def _extras(self, method: str) -> list[str]:
        """What Hugging Face gives to nobody, or to nobody any more."""
        named = inspect.signature(getattr(self.__wrapped__, method)).parameters
        forgather = any(cls.__module__.startswith("forgather.") for cls in type(self.__wrapped__).__mro__)
        return [name for name in ("trainer", "tokenizer") if name in named or (forgather and name == "trainer")]

    def call(self, event: Event, method: str, binder: Binder) -> Call:
        company = binder.companion(Company)
        surroundings = company.context
        extras = {"trainer": surroundings.trainer, "tokenizer": surroundings.processing_class}
        named = {name: extras[name] for name in self._extras(method)}
        function = partial(getattr(self.__wrapped__, method), **named) if named else getattr(self.__wrapped__, method)
        args, live, state, state_at = company.args, surroundings.state, company.state, company.state_at
        model, processing_class = surroundings.model, surroundings.processing_class
        optimizer, lr_scheduler = surroundings.optimizer, surroundings.lr_scheduler
        train_dataloader = company.train_dataloader

        def plain(_: Any, ctx: Context, function: Callable[..., Any] = function) -> Answer:
            answer: Answer = function(
                args,
                state if ctx.state is live else state_at(ctx.state),
                ctx.control,
                model=model,
                processing_class=processing_class,
                optimizer=optimizer,
                lr_scheduler=lr_scheduler,
                train_dataloader=train_dataloader,
                eval_dataloader=company.eval_dataloader,
            )
            return answer

        def substep(_: Any, ctx: Any) -> Answer:
            return None if ctx.is_last else plain(_, ctx)

        def joined(_: Any, ctx: Context) -> Answer:
            return plain(_, ctx) if company.joined_epoch else None

        def broken_off(_: Any, ctx: LogContext) -> Answer:
            return plain(_, ctx) if ctx.kind == "final" and company.inside_epoch else None

        def with_logs(_: Any, ctx: LogContext) -> Answer:
            return plain(_, ctx, partial(function, logs=record_of(ctx)))

        def with_open_logs(_: Any, ctx: LogContext) -> Answer:
            return plain(_, ctx, partial(function, logs=ctx.logs))

        def with_metrics(_: Any, ctx: Any) -> Answer:
            return plain(_, ctx, partial(function, metrics={**ctx.metrics, "epoch": ctx.state.epoch}))

        def saved(_: Any, ctx: SaveContext) -> Answer:
            """Theirs waits for it: the state is that of the step which is saved."""
            if ctx.step == ctx.state.global_step:
                return plain(_, ctx)
            then = ctx.copy()
            then.state.global_step = ctx.step
            return plain(_, then)

        def flow(_: Any, ctx: Context) -> Answer:
            """Theirs stops the training at its last step, which here it comes to by itself."""
            control = ctx.control
            was_stopping = control.should_training_stop
            answer = plain(_, ctx)
            if not was_stopping and state.global_step >= state.max_steps:
                control.should_training_stop = False
            return None if answer is control else answer

        special: dict[Any, Call] = {
            (Event.TRAIN_BEGIN, "on_epoch_begin"): joined,
            (Event.LOG_STEP, "on_epoch_end"): broken_off,
            "on_substep_end": substep,
            "on_log": with_logs,
            "on_log_step": with_open_logs,
            "on_train_metrics": with_metrics,
            "on_evaluate": with_metrics,
            "on_save": saved,
            "on_predict": with_metrics,
        }
        if any(cls.__name__ == "DefaultFlowCallback" for cls in type(self.__wrapped__).__mro__):
            special["on_step_end"] = flow
        return special.get((event, method)) or special.get(method, plain)

    def state_methods(self) -> tuple[Callable[[], State], Callable[[State], object]] | None:
        """A ``state_dict`` as Forgather's have it; else what Hugging Face calls an ``ExportableState``."""
        foreign: Any = self.__wrapped__
        own = super().state_methods()
        if own is None and callable(getattr(foreign, "state", None)) and callable(getattr(foreign, "from_state", None)):
            return foreign.state, self._take_back
        return own

    def _take_back(self, state: State) -> None:
        """Into this very object, which keeps the arguments that it is built with now."""
        foreign: Any = self.__wrapped__
        if foreign.from_state.__qualname__ == "ExportableState.from_state":
            restored = state["attributes"]
        else:  # it says itself what its state is made into
            restored = vars(foreign.from_state(state))
        for name, value in restored.items():
            setattr(foreign, name, value)


DIALECT = HuggingFace
