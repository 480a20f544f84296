"""Tensors in a module's output, or in a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield every tensor in a module's return value or a batch, inside nested tuples, lists and mappings too."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for each in tree.values():
            yield from tensors_in(each)
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from tensors_in(each)
