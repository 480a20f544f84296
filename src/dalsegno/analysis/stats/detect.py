"""Replay of the divergence detector over a past run."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from dalsegno.analysis.series import Series

from .divergence import Divergence, Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorSettings:
    """Arguments of :class:`~dalsegno.analysis.stats.divergence.Divergence`, with the same names and defaults.

    Raises:
        ConfigurationError: for an invalid value.
    """

    smoothing: float = 0.3
    threshold: float | None = None
    relative_threshold: float | None = None
    patience: int = 3
    warmup: int = 10
    mode: Mode = "min"
    baseline_smoothing: float | None = None

    def __post_init__(self) -> None:
        self.build()

    def build(self) -> Divergence:
        """A new detector."""
        return Divergence(**asdict(self))


@dataclass(frozen=True, slots=True)
class Firing:
    """One detected divergence."""

    step: int
    observation: int
    """Counted from 1."""
    value: float
    reason: str


@dataclass(frozen=True, slots=True)
class Detection:
    """Result of a replay."""

    observations: int
    judged: int
    """Observations after the warm-up; during it only non-finite ones are judged."""
    firings: tuple[Firing, ...]
    """All of them: a run that continues may diverge again."""

    @property
    def fired(self) -> Firing | None:
        """The first firing, at which the run would have ended."""
        return self.firings[0] if self.firings else None

    @property
    def reason(self) -> str | None:
        """Why the detector fired, or why it could not."""
        if self.fired is not None:
            return self.fired.reason
        return None if self.judged else f"nothing to judge: {self.observations} records, all within the warm-up"


def detect_divergence(series: Series, settings: DetectorSettings | None = None) -> Detection:
    """Feed a series to a detector as ``DivergenceDetector`` would have."""
    settings = settings or DetectorSettings()
    divergence = settings.build()
    firings = []
    for index, value in enumerate(series.values.tolist()):
        verdict = divergence.observe(value)
        if verdict.diverged:
            firings.append(Firing(int(series.steps[index]), index + 1, value, verdict.reason))
    return Detection(len(series), max(0, len(series) - settings.warmup), tuple(firings))
