"""ActionSchedule: when a log, an evaluation, a save and the end of the run are due, by step and by epoch."""

from __future__ import annotations

from dalsegno.args import TrainingArguments
from dalsegno.state import NO_REQUESTS, ControlRequests


class ActionSchedule:
    """The logging, evaluation and saving schedules of one leg. ``position`` is a place in the data, in epochs.

    Most steps have nothing due, so the schedules are asked once per step that has, and for the next such step.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self._args = args
        self._logging, self._evaluation, self._saving = args.logging, args.evaluation, args.saving
        self._saving_in_memory = args.saving_in_memory.when
        self._idle_after, self._idle_before = -1, 0.0  # no schedule is due at the steps between these two

    def is_last(self, step: int, position: float) -> bool:
        """Whether the run ends at ``step``, or at ``position`` if ``max_steps`` is not set."""
        args = self._args
        return step >= args.max_steps if args.max_steps > 0 else position >= args.num_train_epochs

    def at_step(self, step: int, position: float, *, ends_epoch: bool) -> ControlRequests:
        """Actions due at the end of ``step``. If the step ends its epoch, the run's last save is left to
        :meth:`at_epoch_end`."""
        is_final = not ends_epoch and self.is_last(step, position)
        if self._idle_after < step < self._idle_before and not is_final:
            return NO_REQUESTS
        schedules = self._logging, self._evaluation, self._saving, self._saving_in_memory
        self._idle_after, self._idle_before = step, min(each.next_step(step) for each in schedules)
        return ControlRequests(
            log=self._logging.at_step(step) or (step == 1 and self._args.logging_first_step and bool(self._logging)),
            evaluate=self._evaluation.at_step(step),
            save=bool(self._saving) and (is_final or self._saving.at_step(step)),
            save_in_memory=self._saving_in_memory.at_step(step),
        )

    def at_epoch_end(self, epochs: int, step: int) -> ControlRequests:
        """Actions due once ``epochs`` epochs are done, the last of them with ``step``."""
        return ControlRequests(
            log=self._logging.at_epoch(epochs),
            evaluate=self._evaluation.at_epoch(epochs),
            save=bool(self._saving) and (self.is_last(step, epochs) or self._saving.at_epoch(epochs)),
            save_in_memory=self._saving_in_memory.at_epoch(epochs) or self._saving_in_memory.at_step(step),
        )
