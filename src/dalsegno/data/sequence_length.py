"""ShortenedSequences: training data whose sequences are cut to the length that applies to the step.

A batch is cut when its step reads it: before its tokens are counted, its loss is weighted, and it is moved to a device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import replace
from typing import Any

import torch

from dalsegno.errors import ConfigurationError

from .loader import Microbatch, MicrobatchLoader
from .step_batch import LoaderView


class ShortenedSequences(LoaderView[MicrobatchLoader]):
    """The micro-batches of ``loader``, cut to ``length()`` tokens. The loader and its state stay as they are."""

    def __init__(self, loader: MicrobatchLoader, length: Callable[[], int]) -> None:
        super().__init__(loader)
        self._length = length

    @property
    def spare(self) -> Microbatch | None:
        spare = super().spare
        return None if spare is None else self._shorten(spare)

    def __iter__(self) -> Iterator[Microbatch]:
        return map(self._shorten, self._loader)

    def _shorten(self, microbatch: Microbatch) -> Microbatch:
        return replace(microbatch, batch=shortened(microbatch.batch, self._length()))


def shortened(batch: Any, length: int) -> Any:
    """Return ``batch`` with at most the first ``length`` tokens of each sequence; ``batch`` itself if none is longer.

    Cuts each tensor with the shape of ``input_ids``, (batch, sequence). Others stay as they are.

    Raises:
        ConfigurationError: for a batch without such ``input_ids``; or if another tensor has a dimension, after the
            first one, of the sequences' length: a mask for each pair of tokens, or an embedding of each token.
    """
    ids = batch.get("input_ids") if isinstance(batch, MutableMapping) else None
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        raise ConfigurationError(
            f"sequence_length_schedule: {_described(batch)}; needs batches with input_ids, a tensor (batch, sequence)"
        )
    if ids.shape[1] <= length:
        return batch
    cut = copy.copy(batch)  # of the same class, which has methods that a model or a loop may use
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.shape == ids.shape:
            cut[name] = value[:, :length].contiguous()
        elif ids.shape[1] in value.shape[1:]:
            raise ConfigurationError(
                f"sequence_length_schedule: {name} has shape {tuple(value.shape)}, and input_ids {tuple(ids.shape)}; "
                "only tensors of the same shape can be cut. Compute it in the model"
            )
    return cut


def _described(batch: Any) -> str:
    if not isinstance(batch, MutableMapping):
        return f"the batch is a {type(batch).__name__}"
    ids = batch.get("input_ids")
    if isinstance(ids, torch.Tensor):
        return f"input_ids has shape {tuple(ids.shape)}"
    return f"the batch contains {', '.join(map(str, batch))}"
