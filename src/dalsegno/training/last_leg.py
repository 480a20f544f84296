"""LastLeg: how the previous leg of a run ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

from dalsegno.args import TrainingArguments
from dalsegno.distributed import collectives
from dalsegno.logs import Leg, RunFile
from dalsegno.state import TrainerState

from .result import Reason, TrainResult

logger = logging.getLogger("dalsegno")


@dataclass(frozen=True, slots=True)
class LastLeg:
    """The newest leg in ``run.json``; the same on all ranks."""

    leg: Leg | None
    ended_run: bool
    """A callback has judged training to be over, the leg has ended because of it, and neither ``max_steps`` nor
    ``num_train_epochs`` was raised since."""

    @classmethod
    def read(cls, run_file: RunFile, args: TrainingArguments) -> Self:
        """Read it on rank 0. Collective."""
        leg = collectives.from_rank_zero(run_file.last_leg)
        has_ended = leg is not None and leg.reason in ("stopped", "aborted")
        return cls(leg, leg is not None and has_ended and _is_in_force(leg.goal_given_up, args))

    def run_is_given_up(self, state: TrainerState, args: TrainingArguments) -> bool:
        """Whether a callback has judged training to be over. The leg may have been killed before its end: then the
        restored checkpoint contains the judgement, unless the leg began there because the user asked for more.

        Args:
            state: as restored.
        """
        leg, given_up = self.leg, state.given_up
        if self.ended_run or given_up is None:
            return self.ended_run
        asked_for_more = leg is not None and leg.first_step == state.global_step and leg.goal_given_up is None
        return not asked_for_more and _is_in_force(given_up["goal"], args)

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
        if not (has_finished or self.ended_run):
            return None
        result = TrainResult(
            leg.last_step, cast(Reason, leg.reason), leg.why, leg.by, leg.metrics, newest, diverged=leg.diverged
        )
        return result.with_best(state, path_of)


def _is_in_force(goal: Mapping[str, float] | None, args: TrainingArguments) -> bool:
    """Whether the goal was given up, and neither of its limits was raised since."""
    if goal is None:
        return False
    return args.max_steps <= goal["max_steps"] and args.num_train_epochs <= goal["num_train_epochs"]
