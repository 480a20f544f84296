"""ScaleLoss: multiplies the loss by a number before the backward pass."""

from __future__ import annotations

from dalsegno.events.callback import Callback
from dalsegno.events.contexts import BackwardContext

from .argument_checks import number


class ScaleLoss(Callback):
    """Multiplies every micro-batch's loss by ``value``; gradients and the logged loss scale with it.

    Evaluation does not change. Gradient clipping and Adam cancel much of the effect.

    Raises:
        ConfigurationError: if ``value`` is not a finite number.
    """

    sets_control_flags = False
    background_safe = False

    def __init__(self, value: float) -> None:
        self._value = number("ScaleLoss", "value", value)

    def on_before_backward(self, ctx: BackwardContext) -> None:
        ctx.outputs["loss"] = ctx.outputs["loss"] * self._value
