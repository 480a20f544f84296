"""Objects that stand in for another library's, and the progress of a run as they report it. TableAdapter: adapts to a
library whose order of calls is a table, with a row for each method and event."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import torch

from dalsegno.distributed import accelerator, collectives
from dalsegno.events import contexts
from dalsegno.events.adapters import CallbackAdapter
from dalsegno.events.callback import Answer, Binder, Callback
from dalsegno.events.table import Event
from dalsegno.state import Handler


class StandIn:
    """Reading an attribute without a counterpart raises an AttributeError that lists those that exist."""

    _stands_for: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        present = getattr(type(self), name, None)
        if isinstance(present, property):  # it has raised an AttributeError itself: raise that again
            return present.__get__(self)
        known = sorted(each for each in dir(self) if not each.startswith("_"))
        raise AttributeError(
            f"{self._stands_for}.{name}: dalsegno has no counterpart of it; available: {', '.join(known)}"
        )


class Values(StandIn):
    """Values as attributes. Those in ``live`` are functions, called at each read."""

    def __init__(self, stands_for: str, live: Mapping[str, Callable[[], Any]] | None = None, **values: Any) -> None:
        vars(self).update(values, _stands_for=stands_for, _live=live or {})

    def __getattr__(self, name: str) -> Any:
        live = vars(self).get("_live", {})
        return live[name]() if name in live else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._live:
            raise AttributeError(f"{self._stands_for}.{name} cannot be set")
        super().__setattr__(name, value)

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *self._live]


def reads(source: str | Callable[[Any], Any]) -> Any:
    """A property: a path from the object, such as ``_state.global_step``, or a function of the object."""
    return property(attrgetter(source) if isinstance(source, str) else source)


class Collected:
    """What callbacks of another library log, on its way into dalsegno's records.

    In a step or an evaluation with a record, values are added to that record; in a step without one, they are dropped;
    outside of both, they are a separate record. On several ranks, a record gets those of rank 0.
    """

    def __init__(self, trainer: contexts.TrainerLike) -> None:
        self._trainer = trainer
        self._values: dict[str, Any] | None = None
        self._is_dropped = False

    def begin(self, *, has_record: bool) -> None:
        self._values, self._is_dropped = ({} if has_record else None), not has_record

    def end(self) -> None:
        """End it; remaining values are for the record of the epoch's end."""
        self._values, self._is_dropped = self._values or None, False

    def add(self, values: Mapping[str, Any]) -> None:
        if self._values is not None:
            self._values.update(values)
        elif not self._is_dropped:
            self._trainer.log(numbers_of(values))

    def move_into(self, ctx: contexts.LogContext) -> None:
        """Move the values into the record of the step or evaluation. Collective."""
        if ctx.kind in ("train", "eval"):
            here = self._values or {}
            ctx.logs.update(collectives.from_rank_zero(lambda: numbers_of(here)))
            self._values = None if self._values is None else {}


def numbers_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as a record can have them; reading a tensor waits for its device.

    A tensor of several elements becomes its mean, std, min and max, as Cerebras's ``LogInputSummaries`` names them.
    """
    record: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            record |= _summary(name, value)
        elif isinstance(value, (torch.Tensor, np.generic)):
            record[name] = value.item()
        elif isinstance(value, float):  # without the subclass, which a checkpoint could not contain
            record[name] = float(value)
        else:
            record[name] = value
    return record


def _summary(name: str, tensor: torch.Tensor) -> dict[str, float]:
    flat = accelerator.wide(tensor.detach()).flatten()
    if not flat.numel():
        return {}
    numbers = torch.stack([flat.mean(), flat.std(correction=0), flat.min(), flat.max()]).tolist()
    return {f"{name}/{what}": number for what, number in zip(("mean", "std", "min", "max"), numbers, strict=True)}


class Progress(Callback):
    """Handles each event before a library's callbacks do, so that its attributes are up to date for them."""

    sets_control_flags = False

    def __init__(self, context: contexts.Context) -> None:
        self.context = context
        self.collected = Collected(context.trainer)
        self.leg: object = None
        """A new object for each leg."""
        self.fitting = False
        self.ends_well = False
        """Whether a leg ends at this event, without an exception."""
        self.in_step = False
        """Whether a step has begun whose update is not counted yet."""
        self.epoch = 0
        self.batches = 0
        """Micro-batches of this epoch so far, including the one in progress."""
        self.batch: Any = None
        self.outputs: Any = None
        """Of the newest micro-batch, or batch of an evaluation."""
        self.validating = False
        """Whether an evaluation runs; also after its last set, until the step ends or the next epoch begins."""
        self.begins_validation = False
        """Whether an evaluation begins at this event, with the first of its sets."""
        self.val_batch = -1
        """Index of the batch within its set."""
        self.set_index = 0
        self.is_last_set = True
        self._validation_is_over = False

    def on_before_load(self, ctx: contexts.BeforeLoadContext) -> None:
        self.leg, self.validating = object(), False

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        self.fitting, self.ends_well = True, False
        self.epoch = int(ctx.state.epoch)
        if self.leg is None:
            self.leg = object()

    def on_epoch_begin(self, ctx: contexts.EpochContext) -> None:
        self.epoch, self.batches, self.validating = ctx.epoch, 0, False

    def on_step_begin(self, ctx: contexts.Context) -> None:
        self.in_step, self.validating = True, False
        self.collected.begin(has_record=ctx.state.will_log)

    def on_microbatch_begin(self, ctx: contexts.MicrobatchBeginContext) -> None:
        self.batches += 1
        self.batch = ctx.batch

    def on_before_forward(self, ctx: contexts.BeforeForwardContext) -> None:
        if self.validating:
            self.val_batch += 1
            self.batch = ctx.batch

    def on_after_forward(self, ctx: contexts.AfterForwardContext | contexts.BackwardContext) -> None:
        self.outputs = ctx.outputs

    on_before_backward = on_after_forward

    def on_microbatch_end(self, ctx: contexts.MicrobatchEndContext) -> None:
        self.batch, self.outputs = ctx.batch, ctx.outputs

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        self.in_step = False

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        self.collected.move_into(ctx)

    def on_evaluate_begin(self, ctx: contexts.EvaluateBeginContext) -> None:
        sets = list(ctx.eval_dataloader) if isinstance(ctx.eval_dataloader, Mapping) else [ctx.name]
        self.set_index = sets.index(ctx.name) if ctx.name in sets else 0
        self.is_last_set = self.set_index == len(sets) - 1
        self.begins_validation = not self.validating or self._validation_is_over
        self.validating, self._validation_is_over, self.val_batch = True, False, -1
        self.collected.begin(has_record=True)

    def on_evaluate(self, ctx: contexts.EvaluateContext) -> None:
        self._validation_is_over = ctx.is_last
        self.collected.end()

    def on_step_done(self, ctx: contexts.StepDoneContext) -> None:
        self.validating = False
        self.batch = self.outputs = None
        self.collected.end()

    def on_epoch_end(self, ctx: contexts.EpochContext) -> None:
        self.epoch = ctx.epoch

    def on_rollback(self, ctx: contexts.RollbackContext) -> None:
        self.epoch = int(ctx.state.epoch)

    def on_exception(self, ctx: contexts.ExceptionContext) -> None:
        self.fitting = self.validating = False

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        self.ends_well, self.fitting = self.fitting, False
        self.in_step = self.validating = False
        self.leg = None
        self.collected.end()


