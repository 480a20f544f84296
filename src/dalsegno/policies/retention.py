"""Which checkpoints stay. A rule is a function of what there is; it deletes nothing itself.

``Latest(3) | Best(2)`` keeps the last three and the two best. A rule that keeps a checkpoint has kept it from its save
on: so it does not matter how often, and by which leg, it is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dalsegno.errors import ConfigurationError

from .notation import Policy, read_policies


@dataclass(frozen=True, slots=True)
class Entry:
    """What a rule knows of a checkpoint: ``metrics`` of its own step; ``best``: no earlier one was better."""

    step: int
    metrics: Mapping[str, float]
    best: bool
    finite: bool = True
    """Whether its weights are not known to hold NaN or infinity."""


Keep = Callable[[Sequence[Entry]], set[int]]
"""From all checkpoints of a run, oldest first, to the steps of those that stay."""


def staying(keep: Keep, entries: Sequence[Entry]) -> set[int]:
    """The steps of those that stay: the newest, and what the rule keeps of all others. One with broken weights is never
    kept in the place of a good one: the rule is not asked about it."""
    return keep([entry for entry in entries if entry.finite]) | {entry.step for entry in entries[-1:]}


class Retention(Policy):
    """A rule. They are joined with ``|``: what any of them keeps stays."""

    __slots__ = ()

    def __call__(self, entries: Sequence[Entry]) -> set[int]:
        raise NotImplementedError

    def __or__(self, other: Retention) -> Retention:
        return AnyRetention((*rules_of(self), *rules_of(other)))

    def with_metric(self, metric: str, *, greater: bool) -> Retention:
        """The same, by this metric where the rule leaves it open."""
        return self


@dataclass(frozen=True, slots=True, repr=False)
class Latest(Retention):
    """The last ``count``."""

    count: int

    def __post_init__(self) -> None:
        _check_whole("Latest", count=self.count)

    def __call__(self, entries: Sequence[Entry]) -> set[int]:
        return {entry.step for entry in entries[-self.count :]}


@dataclass(frozen=True, slots=True, repr=False)
class Best(Retention):
    """The ``count`` best; of equals, the first. One that was not evaluated at its own step is none of them.

    Args:
        metric: a name among the evaluation's metrics, with or without ``eval_``; None: ``metric_for_best_model``.
        mode: ``"max"`` if more is better, ``"min"`` if less is; None: as ``greater_is_better`` says, or for a metric
            that is named here: max, unless its name ends in ``loss``.
    """

    count: int = 1
    metric: str | None = None
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        _check_whole("Best", count=self.count)
        if self.mode not in (None, "min", "max"):
            raise ConfigurationError(f"Best(mode={self.mode!r}): allowed are 'min', 'max' and None")

    def with_metric(self, metric: str, *, greater: bool) -> Retention:
        if self.metric is not None:
            return self
        return replace(self, metric=metric, mode=self.mode or ("max" if greater else "min"))

    def __call__(self, entries: Sequence[Entry]) -> set[int]:
        name = self.metric or "loss"
        sign = 1 if (self.mode or ("min" if name.endswith("loss") else "max")) == "min" else -1
        values = {entry.step: entry.metrics.get(name, entry.metrics.get(f"eval_{name}", math.nan)) for entry in entries}
        ranked = sorted((sign * value, step) for step, value in values.items() if not math.isnan(value))
        return {step for _, step in ranked[: self.count]}


@dataclass(frozen=True, slots=True, repr=False)
class EveryNth(Retention):
    """Those at each multiple of ``steps``, for good."""

    steps: int

    def __post_init__(self) -> None:
        _check_whole("EveryNth", steps=self.steps)

    def __call__(self, entries: Sequence[Entry]) -> set[int]:
        return {entry.step for entry in entries if entry.step % self.steps == 0}


@dataclass(frozen=True, slots=True, repr=False)
class AnyRetention(Retention):
    """What ``|`` makes of several."""

    parts: tuple[Retention, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))

    def __call__(self, entries: Sequence[Entry]) -> set[int]:
        return set().union(*(part(entries) for part in self.parts))

    def with_metric(self, metric: str, *, greater: bool) -> Retention:
        return AnyRetention(tuple(part.with_metric(metric, greater=greater) for part in self.parts))


def retention_of(given: Retention | str | Sequence[Retention | str]) -> Retention:
    """One rule of what a user may give: one, several in a list, or the same as text.

    Raises:
        ConfigurationError: if it is something else, or an empty list.
    """
    if isinstance(given, Retention):
        return given
    if isinstance(given, str):
        read = read_policies(given, (Latest, Best, EveryNth))
        return retention_of([each for each in read if isinstance(each, Retention)])
    if not isinstance(given, Sequence) or not given:
        raise ConfigurationError(
            f"{given!r} does not say which checkpoints stay; use Latest(…), Best(…), EveryNth(…), or several in a list"
        )
    parts = tuple(part for each in given for part in rules_of(retention_of(each)))
    return parts[0] if len(parts) == 1 else AnyRetention(parts)


def rules_of(rule: Retention) -> tuple[Retention, ...]:
    """The single rules that ``|`` has joined."""
    if not isinstance(rule, Retention):
        raise ConfigurationError(f"{rule!r} is no rule of which checkpoints stay; use Latest(…), Best(…), EveryNth(…)")
    return rule.parts if isinstance(rule, AnyRetention) else (rule,)


def _check_whole(rule: str, **argument: int) -> None:
    ((name, value),) = argument.items()
    if type(value) is not int or value < 1:
        raise ConfigurationError(f"{rule}({name}={value!r}): needs a whole number of at least 1")
