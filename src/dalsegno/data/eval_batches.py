"""An evaluation set as callbacks read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dalsegno.errors import ConfigurationError

from .device import to_device
from .sources import EvalLoader


class EvalBatches:
    """An evaluation set for callbacks to read: this rank's batches, from the first, on the model's device.

    Not while the set is evaluated: there is one place in it, and it is in use.
    """

    def __init__(self, feed: EvalLoader, device: torch.device) -> None:
        self._feed = feed
        self._device = device

    def __len__(self) -> int:
        """
        Raises:
            TypeError: where it is unknown.
        """
        count = self._feed.length()
        if count is None:
            raise TypeError("the length of this evaluation set is unknown")
        return count

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        """
        Raises:
            ConfigurationError: while the set is evaluated.
        """
        if self._feed.is_evaluated:
            raise ConfigurationError(
                "eval_dataloader is being evaluated on just now; read it in on_evaluate, or in any event but "
                "on_prediction_step and those of the forward"
            )
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        try:
            for microbatch in self._feed:
                yield to_device(microbatch.batch, self._device)
        finally:
            if not self._feed.is_evaluated:  # else this was left off, and an evaluation has taken its place
                self._feed.close()
