"""RunParts: what one run consists of. Built once, before anything is loaded; everything above is built on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dalsegno.args import TrainingArguments
from dalsegno.data import ResumableLoader
from dalsegno.distributed import collectives
from dalsegno.distributed.buffers import SharedBuffers
from dalsegno.distributed.layout import Layout
from dalsegno.distributed.rng import RandomState
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import Context
from dalsegno.events.dispatcher import Dispatcher
from dalsegno.events.table import Event
from dalsegno.state import TrainerControl, TrainerState
from dalsegno.witness import Witness

from .callback_set import CallbackSet
from .flags import Flags
from .metrics import MetricAccumulator
from .recoveries import Recoveries


class Comparison(Enum):
    """When the ranks' copies of the model are compared."""

    NEVER = "never"
    """DDP or another mode averages the gradients."""
    AT_SAVES = "at saves"
    """A loop of the user's own averages gradients, or now and then weights."""
    FROM_FIRST_STEP = "from the first step"
    """Nothing is known to average anything."""

    @classmethod
    def of_own_loop(cls, model: nn.Module) -> Comparison:
        """``model``: as the loop calls it."""
        is_averaged = any(isinstance(each, DistributedDataParallel) for each in model.modules())
        return cls.NEVER if is_averaged else cls.AT_SAVES


@dataclass(frozen=True, slots=True)
class RunParts:
    """Lives as long as the user's ``Trainer`` or ``Run``, over all legs in this process."""

    args: TrainingArguments
    layout: Layout
    """Which ranks read the same data."""
    model: nn.Module
    """The user's own module, without DDP's or the compiler's wrapper."""
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
    recoveries: Recoveries
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
        optimizer: updates the parameters of ``model`` and ``loss_fn``.
        core: the engine's own callbacks; they are called first.
        context_fields: the fields of every event's context that are not in ``RunParts``.
        unsupported_events: events that this loop cannot fire, each with the reason and the remedy.

    Raises:
        ConfigurationError, EventNotFired: as :class:`CallbackSet` does.
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
        loss_fn=loss_fn,
        optimizer=optimizer,
        schedulers=schedulers,
        loader=loader,
        state=state,
        control=control,
        metrics=MetricAccumulator(layout, device_of(model)),
        random_state=RandomState(args.seed, layout, lambda: state.global_step),
        buffers=SharedBuffers([model] if loss_fn is None else [model, loss_fn]),
        flags=Flags({"model": model} if loss_fn is None else {"model": model, "loss_fn": loss_fn}, optimizer),
        dispatcher=dispatcher,
        callbacks=CallbackSet(dispatcher, model, callbacks, core=core, report_to=args.report_to),
        recoveries=Recoveries(optimizer, loader),
        witness=Witness(args.directory, device_of(model), args.on_resume),
        comparison=comparison,
    )
