"""When something periodic is due."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Every:
    """Due at each multiple of ``steps`` (optimizer steps) or ``epochs`` (whole epochs); 0 means never.

    A pure function of the position in the run, so that a resumed run is due exactly where an uninterrupted one is.

    Raises:
        ConfigurationError: if a number is negative or not whole.
    """

    steps: int = 0
    epochs: int = 0

    def __post_init__(self) -> None:
        for unit, value in (("steps", self.steps), ("epochs", self.epochs)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigurationError(f"Every({unit}={value!r}): needs a whole number, 0 (never) or more")

    def __bool__(self) -> bool:
        return bool(self.steps or self.epochs)

    def at_step(self, step: int) -> bool:
        """Whether it is due when ``step`` optimizer steps are finished."""
        return self.steps > 0 and step % self.steps == 0

    def at_epoch(self, epoch: int) -> bool:
        """Whether it is due when ``epoch`` epochs are finished."""
        return self.epochs > 0 and epoch % self.epochs == 0
