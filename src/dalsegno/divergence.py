"""When a training run has diverged: the mathematics, for a live run and for reading a log alike.

Observations x are smoothed, ``s = a·x + (1 − a)·s`` (the first one is s itself), and ``best`` is the lowest s so far.
An observation is *bad* if ``s − best ≥ threshold``, or if s has left best by the factor ``relative_threshold``.
After ``warmup`` observations, ``patience`` bad ones in a row are a divergence; NaN or infinity is one at once, and
never enters s. With ``mode="max"`` (an accuracy) all is mirrored: best is the highest, and falling is bad.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal

from .errors import ConfigurationError, StateMismatch

Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one observation has led to."""

    diverged: bool
    smoothed: float
    best: float
    bad_in_a_row: int
    reason: str
    """Why it counts as a divergence, for people to read; empty where it does not."""


class Divergence:
    """Observes one number again and again, and says when it has diverged.

    Args:
        smoothing: weight a of the newest observation, 0 < a ≤ 1; 1 means no smoothing.
        threshold: bad from this distance between s and best on, in the unit of the observations; None: not used.
        relative_threshold: bad from ``best · relative_threshold`` on, a factor over 1; None: not used. Where best is
            negative, the distance is the same part of its magnitude: best + |best| · (factor − 1).
        patience: how many bad observations in a row it takes, at least 1.
        warmup: how many observations, from the first on, only move s and best.
        mode: ``"min"`` for numbers that should fall, ``"max"`` for those that should rise.

    After a divergence the counter of bad observations starts over: it takes ``patience`` new ones to have the next.
    So a run that goes on from the checkpoint of a stop is not stopped again for what had stopped it.

    Raises:
        ConfigurationError: for a value that cannot work.
    """

    def __init__(
        self,
        *,
        smoothing: float = 0.3,
        threshold: float | None = 1.0,
        relative_threshold: float | None = None,
        patience: int = 3,
        warmup: int = 10,
        mode: Mode = "min",
    ) -> None:
        number, perhaps = int | float, int | float | None
        _check("smoothing", smoothing, number, "a number over 0, up to 1", lambda a: 0 < a <= 1)
        _check("threshold", threshold, perhaps, "a finite number over 0, or None", lambda t: 0 < t < math.inf)
        _check(
            "relative_threshold",
            relative_threshold,
            perhaps,
            "a finite number over 1, or None",
            lambda t: 1 < t < math.inf,
        )
        if threshold is None and relative_threshold is None:
            raise ConfigurationError("threshold and relative_threshold are both None; give at least one")
        _check("patience", patience, int, "a whole number, at least 1", lambda n: n >= 1)
        _check("warmup", warmup, int, "a whole number, at least 0", lambda n: n >= 0)
        _check("mode", mode, str, "'min' or 'max'", lambda m: m in ("min", "max"))
        self._smoothing = smoothing
        self._threshold = threshold
        self._relative_threshold = relative_threshold
        self._patience = patience
        self._warmup = warmup
        self._sign = 1.0 if mode == "min" else -1.0
        self._smoothed: float | None = None  # this and best mirrored for "max": small is good
        self._best = math.inf
        self._observations = 0
        self._bad_in_a_row = 0

    def observe(self, value: float) -> Verdict:
        """Take the next observation."""
        value = float(value)
        if not math.isfinite(value):
            self._bad_in_a_row = 0
            return self._verdict(f"the value is {value}")
        previous, a = self._smoothed, self._smoothing
        x = self._sign * value
        self._smoothed = x if previous is None else a * x + (1 - a) * previous
        self._best = min(self._best, self._smoothed)
        self._observations += 1
        if self._observations <= self._warmup or not (limit := self._limit_passed()):
            self._bad_in_a_row = 0
            return self._verdict("")
        self._bad_in_a_row += 1
        if self._bad_in_a_row < self._patience:
            return self._verdict("")
        verdict = self._verdict(
            f"its moving average {self._sign * self._smoothed:.6g} has left its best {self._sign * self._best:.6g} "
            f"by {limit}, {self._patience} observations in a row"
        )
        self._bad_in_a_row = 0
        return verdict

    def _limit_passed(self) -> str:
        """The limit that s has passed, in words; empty where it has not."""
        assert self._smoothed is not None
        distance = self._smoothed - self._best
        if self._threshold is not None and distance >= self._threshold:
            return f"at least {self._threshold:g}"
        factor = self._relative_threshold
        if factor is not None and distance > 0 and distance >= abs(self._best) * (factor - 1):
            return f"at least the factor {factor:g}"
        return ""

    def _verdict(self, reason: str) -> Verdict:
        smoothed = math.nan if self._smoothed is None else self._sign * self._smoothed
        best = math.nan if self._smoothed is None else self._sign * self._best
        return Verdict(bool(reason), smoothed, best, self._bad_in_a_row, reason)

    def state_dict(self) -> dict[str, Any]:
        return {
            "smoothed": self._smoothed,
            "best": self._best,
            "observations": self._observations,
            "bad_in_a_row": self._bad_in_a_row,
        }

    def load_state_dict(self, state: Any) -> None:
        """Go on where :meth:`state_dict` was taken.

        Raises:
            StateMismatch: if ``state`` is none of its kind.
        """
        kinds = {"smoothed": float | None, "best": float, "observations": int, "bad_in_a_row": int}
        if not isinstance(state, dict) or state.keys() != kinds.keys():
            raise StateMismatch(f"a divergence state must have the keys {', '.join(kinds)}; got {state!r}")
        for key, kind in kinds.items():
            if not isinstance(state[key], kind):
                raise StateMismatch(f"a divergence state: {key} cannot be {state[key]!r}")
        self._smoothed, self._best = state["smoothed"], state["best"]
        self._observations, self._bad_in_a_row = state["observations"], state["bad_in_a_row"]


def _check(argument: str, value: Any, kind: type | UnionType, allowed: str, right: Callable[[Any], bool]) -> None:
    fits = isinstance(value, kind) and not isinstance(value, bool)
    if not fits or (value is not None and not right(value)):
        raise ConfigurationError(f"{argument} is {value!r}; allowed: {allowed}")
