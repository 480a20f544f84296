"""``run.json``, which lists a run's legs: ``LegRecorder`` writes it, ``LastLeg`` reads how the previous leg ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

from dalsegno.args import TrainingArguments
from dalsegno.distributed import collectives
from dalsegno.distributed.modes import text_of
from dalsegno.logs import Leg, PreviousLeg, RunFile
from dalsegno.state import ResumeProof, TrainerState

from .chosen_start import name_in
from .full_disk import expect_room
from .result import Reason, TrainResult
from .run_parts import RunParts

logger = logging.getLogger("dalsegno")


class LegRecorder:
    """Writes on rank 0 only. Every method raises SaveFailed if ``run.json`` cannot be written, say on a full disk."""

    def __init__(self, parts: RunParts, run_file: RunFile, memory: str | None, changed: Sequence[str]) -> None:
        self._memory = memory
        self._changed = changed
        self._parts = parts
        self._state = parts.state
        self._run_file = run_file
        self._writes = collectives.rank() == 0

    def begin(self, resumed_from: Path | None) -> None:
        if self._writes:
            with expect_room(self._run_file.path, "nothing is trained, and what was there before is as it was"):
                self._run_file.begin(
                    None if resumed_from is None else name_in(self._parts.args.directory, resumed_from),
                    collectives.world_size(),
                    self._state.global_step,
                    PreviousLeg.from_environment(),
                    parallel=text_of(self._parts.args.parallel),
                    mesh=self._parts.layout.dimensions,
                    memory=self._memory,
                    goal_given_up=self._state.given_up and self._state.given_up["goal"],
                    changed=self._changed,
                )

    def prove(self, proof: ResumeProof) -> None:
        """Record whether the leg repeats the steps of the leg before; if not, stop it if the user asks for that."""
        self._state.resume_proof = proof
        if self._writes:
            with expect_room(self._run_file.path, f"that the leg has {proof.line} is not in there, and training ends"):
                self._run_file.prove(proof)
        if proof.verdict == "differs" and self._parts.args.on_resume == "stop":
            self._parts.control.stop(proof.line, save=False, by="on_resume")

    def end(self, result: TrainResult) -> None:
        """Record how the leg ended; and the goal of the run, if a callback has judged the training to be over."""
        if not self._writes:
            return
        args, given_up, request = self._parts.args, self._state.given_up, self._parts.control.stop_request
        if result.reason in ("stopped", "aborted") and request is not None:  # after the last step, perhaps
            given_up = given_up or request.given_up(args.max_steps, args.num_train_epochs)
        safe = f"{result.checkpoint} and the logs are safe" if result.checkpoint else "no checkpoint was saved"
        with expect_room(
            self._run_file.path,
            f"how this leg ended ({result.reason} at step {result.global_step}) is not in there, but {safe}. Started "
            "again, the run resumes from its newest checkpoint and records its end",
        ):
            self._run_file.end(
                result.reason,
                result.stopped_by,
                result.global_step,
                result.metrics,
                result.why,
                given_up and given_up["goal"],
                diverged=result.diverged,
            )


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
        restored ``state`` contains the judgement, unless the leg began there because the user asked for more."""
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

        ``state`` is restored, from the checkpoint ``newest``; ``path_of`` is the directory of a step's checkpoint.
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
