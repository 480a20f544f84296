"""Module: the second argument of Lightning's callbacks, the model with what a LightningModule adds to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.errors import ConfigurationError
from dalsegno.interop.stand_in import StandIn, reads

from .measured import Measured
from .parts import Logger
from .trainer import Trainer


class Module(StandIn):
    """Stands in for ``pl_module``: the model, with what a LightningModule adds to it.

    Every attribute of the model can be read, set and called through it.
    """

    _stands_for = "pl_module"
    _shared: Measured
    _trainer: Trainer
    _model: Any
    automatic_optimization = True
    example_input_array = None
    trainer: Trainer = reads("_trainer")
    logger: Logger = reads("trainer.logger")
    current_epoch: int = reads("_shared.epoch")
    global_step: int = reads("trainer.global_step")

    def __init__(self, shared: Measured, trainer: Trainer) -> None:
        vars(self).update(_shared=shared, _trainer=trainer, _model=shared.context.model)

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._model, name):
            return getattr(self._model, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value) if hasattr(self._model, name) else object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        return device_of(self._model)

    @property
    def global_rank(self) -> int:
        return collectives.rank()

    def optimizers(self) -> Any:
        return self.trainer.optimizers[0]

    def lr_schedulers(self) -> Any:
        schedulers = [each.scheduler for each in self.trainer.lr_scheduler_configs]
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        *,
        sync_dist: bool = False,
        **others: Any,
    ) -> None:
        """Add a number to the record of this step or evaluation, and to ``trainer.callback_metrics``.

        ``sync_dist=True``: the mean over the ranks; else a record has rank 0's number. Other arguments are ignored.

        Raises:
            ConfigurationError: with ``on_epoch=True`` in a step: dalsegno's records have no means over an epoch.
        """
        self.log_dict({name: value}, on_epoch=on_epoch, sync_dist=sync_dist)

    def log_dict(
        self,
        dictionary: Mapping[str, Any],
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        *,
        sync_dist: bool = False,
        **others: Any,
    ) -> None:
        """:meth:`log` of several numbers."""
        if on_epoch and self._shared.in_step:
            names = ", ".join(dictionary)
            raise ConfigurationError(
                f"pl_module.log({names}, on_epoch=True) in a step: records have no means over an epoch; collect the "
                "numbers, and log their mean in on_train_epoch_end"
            )
        numbers = {name: float(value) for name, value in dictionary.items()}
        if sync_dist and collectives.initialized():
            sums = collectives.sum_floats(list(numbers.values()), "pl_module.log")
            numbers = {name: total / collectives.world_size() for name, total in zip(numbers, sums, strict=True)}
        self._shared.log(numbers)

    def print(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.print(*args, **kwargs)
