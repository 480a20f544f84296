"""Retention: which checkpoints to keep. A rule is a pure function of the list of checkpoints;
``checkpoint.manager`` deletes the others.

``Latest(3) | Best(2)`` keeps the newest three and the best two. A checkpoint that a rule keeps now was also kept at
every earlier time since its save, so it does not matter how often, and in which leg, the rule is evaluated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dalsegno.errors import ConfigurationError

from . import Joined, ListedSteps, Policy, check_integers, parts_of


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """A checkpoint as rules see it. ``metrics``: of its own step. ``best``: whether no earlier step was better."""

    step: int
    metrics: Mapping[str, float]
    best: bool
    finite: bool = True
    """False if its weights are known to contain NaN or infinity."""


FALLING = {
    *("loss", "nll", "entropy", "perplexity", "ppl", "bpb", "bpc", "error", "err", "wer", "cer", "mae", "mse", "rmse"),
    *("mape", "fid", "divergence", "brier", "norm", "mem", "memory", "runtime", "seconds", "latency"),
}
"""Words in the names of metrics whose best value is the lowest."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def is_better_higher(metric: str) -> bool:
    """Whether a higher value is better, by the name: unless it ends in ``loss``, or has a word of :data:`FALLING`.

    ``eval_MulticlassAccuracy`` and ``rougeL`` rise, ``val/loss``, ``logloss2``, ``MeanSquaredError`` and ``perplexity``
    fall.
    """
    is_loss = metric.lower().rstrip("0123456789_@/-").endswith("loss")
    return not is_loss and FALLING.isdisjoint(word.lower() for word in _WORD.findall(metric))


Keep = Callable[[Sequence[CheckpointSummary]], set[int]]
"""Maps all checkpoints of a run, oldest first, to the steps to keep."""


def steps_to_keep(keep: Keep, entries: Sequence[CheckpointSummary]) -> set[int]:
    """Return the steps to keep: the newest checkpoint and those that the rule keeps. Checkpoints with non-finite
    weights are hidden from the rule, so that none is kept instead of a good one."""
    return keep([entry for entry in entries if entry.finite]) | {entry.step for entry in entries[-1:]}


class Retention(Policy):
    """A retention rule. Rules joined with ``|`` keep every checkpoint that any of them keeps."""

    __slots__ = ()

    def __call__(self, entries: Sequence[CheckpointSummary]) -> set[int]:
        raise NotImplementedError

    def __or__(self, other: Retention) -> Retention:
        return retention_of([self, other])

    def with_metric(self, metric: str, *, greater: bool) -> Retention:
        """Return this rule with ``metric`` filled in, if it names no metric itself."""
        return self


@dataclass(frozen=True, slots=True, repr=False)
class Latest(Retention):
    """Keep the newest ``count``."""

    count: int

    def __post_init__(self) -> None:
        check_integers("Latest", self, {"count": 1})

    def __call__(self, entries: Sequence[CheckpointSummary]) -> set[int]:
        return {entry.step for entry in entries[-self.count :]}


@dataclass(frozen=True, slots=True, repr=False)
class Best(Retention):
    """Keep the ``count`` best; ties go to the earlier one. Checkpoints without the metric at their step are not ranked.

    Args:
        metric: name of an evaluation metric, with or without ``eval_``; None: ``metric_for_best_model``.
        mode: ``"max"`` if higher is better, ``"min"`` if lower is; None: from ``greater_is_better``, or for a metric
            that is named here by :func:`is_better_higher`.
    """

    count: int = 1
    metric: str | None = None
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        check_integers("Best", self, {"count": 1})
        if self.mode not in (None, "min", "max"):
            raise ConfigurationError(f"Best(mode={self.mode!r}): allowed are 'min', 'max' and None")

    def with_metric(self, metric: str, *, greater: bool) -> Retention:
        if self.metric is not None:
            return self
        return replace(self, metric=metric, mode=self.mode or ("max" if greater else "min"))

    def __call__(self, entries: Sequence[CheckpointSummary]) -> set[int]:
        name = self.metric or "loss"
        sign = -1 if (is_better_higher(name) if self.mode is None else self.mode == "max") else 1
        values = {entry.step: entry.metrics.get(name, entry.metrics.get(f"eval_{name}", math.nan)) for entry in entries}
        ranked = sorted((sign * value, step) for step, value in values.items() if not math.isnan(value))
        return {step for _, step in ranked[: self.count]}


@dataclass(frozen=True, slots=True, repr=False)
class EveryNth(Retention):
    """Keep every multiple of ``steps``, permanently."""

    steps: int

    def __post_init__(self) -> None:
        check_integers("EveryNth", self, {"steps": 1})

    def __call__(self, entries: Sequence[CheckpointSummary]) -> set[int]:
        return {entry.step for entry in entries if entry.step % self.steps == 0}


class Steps(ListedSteps, Retention):
    """Keep exactly these, permanently: ``Steps(1, 2, 4, 8)``. ``save=AtSteps(1, 2, 4, 8)`` saves there."""

    __slots__ = ()

    def __call__(self, entries: Sequence[CheckpointSummary]) -> set[int]:
        return {entry.step for entry in entries} & {*self.steps}


@dataclass(frozen=True, slots=True, repr=False)
class AnyRetention(Joined, Retention):
    """Several rules joined with ``|``."""

    parts: tuple[Retention, ...]

    def __call__(self, entries: Sequence[CheckpointSummary]) -> set[int]:
        return set().union(*(part(entries) for part in self.parts))

    def with_metric(self, metric: str, *, greater: bool) -> Retention:
        return AnyRetention(tuple(part.with_metric(metric, greater=greater) for part in self.parts))


def retention_of(given: Retention | str | Sequence[Retention | str]) -> Retention:
    """Convert user input (a rule, its text, or a list of either) to one rule. Raises ConfigurationError for any other
    input, or an empty list."""
    parts = rules_of(given)
    return parts[0] if len(parts) == 1 else AnyRetention(parts)


def rules_of(given: Retention | str | Sequence[Retention | str]) -> tuple[Retention, ...]:
    """Return the single rules of user input: those that ``|`` has joined."""
    return parts_of(given, Retention, (Latest, Best, EveryNth, Steps), "retention rule")
