"""RunParts: what one run consists of, built once before anything is loaded; and ``CallbackSet``, its callbacks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dalsegno.args import TrainingArguments
from dalsegno.callbacks import default_callbacks, reporting_callbacks
from dalsegno.checkpoint import CALLBACKS, CallbackTensors
from dalsegno.data import ResumableLoader
from dalsegno.distributed import collectives
from dalsegno.distributed.buffers import SharedBuffers
from dalsegno.distributed.layout import Layout
from dalsegno.distributed.rng import RandomState
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.events.adapters import adapt, external_global_callbacks
from dalsegno.events.callback import Callback, global_callbacks
from dalsegno.events.contexts import Context
from dalsegno.events.dispatcher import Dispatcher
from dalsegno.events.registration import check_callbacks, instances
from dalsegno.events.table import Event
from dalsegno.state import TrainerControl, TrainerState
from dalsegno.stateful.component import TensorHolder
from dalsegno.witness import Witness

from .flags import Flags
from .mean_loss import MetricAccumulator
from .rollback_effects import RollbackEffects


class Comparison(Enum):
    """When the ranks' copies of the model are compared."""

    NEVER = "never"
    """DDP or another mode averages the gradients."""
    AT_SAVES = "at saves"
    """A loop of the user's own averages gradients, or now and then weights."""
    FROM_FIRST_STEP = "from the first step"
    """Nothing is known to average anything."""


@dataclass(frozen=True, slots=True)
class RunParts:
    """Lives as long as the user's ``Trainer`` or ``Run``, over all legs in this process."""

    args: TrainingArguments
    layout: Layout
    """Which ranks read the same data."""
    model: nn.Module
    """The user's own module, without DDP's or the compiler's wrapper."""
    processing_class: Any
    """The tokenizer or processor; None if there is none."""
    loss_fn: nn.Module | None
    """The loss function, if it is a module."""
    optimizer: Optimizer
    schedulers: Sequence[Any]
    loader: ResumableLoader
    state: TrainerState
    control: TrainerControl
    metrics: MetricAccumulator
    random_state: RandomState
    buffers: SharedBuffers
    flags: Flags
    dispatcher: Dispatcher
    callbacks: CallbackSet
    rollback_effects: RollbackEffects
    witness: Witness
    comparison: Comparison
    """When the ranks' copies of the model are compared."""


def build_parts(
    args: TrainingArguments,
    *,
    layout: Layout,
    model: nn.Module,
    loss_fn: nn.Module | None = None,
    optimizer: Optimizer,
    schedulers: Sequence[Any],
    loader: ResumableLoader,
    callbacks: Iterable[object],
    core: Sequence[Callback] = (),
    context_fields: Mapping[str, Any],
    unsupported_events: Mapping[Event, str] | None = None,
    comparison: Comparison = Comparison.NEVER,
) -> RunParts:
    """
    Args:
        model: on its device already, and sharded if it is to be.
        core: the engine's own callbacks; they are called first.
        context_fields: the fields of every event's context that are not in ``RunParts``.
        unsupported_events: events that this loop cannot fire, each with the reason and the remedy.
    """
    is_rank_zero = collectives.rank() == 0
    state = TrainerState(is_local_process_zero=collectives.local_rank() == 0, is_world_process_zero=is_rank_zero)
    control = TrainerControl(can_roll_back=args.recovery is not None)

    def make_context(kind: type[Context]) -> Context:
        return kind(
            args=args,
            layout=layout,
            state=state,
            control=control,
            model=model,
            optimizer=optimizer,
            lr_scheduler=schedulers[0] if len(schedulers) == 1 else schedulers,
            **context_fields,
        )

    dispatcher = Dispatcher(make_context, is_rank_zero=is_rank_zero, unsupported_events=unsupported_events)
    return RunParts(
        args=args,
        layout=layout,
        model=model,
        processing_class=context_fields.get("processing_class"),
        loss_fn=loss_fn,
        optimizer=optimizer,
        schedulers=schedulers,
        loader=loader,
        state=state,
        control=control,
        metrics=MetricAccumulator(layout, device_of(model)),
        random_state=RandomState(args.seed, layout, lambda: state.global_step),
        buffers=SharedBuffers([model] if loss_fn is None else [model, loss_fn]),
        flags=Flags(
            {"model": model} if loss_fn is None else {"model": model, "loss_fn": loss_fn},
            optimizer,
            lambda: dispatcher.callbacks,
        ),
        dispatcher=dispatcher,
        callbacks=CallbackSet(dispatcher, model, callbacks, core=core, report_to=args.report_to),
        rollback_effects=RollbackEffects(optimizer, loader),
        witness=Witness(args.directory, device_of(model), args.on_resume),
        comparison=comparison,
    )


class CallbackSet:
    """The engine's own callbacks, then the defaults, the user's (``given``) and the global ones. Callbacks of other
    libraries are adapted; those that hold sharded tensors get the ``model``."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: nn.Module,
        given: Iterable[object],
        *,
        core: Sequence[Callback] = (),
        report_to: Iterable[str] = (),
    ) -> None:
        self._dispatcher = dispatcher
        self._model = model
        self._core = core
        users = check_callbacks(given)
        taken = {callback.key for callback in users}
        trackers = reporting_callbacks(report_to, without=taken)
        self._users = [*(each for each in default_callbacks() if each.key not in taken), *users, *trackers]
        self.tensors: list[CallbackTensors] = []
        """State of callbacks that is sharded over the ranks as the model is."""
        self.rebind()

    @property
    def bound(self) -> list[Callback]:
        """All of them, in calling order."""
        return self._dispatcher.callbacks

    def add(self, callback: object) -> None:
        """Bind one more of the user's."""
        self._bind([*self._users, *check_callbacks(instances([callback]))])

    def remove(self, callback: object) -> Callback:
        """Unbind a callback, given itself, its key or its class, and return it. Of several of a class, the first."""
        if isinstance(callback, str):
            key = callback
        elif isinstance(callback, type):
            found = [each.key for each in self.bound if isinstance(inspect.unwrap(each), callback)]  # type: ignore[arg-type]
            key = found[0] if found else callback.__name__
        else:
            key = adapt(callback).key
        removed = self._dispatcher.find(key)
        self._bind([each for each in self._users if each is not removed])
        return removed

    def rebind(self) -> None:
        """Bind again: global callbacks may have been added or removed since."""
        self._bind(self._users)

    def _bind(self, users: list[Callback]) -> None:
        everywhere = [*global_callbacks(), *external_global_callbacks()]
        self._dispatcher.bind([*self._core, *users, *(each for each in everywhere if each not in users)])
        self.tensors = [
            CallbackTensors(f"{CALLBACKS}{each.key}", each, self._model)
            for each in self.bound
            if isinstance(each, TensorHolder)
        ]
        self._users = users
