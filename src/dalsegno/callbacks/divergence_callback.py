"""DivergenceCallback: base class of callbacks that end a run, or roll it back, because training has diverged."""

from __future__ import annotations

from dalsegno.errors import ConfigurationError
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import Context


class DivergenceCallback(Callback):
    """Does what ``action`` names: ``"rollback"`` goes back to a checkpoint, any other ends the run.

    Raises:
        ConfigurationError: before training, for ``"rollback"`` in a run without a policy for it.
    """

    def __init__(self, action: str) -> None:
        self._action = action

    def on_init_end(self, ctx: Context) -> None:
        if self._action == "rollback" and not ctx.control.can_roll_back:
            raise ConfigurationError(
                f"{self.key}(action='rollback') needs TrainingArguments(recovery=RecoveryPolicy(…))"
            )

    def end_or_roll_back(self, ctx: Context, reason: str, *, save: bool = False) -> None:
        """Request the action. ``save``: save a checkpoint before the run ends."""
        if self._action == "rollback":
            ctx.control.roll_back(reason)
        else:
            ctx.control.stop(reason, save=save, diverged=True)
