"""Loaders as callbacks get them: a user's own unchanged, the run's own data as its length only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn


class Batches:
    """Number of batches in an epoch of the run's data. Not iterable: reading would take batches from the training."""

    def __init__(self, feed: Any) -> None:
        self._feed = feed

    def __len__(self) -> int:
        """Batches per epoch on this rank.

        Raises:
            TypeError: if the length of the data is unknown.
        """
        count: int | None = self._feed.microbatches_per_epoch()
        if count is None:
            raise TypeError("the length of the data is unknown")
        return count

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> NoReturn:
        raise TypeError("a callback cannot read the training data; pass your own loader to the Trainer")


def as_loader(given: Any) -> Any:
    return Batches(given) if hasattr(given, "microbatches_per_epoch") else given


def loaders_of(given: Any) -> dict[str, Any]:
    """Return the evaluation loaders by the name of their set; an only loader under ``"eval"``."""
    if isinstance(given, Mapping):
        return dict(given)
    return {} if given is None else {"eval": given}
