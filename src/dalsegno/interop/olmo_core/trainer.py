"""Trainer: ``self.trainer`` of OLMo-core's callbacks, with the attributes that they use; others raise."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.errors import UnknownName
from dalsegno.interop.stand_in import StandIn, TrainerStandIn, reads
from dalsegno.system import filesystem

from .measured import Measured
from .recorded import MERGES, REDUCTIONS


class TrainModule(StandIn):
    _stands_for = "trainer.train_module"

    def __init__(self, shared: Measured) -> None:
        context = shared.context
        self.model = context.model
        self.optim = context.optimizer
        self.optimizers = [context.optimizer]
        self.scheduler = context.lr_scheduler
        self.device = device_of(context.model)


class Trainer(TrainerStandIn):
    """Stands in for ``trainer``. Callbacks may set further attributes on it."""

    dp_process_group = None
    """The default group."""
    async_bookkeeping = False
    global_train_tokens_seen: int = reads("_state.num_input_tokens_seen")
    """Tokens on all ranks; exact at each record."""
    data_loader: Any = reads("_context.train_dataloader")
    is_canceled: bool = reads("_context.control.should_training_stop")

    def __init__(self, shared: Measured) -> None:
        context = shared.context
        super().__init__(context.state)
        self._shared, self._context = shared, context
        self.train_module = TrainModule(shared)
        self.model, self.optim = context.model, context.optimizer
        self.device = self.bookkeeping_device = device_of(context.model)
        self.save_folder: Path = context.args.directory
        self.work_dir: Path = self.save_folder

    @property
    def global_step(self) -> int:
        """The step in progress, counted from 1, from ``pre_step`` on; else the last one."""
        return self._state.global_step + self._shared.has_batch

    @property
    def epoch(self) -> int:
        """From 1."""
        return self._shared.epoch + 1

    @property
    def max_steps(self) -> int | None:
        return self._state.max_steps if self._state.max_steps > 0 else None

    @property
    def max_epochs(self) -> int | None:
        args = self._context.args
        return None if args.max_steps > 0 else math.ceil(args.num_train_epochs)

    @property
    def metrics_collect_interval(self) -> int:
        """Steps between records."""
        return int(self._context.args.logging.steps or 0)

    @property
    def rank(self) -> int:
        return collectives.rank()

    # -- metrics

    def record_metric(
        self,
        name: str,
        value: Any,
        reduce_type: Any = None,
        namespace: str | None = None,
        merge_strategy: Any = "warn",
    ) -> None:
        """Add a number to the record of this step, if it has one; outside of steps it is a separate record.

        Args:
            reduce_type: how the ranks' numbers become one: ``mean``, ``sum``, ``max`` or ``l2_norm``; None: rank 0's.
            namespace: prefix of the name.
            merge_strategy: what a second number of the step does: ``latest``, ``sum``, ``mean``, ``max``, ``min``; the
                default keeps the first.

        Raises:
            UnknownName: for another reduction or strategy.
        """
        reduction = "none" if reduce_type is None else _choice("reduce_type", reduce_type, REDUCTIONS)
        merge = _choice("merge_strategy", merge_strategy, MERGES)
        self._shared.record(_named(name, namespace), value, reduction, merge)

    def get_metric(self, name: str, namespace: str | None = None) -> Any:
        """Return this rank's number of this step; None if there is none yet."""
        return self._shared.recorded.get(_named(name, namespace))

    # -- stopping

    def cancel_run(self, reason: str, no_sync: bool = False) -> None:
        """End the run after this step, with a checkpoint."""
        self._context.control.stop(reason, final=True)

    # -- files

    def write_file(self, name: str, contents: str | bytes, dir: Any = None) -> Path:
        """Write a file, by default into the run's directory; returns its path. Call on one rank."""
        path = Path(dir or self.save_folder) / name
        filesystem.make_directory(path.parent)
        path.write_bytes(contents.encode() if isinstance(contents, str) else contents)
        return path

    def persist_working_file(self, name: Any) -> Path:
        """Return the file's path: ``work_dir`` is the run's directory.

        Raises:
            FileNotFoundError: if it does not exist.
        """
        path: Path = self.work_dir / name
        if not path.exists():
            raise FileNotFoundError(path)
        return path

    # -- callbacks

    def run_bookkeeping_op(
        self,
        op: Callable[..., Any],
        *args: Any,
        cb: Callable[[Any], Any] | None = None,
        op_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Call ``op(*args)`` at once; then ``cb`` with its result. Names of OLMo-core's queue are ignored."""
        options = ("cancel_in_progress", "allow_multiple", "distributed")
        result = op(*args, **{name: value for name, value in kwargs.items() if name not in options})
        if cb is not None:
            cb(result)

    @property
    def callbacks(self) -> OrderedDict[str, Any]:
        """Every callback by its key; those of other libraries without their adapters."""
        return OrderedDict((each.key, inspect.unwrap(each)) for each in self._context.trainer.callbacks)

    def has_callback(self, cb_class: type) -> bool:
        return any(isinstance(each, cb_class) for each in self.callbacks.values())

    def get_callback_name(self, callback: object) -> str | None:
        """Return the callback's key; None if this trainer does not have it."""
        return next((name for name, each in self.callbacks.items() if each is callback), None)


def _named(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace.rstrip('/')}/{name.lstrip('/')}"


def _choice(argument: str, given: Any, allowed: Any) -> str:
    """Return the name of an enumeration's member, or the text itself."""
    name = str(getattr(given, "value", given))
    if name not in allowed:
        raise UnknownName(f"record_metric: {argument}", name, allowed)
    return name
