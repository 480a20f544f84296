"""Missing: stands for an activation that only another stage of a pipeline computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_INDEPENDENT = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor",
}  # fmt: skip


class Missing(Tensor):
    """A tensor of NaN. What is computed from it is missing too, so a stage that would use it is found, not wrong."""

    @classmethod
    def like(cls, tensor: Tensor) -> Missing:
        """Return one of the shape, dtype and device of ``tensor``; takes the memory of one number."""
        value = tensor.new_full((), torch.nan) if tensor.is_floating_point() else tensor.new_zeros(())
        return value.expand(tensor.shape).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        is_independent = getattr(func, "__name__", "") in _INDEPENDENT
        return result.as_subclass(Tensor) if is_independent and isinstance(result, cls) else result


def has_missing(part: Any) -> bool:
    """Whether there is one in a tree of containers."""
    if isinstance(part, Tensor):
        return isinstance(part, Missing)
    if isinstance(part, (dict, Mapping)):  # dict first: Mapping takes 1 µs
        return any(map(has_missing, part.values()))
    if isinstance(part, (list, tuple)):
        return any(map(has_missing, part))
    return any(isinstance(leaf, Missing) for leaf in tree_leaves(part))  # containers that torch knows, such as caches
