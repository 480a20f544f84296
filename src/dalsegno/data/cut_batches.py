"""Batches are cut: sequences to the length that applies to the step, batches into the micro-batches of a pipeline.

A batch is cut when its step reads it: before its tokens are counted, its loss is weighted, and it is moved to a device.
The loader and its state stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dalsegno.errors import ConfigurationError

from .loader import Microbatch
from .step_batch import Cut


def cut_to(length: Callable[[], int] | None, number: int) -> Cut | None:
    """Cut batches to ``length()`` tokens, if there is one, then into ``number`` micro-batches. None: leave them."""
    if length is None:
        return None if number == 1 else lambda microbatch: split(microbatch, number)
    return lambda microbatch: split(replace(microbatch, batch=shortened(microbatch.batch, length())), number)


def shortened(batch: Any, length: int) -> Any:
    """Return ``batch`` with at most the first ``length`` tokens of each sequence; ``batch`` itself if none is longer.

    Cuts each tensor with the shape of ``input_ids``, (batch, sequence). Others stay as they are. Raises
    ConfigurationError for a batch without such ``input_ids``; or if another tensor has a dimension, after the first
    one, of the sequences' length: a mask for each pair of tokens, or an embedding of each token.
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


def split(microbatch: Microbatch, number: int) -> list[Microbatch]:
    """Split a batch into ``number`` parts of equal size, along the first dimension of its tensors.

    A batch that does not divide, such as an epoch's last, has a smaller last part, then copies of it without samples.
    Tensors without dimensions, and values that are not a list of one element per sample, are in every part. Raises
    ConfigurationError if the batch is not a tensor, or a mapping, tuple or list with tensors, of equal lengths.
    """
    if number == 1:
        return [microbatch]
    length = _length(microbatch.batch)
    size = -(-length // number)
    parts = []
    for begin in range(0, length, size):
        rows = slice(begin, min(begin + size, length))
        samples = rows.stop - begin if microbatch.samples else 0
        # Only the sum of the global samples is used.
        of_all = microbatch.global_samples if begin == 0 or microbatch.global_samples is None else 0
        parts.append(Microbatch(_part(microbatch.batch, length, rows), samples, of_all))
    without = None if microbatch.global_samples is None else 0
    return parts + [Microbatch(parts[-1].batch, 0, without)] * (number - len(parts))


def _length(batch: Any) -> int:
    lengths = {len(each) for each in _values(batch) if isinstance(each, Tensor) and each.dim()}
    if len(lengths) != 1 or 0 in lengths:
        shown = f"the lengths {sorted(lengths)}" if lengths else "no dimension"
        raise ConfigurationError(
            f"Pipeline(microbatches=…): cannot split a {type(batch).__name__} whose tensors have {shown}; let the "
            "collator return tensors with one row per sample, or use gradient_accumulation_steps and microbatches=1"
        )
    return lengths.pop()


def _values(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    return list(batch) if isinstance(batch, (tuple, list)) else [batch]


def _part(batch: Any, length: int, rows: slice) -> Any:
    if isinstance(batch, MutableMapping):
        part = copy.copy(batch)  # of the same class, which has methods that a model may use
        for name, each in batch.items():
            part[name] = _rows(each, length, rows)
        return part
    if isinstance(batch, (tuple, list)):
        parts = [_rows(each, length, rows) for each in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return _rows(batch, length, rows)


def _rows(value: Any, length: int, rows: slice) -> Any:
    has_rows = value.dim() > 0 if isinstance(value, Tensor) else isinstance(value, list) and len(value) == length
    return value[rows] if has_rows else value
