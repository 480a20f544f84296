"""SharedState: what all of OLMo-core's callbacks share in one run."""

from __future__ import annotations

from dalsegno.events.contexts import Context

from .measured import Measured
from .trainer import Trainer


class SharedState(Measured):
    """The object that stands in for OLMo-core's trainer."""

    name = "olmo_core"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.trainer = Trainer(self)
