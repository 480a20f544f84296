"""EvalBatches: an evaluation set as callbacks see it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dalsegno.data.loader import to_device
from dalsegno.errors import ConfigurationError

from .sources import EvalLoader


class EvalBatches:
    """An evaluation set for callbacks: this rank's batches, from the first on, on the model's device.

    It cannot be read while the set is evaluated, because there is only one position in it.
    """

    def __init__(self, loader: EvalLoader, device: torch.device) -> None:
        self._loader = loader
        self._device = device

    def __len__(self) -> int:
        """Raises TypeError if the length is unknown."""
        count = self._loader.length()
        if count is None:
            raise TypeError("the length of this evaluation set is unknown")
        return count

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        """Raises ConfigurationError while the set is evaluated."""
        if self._loader.is_evaluated:
            raise ConfigurationError(
                "eval_dataloader is being evaluated; read it in on_evaluate, or in any event other than "
                "on_prediction_step and those of the forward pass"
            )
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        try:
            for microbatch in self._loader:
                yield to_device(microbatch.batch, self._device)
        finally:
            if not self._loader.is_evaluated:  # else this iteration was abandoned and an evaluation has started since
                self._loader.close()
