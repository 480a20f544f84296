"""UserEvaluation: a function of the user's, as an evaluation set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dalsegno.errors import ConfigurationError

from .evaluation import BetweenBatches


class UserEvaluation:
    """The argument ``evaluate`` of ``dalsegno.Run``."""

    name = "eval"

    def __init__(self, function: Callable[[], Mapping[str, float]]) -> None:
        self._function = function

    def __call__(self, between_batches: BetweenBatches) -> dict[str, float]:
        """``between_batches`` is not called here: the function calls ``run.between_batches()``.

        Raises:
            ConfigurationError: if the function does not return numbers by name.
        """
        metrics: Any = self._function()
        try:
            return {str(name): _plain(value) for name, value in metrics.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigurationError(
                f'evaluate= returned {metrics!r}; it must return numbers by name: {{"eval_loss": 0.7}}'
            ) from error


def _plain(value: Any) -> float:
    """A Python number from a number, or from a tensor or an array of one element."""
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, (int, float)):
        raise TypeError(f"{number!r} is not a number")
    return number
