"""Which checkpoints stay. A policy is a function of what there is; it deletes nothing itself.

``AnyOf(Latest(3), Best())`` keeps the last three and the best one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dalsegno.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Entry:
    """What a policy knows of a checkpoint. ``best``: when it was saved, no earlier one was better."""

    step: int
    metrics: Mapping[str, float]
    best: bool


Keep = Callable[[Sequence[Entry]], set[int]]
"""From all checkpoints of a run, oldest first, to the steps of those that stay."""


@dataclass(frozen=True, slots=True)
class Latest:
    """The last ``count``."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigurationError(f"Latest(count={self.count}): at least 1 checkpoint must stay")

    def __call__(self, entries: Sequence[Entry]) -> set[int]:
        return {entry.step for entry in entries[-self.count :]}


@dataclass(frozen=True, slots=True)
class Best:
    """The one that was saved as the best last."""

    def __call__(self, entries: Sequence[Entry]) -> set[int]:
        return {entry.step for entry in [entry for entry in entries if entry.best][-1:]}


class AnyOf:
    """What any of several policies keeps."""

    def __init__(self, *policies: Keep) -> None:
        self._policies = policies

    def __call__(self, entries: Sequence[Entry]) -> set[int]:
        return set().union(*(policy(entries) for policy in self._policies))
