"""LastLeg: how the previous leg of a run ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

from dalsegno.args import TrainingArguments
from dalsegno.distributed import collectives
from dalsegno.logs import Leg, RunFile
from dalsegno.state import TrainerState

from .result import Reason, TrainResult
from .resume import ResumeOptions

logger = logging.getLogger("dalsegno")


@dataclass(frozen=True, slots=True)
class LastLeg:
    """The newest leg in ``run.json``; the same on all ranks."""

    leg: Leg | None
    has_given_up: bool
    """A callback has judged the training to be over, and neither ``max_steps`` nor ``num_train_epochs`` was raised
    since."""

    @classmethod
    def read(cls, run_file: RunFile, args: TrainingArguments) -> Self:
        """Read it on rank 0. Collective."""
        leg = collectives.from_rank_zero(run_file.last_leg)
        return cls(leg, leg is not None and leg.has_given_up(args.max_steps, args.num_train_epochs))

    def stays_given_up(self, options: ResumeOptions) -> bool:
        """Whether a callback has ended the run, and the user does not ask to resume it all the same."""
        return self.has_given_up and not (options.chooses or options.continue_stopped)

    def warn_gave_up(self) -> None:
        """Log why nothing is trained, and how to train further."""
        leg = self.leg
        assert leg is not None, "only a leg gives up"
        logger.warning(
            "%s at step %d already, by %s: %s; to train further, raise max_steps or num_train_epochs, whichever the "
            "run ends by, or pass continue_stopped=True",
            leg.reason,
            leg.last_step,
            leg.by,
            leg.why or "no reason given",
        )

    def result(self, state: TrainerState, newest: Path | None, path_of: Callable[[int], Path]) -> TrainResult | None:
        """The result that ``train()`` returned at the leg's end, if the run ended there; else None.

        Args:
            state: as restored.
            newest: the checkpoint that it was restored from.
            path_of: the directory of a step's checkpoint.
        """
        leg = self.leg
        if leg is None:
            return None
        has_finished = leg.reason == "finished" and leg.last_step == state.global_step
        if not (has_finished or self.has_given_up):
            return None
        result = TrainResult(
            leg.last_step, cast(Reason, leg.reason), leg.why, leg.by, leg.metrics, newest, diverged=leg.diverged
        )
        return result.with_best(state, path_of)
