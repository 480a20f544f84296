"""RollbackEffects: the rollbacks of a run so far, and what stays in force of them.

Each is recorded in ``recoveries.jsonl``, outside of the state that goes back. What it leaves in force is a function of
that file and of a place: data that is skipped, at a place of the order; and a factor of the learning rate, at a step.
So a leg that resumes from any checkpoint, before or after a rollback, trains as an uninterrupted run does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.optim import Optimizer

from dalsegno.data import ResumableLoader
from dalsegno.data.skipped_data import Gaps, Place, Span
from dalsegno.errors import ConfigurationError
from dalsegno.policies.recovery import Rollback

from .learning_rate import copied, set_rate

_UNSCALED = nullcontext()


class RollbackEffects:
    """Equal on all ranks. The factors scale the learning rates of ``optimizer``; ``loader`` skips the data."""

    def __init__(self, optimizer: Optimizer, loader: ResumableLoader) -> None:
        self._optimizer = optimizer
        self._loader = loader
        self.rollbacks: tuple[Rollback, ...] = ()
        """So far, in their order."""

    @property
    def pending(self) -> Rollback | None:
        return next((each for each in self.rollbacks if not each.is_done), None)

    def set(self, rollbacks: Sequence[Rollback]) -> None:
        """Set all rollbacks so far, in their order."""
        if any(each.lr_factor != 1 for each in rollbacks):
            check_has_rates(self._optimizer)
        self.rollbacks = tuple(rollbacks)
        spans = [Span(Place(*each.since), Place(*each.until)) for each in self.rollbacks if each.since and each.until]
        self._loader.set_gaps(Gaps(spans))

    def scaled_rates(self, step: int) -> AbstractContextManager[None]:
        """Around the update after ``step`` finished steps: multiply every group's learning rate by the factor, and
        restore it exactly. So neither a schedule, which may compute a rate from the one before, nor a checkpoint
        contains the factor."""
        factor = math.prod(each.lr_factor_at(step) for each in self.rollbacks)
        return _UNSCALED if factor == 1.0 else self._scaled(factor)

    @contextmanager
    def _scaled(self, factor: float) -> Iterator[None]:
        groups = self._optimizer.param_groups
        rates = [copied(group["lr"]) for group in groups]
        try:
            for group in groups:
                set_rate(group, group["lr"] * factor)
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                set_rate(group, rate)


def check_has_rates(optimizer: Optimizer) -> None:
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ConfigurationError(
            f"RecoveryPolicy(lr_factor=…): {type(optimizer).__name__} makes its own learning rate; leave lr_factor out"
        )
