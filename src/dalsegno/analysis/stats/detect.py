"""When would the detector have stopped this run? Its own mathematics, over past logs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from dalsegno.analysis.series import Series

from .divergence import Divergence, Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorSettings:
    """What :class:`~dalsegno.analysis.stats.divergence.Divergence` is built with, under the same names and defaults.

    Raises:
        ConfigurationError: for a value that cannot work.
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
        """A detector that has seen nothing yet."""
        return Divergence(**asdict(self))


@dataclass(frozen=True, slots=True)
class Firing:
    """One divergence that was found."""

    step: int
    observation: int
    """From 1."""
    value: float
    reason: str


@dataclass(frozen=True, slots=True)
class Detection:
    """What a detector says of one run."""

    observations: int
    judged: int
    """Observations after the warm-up; those within it are judged only if they are not finite."""
    firings: tuple[Firing, ...]
    """All of them: a run that goes on after the first one may diverge again."""

    @property
    def fired(self) -> Firing | None:
        """The first one, where the run would have ended."""
        return self.firings[0] if self.firings else None

    @property
    def reason(self) -> str | None:
        """Why it fired; or why it could not have."""
        if self.fired is not None:
            return self.fired.reason
        return None if self.judged else f"nothing to judge: {self.observations} records, all within the warm-up"


def detect_divergence(series: Series, settings: DetectorSettings | None = None) -> Detection:
    """Show a detector one value after the other, as ``DivergenceDetector`` would have seen them."""
    settings = settings or DetectorSettings()
    divergence = settings.build()
    firings = []
    for index, value in enumerate(series.values.tolist()):
        verdict = divergence.observe(value)
        if verdict.diverged:
            firings.append(Firing(int(series.steps[index]), index + 1, value, verdict.reason))
    return Detection(len(series), max(0, len(series) - settings.warmup), tuple(firings))
