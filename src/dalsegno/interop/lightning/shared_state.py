"""SharedState: what all of Lightning's callbacks share in one run."""

from __future__ import annotations

from dalsegno.events.contexts import Context

from .measured import Measured
from .module import Module
from .trainer import Trainer


class SharedState(Measured):
    """The objects that stand in for Lightning's trainer and module."""

    name = "lightning"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.trainer = Trainer(self, Module)
        self.module = self.trainer.lightning_module
