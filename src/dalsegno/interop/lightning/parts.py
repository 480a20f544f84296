"""Parts of the trainer that Lightning's callbacks use: strategy, logger, loops, state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dalsegno.distributed import collectives
from dalsegno.interop.stand_in import StandIn, reads

from .measured import Measured


class OnRanks(StandIn):
    """An object that knows its rank."""

    @property
    def global_rank(self) -> int:
        return collectives.rank()

    @property
    def local_rank(self) -> int:
        return collectives.local_rank()

    @property
    def world_size(self) -> int:
        return collectives.world_size()

    @property
    def is_global_zero(self) -> bool:
        return collectives.rank() == 0


class Strategy(OnRanks):
    _stands_for = "trainer.strategy"

    def __init__(self, device: torch.device) -> None:
        self.root_device = device

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        collectives.all_reduce_max([0], name or "trainer.strategy.barrier")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src``. Collective."""
        return obj if not collectives.initialized() else collectives.gather(obj, "trainer.strategy.broadcast")[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks decide so, or any. Collective."""
        (found,) = collectives.all_reduce_max([decision is not all], "trainer.strategy.reduce_boolean_decision")
        return bool(found) is not all

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        """Return the mean, or sum, of a number over all ranks. Collective."""
        (total,) = collectives.sum_floats([float(tensor)], "trainer.strategy.reduce")
        return torch.tensor(total / (collectives.world_size() if reduce_op in ("mean", "avg") else 1))


class Logger(StandIn):
    """Stands in for ``trainer.logger``: what is logged is in dalsegno's records."""

    _stands_for = "trainer.logger"
    name = "dalsegno"
    version = 0

    def __init__(self, shared: Measured) -> None:
        self._shared = shared
        self.save_dir = self.log_dir = self.root_dir = str(shared.context.args.directory)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add to the record of this step or evaluation. ``step`` is ignored."""
        self._shared.collected.add(metrics)

    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Nothing: JsonLogger's header is the place for them."""

    def save(self) -> None:
        """Nothing: every record is written at once."""


class LoggerConnector:
    """Stands in for a private part of the trainer, which LearningRateMonitor reads."""

    should_update_logs: bool = reads("_state.will_log")

    def __init__(self, shared: Measured) -> None:
        self._state = shared.context.state


class EpochLoop(StandIn):
    _stands_for = "trainer.fit_loop.epoch_loop"
    global_step: int = reads("_shared.context.state.global_step")
    _batches_that_stepped = global_step

    def __init__(self, shared: Measured) -> None:
        self._shared = shared

    @property
    def batch_idx(self) -> int:
        return self._shared.batches - 1


class FitLoop(StandIn):
    _stands_for = "trainer.fit_loop"
    max_epochs: Any = reads("_trainer.max_epochs")
    max_batches: Any = reads("_trainer.num_training_batches")

    def __init__(self, trainer: Any, shared: Measured) -> None:
        self._trainer = trainer
        self.epoch_loop = EpochLoop(shared)


class TrainerState(StandIn):
    """Stands in for ``trainer.state``: texts, which equal Lightning's enumerations."""

    _stands_for = "trainer.state"

    def __init__(self, shared: Measured) -> None:
        self._shared = shared

    @property
    def fn(self) -> str:
        return "fit" if self._shared.fitting or self._shared.ends_well else "validate"

    @property
    def stage(self) -> str:
        return "validate" if self._shared.validating else "train"

    @property
    def status(self) -> str:
        return "running" if self._shared.fitting else "finished"
