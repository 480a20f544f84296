"""Loaders, as callbacks are shown them: as they are, but for the training's own data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn


class Batches:
    """The run's own data: how many batches an epoch has. To read it here would be to take them from the training."""

    def __init__(self, feed: Any) -> None:
        self._feed = feed

    def __len__(self) -> int:
        """On this rank.

        Raises:
            TypeError: where it is unknown.
        """
        count: int | None = self._feed.microbatches_per_epoch()
        if count is None:
            raise TypeError("the length of the data is unknown")
        return count

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> NoReturn:
        raise TypeError("a callback cannot read the data that is trained on; give the Trainer a loader of your own")


def as_loader(given: Any) -> Any:
    return Batches(given) if hasattr(given, "microbatches_per_epoch") else given


def loaders_of(given: Any) -> dict[str, Any]:
    """By the name of the set: of the only loader, or of several by name."""
    if isinstance(given, Mapping):
        return dict(given)
    return {} if given is None else {"eval": given}
