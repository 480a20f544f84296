"""What an Engine's output and metrics are in dalsegno's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dalsegno.errors import ConfigurationError
from dalsegno.interop.leg import Unknown


def as_loss(output: Any) -> Any:
    """Return the loss as a tensor of one element, or an ``Unknown`` if the trainer's function returns none.

    Raises:
        ConfigurationError: if it is not a number.
    """
    if output is None:
        return Unknown("ctx.loss", "the trainer's function returns none; return it from there")
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return output.detach().reshape(())
    if isinstance(output, float | int):
        return torch.tensor(float(output), dtype=torch.float64)
    raise ConfigurationError(
        f"Bridge: the trainer's output is a {type(output).__name__}, not a loss; pass "
        "output_transform=lambda output: … with the loss in it, a number or a tensor of one element"
    )


def eval_metrics(metrics: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return those metrics of the evaluation set ``name`` that are numbers, not matrices or texts."""
    prefix = "eval_" if name == "eval" else f"eval_{name}_"
    return {f"{prefix}{each}": float(value) for each, value in metrics.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
