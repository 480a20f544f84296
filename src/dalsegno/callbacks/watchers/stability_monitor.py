"""StabilityMonitor: the share of spikes in the loss and the gradient norm."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, TypedDict

from dalsegno.callbacks.argument_checks import number, texts, whole
from dalsegno.errors import StateMismatch
from dalsegno.events import FlaglessCallback, contexts
from dalsegno.stateful.schema import Count, Finite

FEWEST = 32
"""Minimum number of values for a mean and a standard deviation; earlier values are not judged."""

_ROUNDING = 1e-12  # relative to the mean: bounds the deviations of a constant


class SpikeScoreState(TypedDict):
    recent: list[Finite]
    judged: Count
    spikes: Count


class StabilityMonitor(FlaglessCallback):
    """Logs how often each metric spikes: its share of spikes so far, in each training record.

    A value is a spike if it differs from the mean of the ``window`` values before it by more than ``deviations`` of
    their standard deviations, or is NaN or infinite (Walsh et al. 2025, "2 OLMo 2 Furious", arXiv:2501.00656, section
    3). The first 32 values are not judged. The score, ``spike_score/loss`` and so on, is between 0 and 1; it covers the
    whole run, over every resume.

    Args:
        metrics: names in the training records. A metric that a record lacks is not judged there.
        window: number of values for mean and standard deviation.
        deviations: number of standard deviations beyond which a value is a spike.
    """

    state_schema = dict[str, SpikeScoreState]

    def __init__(
        self, metrics: str | Sequence[str] = ("loss", "grad_norm"), window: int = 128, deviations: float = 6.0
    ) -> None:
        names = texts("StabilityMonitor", "metrics", metrics)
        whole("StabilityMonitor", "window", window, least=FEWEST)
        number("StabilityMonitor", "deviations", deviations, over=0)
        self._scores = {name: SpikeScore(window, deviations) for name in names}
        self.reads_nonfinite_loss = "loss" in names

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind != "train":
            return
        for name, score in self._scores.items():
            if name in ctx.logs:
                score.observe(float(ctx.logs[name]))
                ctx.logs[f"spike_score/{name}"] = score.value

    def state_dict(self) -> dict[str, SpikeScoreState]:
        return {name: score.state_dict() for name, score in self._scores.items()}

    def check_state(self, state: dict[str, SpikeScoreState]) -> None:
        for name in self._scores.keys() & state.keys():
            self._scores[name].check_state(state[name])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._scores.keys() & state.keys():  # a new metric begins without values
            self._scores[name].load_state_dict(state[name])


class SpikeScore:
    """The share of spikes among the values of one metric, as :class:`StabilityMonitor` defines it."""

    def __init__(self, window: int, deviations: float) -> None:
        self._recent: deque[float] = deque(maxlen=window)
        self._deviations = deviations
        self._judged = 0
        self._spikes = 0

    @property
    def value(self) -> float:
        """Between 0 and 1; 0 if nothing has been judged yet."""
        return self._spikes / self._judged if self._judged else 0.0

    def observe(self, value: float) -> None:
        """Judge the next value by those before it. NaN and infinity are judged, but not used to judge others."""
        if len(self._recent) >= FEWEST:
            self._judged += 1
            self._spikes += self._is_spike(value)
        if math.isfinite(value):
            self._recent.append(value)

    def _is_spike(self, value: float) -> bool:
        if not math.isfinite(value):
            return True
        count = len(self._recent)
        mean = math.fsum(each / count for each in self._recent)  # avoids overflow of intermediate sums
        deviation = math.hypot(*(each - mean for each in self._recent)) / math.sqrt(count)
        return abs(value - mean) > max(self._deviations * deviation, _ROUNDING * abs(mean))

    def state_dict(self) -> SpikeScoreState:
        return {"recent": list(self._recent), "judged": self._judged, "spikes": self._spikes}

    def check_state(self, state: SpikeScoreState) -> None:
        if self._recent.maxlen is not None and len(state["recent"]) > self._recent.maxlen:
            raise StateMismatch(
                f"StabilityMonitor: window={self._recent.maxlen}; the checkpoint has {len(state['recent'])} values "
                "of a longer window, so the score would belong to neither; resume with the window of the checkpoint"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recent.clear()
        self._recent.extend(state["recent"])
        self._judged, self._spikes = state["judged"], state["spikes"]