@dataclass(frozen=True, slots=True)
class Row:
    """Call ``method`` at ``event``, with the arguments named in ``given``, under the condition named in ``when``."""

    event: Event
    method: str
    given: str = ""
    when: str | None = None
    once: str | None = None
    """An attribute of the shared state: the method is called once for each object that is its value."""
    scope: Callable[[Any, Any], AbstractContextManager[None]] | None = None
    """Makes the call inside this, of the shared state and the context."""


class TableAdapter(CallbackAdapter):
    """Adapts a callback by a table of rows. What a method logs at LOG_STEP is in that record."""

    rows: ClassVar[Sequence[Row]]
    """The whole order. Within an event, from top to bottom."""
    shared_kind: ClassVar[type[Progress]]
    """What all callbacks of this library share in one run."""
    leading: ClassVar[Sequence[str]]
    """Names of the arguments that every method gets first."""
    values: ClassVar[Mapping[str, Callable[[Any, Any], Any]]]
    """Each argument, from the shared state and the context."""
    conditions: ClassVar[Mapping[str, Callable[[Any, Any], bool]]]
    """Each condition, from the shared state and the context."""
    state_hooks: ClassVar[Mapping[str, str]]
    """Methods that put state into a dict, or read it from there, each with the name of its last argument."""

    def __init_subclass__(cls) -> None:
        cls.calls = tuple((row.event, row.method) for row in cls.rows)

    def __init__(self, foreign: object, name: str | None = None) -> None:
        self._shared: Any = None
        self._called: dict[str, object] = {}  # for methods that are called once, the object of the newest call
        self._table = {(row.event, row.method): row for row in self.rows}
        super().__init__(foreign, name)
        for method in self.state_hooks:
            if self._defines(method):
                self._check_signature(method)

    def arguments(self, method: str) -> tuple[Sequence[str], Sequence[str]]:
        given = self.state_hooks.get(method) or next(row.given for row in self.rows if row.method == method)
        return (*self.leading, *given.split()), ()

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        self._shared = binder.shared(self.shared_kind)  # before the callback's own handlers, even if it has none
        return super().bound_handlers(binder)

    def call(self, event: Event, method: str, binder: Binder) -> Callable[[Any, Any], Answer]:
        shared, row, function = self._shared, self._table[event, method], self.method(method)
        given = [self.values[name] for name in (*self.leading, *row.given.split())]
        is_due = None if row.when is None else self.conditions[row.when]
        is_in_record = event is Event.LOG_STEP

        def call(_: Any, ctx: Any) -> None:
            if is_due is None or is_due(shared, ctx):
                function(*[value(shared, ctx) for value in given])
                if is_in_record:
                    shared.collected.move_into(ctx)

        def call_specially(adapted: Any, ctx: Any) -> None:
            if row.once is not None:
                life = getattr(shared, row.once)
                if self._called.get(method) is life:
                    return
                self._called[method] = life
            with nullcontext() if row.scope is None else row.scope(shared, ctx):
                call(adapted, ctx)

        return call_specially if row.once or row.scope else call

    def method(self, name: str) -> Callable[..., Any]:
        """Return the callback's method of this name, as :meth:`call` calls it."""
        method: Callable[..., Any] = getattr(self.__wrapped__, name)
        return method
