"""StabilityMonitor: how often the loss and the gradient norm spike."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, TypedDict

from dalsegno.errors import StateMismatch
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import LogContext
from dalsegno.stateful.schema import Count, Finite

from .argument_checks import number, texts, whole

FEWEST = 32
"""Values that a mean and a standard deviation are taken from before anything is judged by them."""

_ROUNDING = 1e-12  # of the mean: a constant's deviations are no larger


class SpikeScoreState(TypedDict):
    recent: list[Finite]
    judged: Count
    spikes: Count


class StabilityMonitor(Callback):
    """Adds the spike score of each metric to each record of training: the share of spikes among its values so far.

    A value is a spike if it differs from the mean of the ``window`` values before it by more than ``deviations`` of
    their standard deviations, or is NaN or infinite (Walsh et al. 2025, "2 OLMo 2 Furious", arXiv:2501.00656, section
    3, with a window of 1,000 steps and seven deviations). The first 32 values are not judged. The score,
    ``spike_score/loss`` and so on, lies between 0 and 1; it covers the run from its beginning, over every resume.

    The values are those of the records, so the score is one of steps where ``logging_steps=1``, else of intervals'
    means. All ranks log the same values; nothing is reduced for them, and the device is not waited for.

    Args:
        metrics: names in the records of training. One that a record lacks is not judged there.
        window: how many values the mean is taken from.
        deviations: how many standard deviations make a spike.

    Raises:
        ConfigurationError: for a value that cannot work.
    """

    makes_wishes = False

    state_schema = dict[str, SpikeScoreState]

    def __init__(
        self, metrics: str | Sequence[str] = ("loss", "grad_norm"), window: int = 128, deviations: float = 6.0
    ) -> None:
        names = texts("StabilityMonitor", "metrics", metrics)
        whole("StabilityMonitor", "window", window, least=FEWEST)
        number("StabilityMonitor", "deviations", deviations, over=0)
        self._scores = {name: SpikeScore(window, deviations) for name in names}

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind != "train":
            return
        for name, score in self._scores.items():
            if name in ctx.logs:
                score.observe(float(ctx.logs[name]))
                ctx.logs[f"spike_score/{name}"] = score.value

    def state_dict(self) -> dict[str, SpikeScoreState]:
        return {name: score.state_dict() for name, score in self._scores.items()}

    def check_state(self, state: dict[str, SpikeScoreState]) -> None:
        """
        Raises:
            StateMismatch: if the window is shorter than the one whose values were saved, and lacks some of them.
        """
        for name, score in self._scores.items():
            if name in state:
                score.check_state(state[name])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A metric that is watched only now begins with no values; one that is no longer watched is forgotten."""
        for name, score in self._scores.items():
            if name in state:
                score.load_state_dict(state[name])


class SpikeScore:
    """The share of spikes among the values of one metric, as :class:`StabilityMonitor` defines it."""

    def __init__(self, window: int, deviations: float) -> None:
        self._recent: deque[float] = deque(maxlen=window)
        self._deviations = deviations
        self._judged = 0
        self._spikes = 0

    @property
    def value(self) -> float:
        """Between 0 and 1; 0 where nothing has been judged yet."""
        return self._spikes / self._judged if self._judged else 0.0

    def observe(self, value: float) -> None:
        """Judge the next value by those before it. NaN and infinity are judged, but judge no other."""
        if len(self._recent) >= FEWEST:
            self._judged += 1
            self._spikes += self._is_spike(value)
        if math.isfinite(value):
            self._recent.append(value)

    def _is_spike(self, value: float) -> bool:
        if not math.isfinite(value):
            return True
        count = len(self._recent)
        mean = math.fsum(each / count for each in self._recent)  # no sum in between is too large for a float
        deviation = math.hypot(*(each - mean for each in self._recent)) / math.sqrt(count)
        return abs(value - mean) > max(self._deviations * deviation, _ROUNDING * abs(mean))

    def state_dict(self) -> SpikeScoreState:
        return {"recent": list(self._recent), "judged": self._judged, "spikes": self._spikes}

    def check_state(self, state: SpikeScoreState) -> None:
        """
        Raises:
            StateMismatch: if the window is shorter than the one whose values were saved, and lacks some of them.
        """
        if self._recent.maxlen is not None and len(state["recent"]) > self._recent.maxlen:
            raise StateMismatch(
                f"StabilityMonitor: window={self._recent.maxlen}; the checkpoint has {len(state['recent'])} values "
                "of a longer window, and a score of both would be neither; resume with the window of the checkpoint"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recent.clear()
        self._recent.extend(state["recent"])
        self._judged, self._spikes = state["judged"], state["spikes"]
