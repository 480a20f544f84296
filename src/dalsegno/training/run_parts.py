"""RunParts: what one run consists of, built once before anything is loaded; and ``CallbackSet``, its callbacks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
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
from dalsegno.events.dispatcher import Dispatcher
from dalsegno.events.registration import check_callbacks, instances
from dalsegno.events.table import Event
from dalsegno.state import TrainerControl, TrainerState
from dalsegno.stateful.component import TensorHolder
from dalsegno.witness import Witness

from .learning_rate import StepPlan
from .mean_loss import MetricAccumulator
from .module_flags import Flags
from .rollback_effects import RollbackEffects


class Comparison(Enum):
    """When the ranks' copies of the model are compared."""

    NEVER = "never"
    """DDP or another mode averages the gradients."""
    AT_SAVES = "at saves"
    """A loop of the user's own averages gradients, or now and then weights."""
    FROM_FIRST_STEP = "from the first step"
    """Nothing is known to average anything."""


class RunParts:
    """Lives as long as the user's ``Trainer`` or ``Run``, over all legs in this process."""

    def __init__(
        self,
        args: TrainingArguments,
        *,
        layout: Layout,
        model: nn.Module,
        loss_fn: nn.Module | None = None,
        optimizer: Optimizer,
        schedulers: Sequence[Any],
        loader: ResumableLoader,
        plan: StepPlan | None = None,
        callbacks: Iterable[object],
        core: Sequence[Callback] = (),
        trainer: Any,
        train_dataloader: Any,
        eval_dataloader: Any = None,
        processing_class: Any = None,
        unsupported_events: Mapping[Event, str] | None = None,
        comparison: Comparison,
    ) -> None:
        """
        Args:
            layout: which ranks read the same data.
            model: the user's own module, without DDP's or the compiler's wrapper; on its device already, and sharded if
                it is to be.
            loss_fn: the loss function, if it is a module.
            plan: that the default schedule uses.
            core: the engine's own callbacks; they are called first.
            unsupported_events: events that this loop cannot fire, each with the reason and the remedy.
            comparison: when the ranks' copies of the model are compared.
        """
        is_rank_zero = collectives.rank() == 0
        self.args = args
        self.layout = layout
        self.model = model
        self.loss_fn = loss_fn
        self.modules = {"model": model} if loss_fn is None else {"model": model, "loss_fn": loss_fn}
        self.optimizer = optimizer
        self.schedulers = schedulers
        self.loader = loader
        self.plan = plan or StepPlan(args, loader)
        self.processing_class = processing_class
        self.comparison = comparison
        self.state = TrainerState(
            is_local_process_zero=collectives.local_rank() == 0, is_world_process_zero=is_rank_zero
        )
        self.control = TrainerControl(can_roll_back=args.recovery is not None)
        self.metrics = MetricAccumulator(layout, device_of(model))
        self.random_state = RandomState(args.seed, layout, lambda: self.state.global_step)
        self.buffers = SharedBuffers([*self.modules.values()])
        self.flags = Flags(self.modules, optimizer)
        self.rollback_effects = RollbackEffects(optimizer, loader)
        self.witness = Witness(args.directory, device_of(model), args.on_resume)
        common = {
            "args": args,
            "layout": layout,
            "state": self.state,
            "control": self.control,
            "model": model,
            "optimizer": optimizer,
            "lr_scheduler": schedulers[0] if len(schedulers) == 1 else schedulers,
            "processing_class": processing_class,
            "train_dataloader": train_dataloader,
            "eval_dataloader": eval_dataloader,
            "trainer": trainer,
        }
        self.dispatcher = Dispatcher(common, is_rank_zero=is_rank_zero, unsupported_events=unsupported_events)
        self.callbacks = CallbackSet(self.dispatcher, model, callbacks, core=core, report_to=args.report_to)


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
