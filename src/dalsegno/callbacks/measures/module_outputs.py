"""What a module puts out: the tensors in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor in what a module returns, whatever tuples, lists and mappings they lie in."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for each in tree.values():
            yield from tensors_in(each)
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from tensors_in(each)
