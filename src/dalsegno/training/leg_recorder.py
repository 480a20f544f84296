"""LegRecorder: writes into ``run.json`` that a leg begins, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dalsegno.distributed import collectives
from dalsegno.distributed.modes import text_of
from dalsegno.errors import SaveFailed
from dalsegno.logs import PreviousLeg, RunFile
from dalsegno.state import GivenUp, ResumeProof

from .chosen_start import name_in
from .parts import RunParts
from .result import TrainResult


class LegRecorder:
    """On rank 0; does nothing on other ranks.

    Every method raises SaveFailed if ``run.json`` cannot be written, say on a full disk.
    """

    def __init__(self, parts: RunParts, run_file: RunFile, memory: str | None) -> None:
        """``memory``: name of the directory of its memory checkpoints."""
        self._memory = memory
        self._args = parts.args
        self._layout = parts.layout
        self._state = parts.state
        self._control = parts.control
        self._run_file = run_file
        self._writes = collectives.rank() == 0

    def begin(self, resumed_from: Path | None) -> None:
        """Record that a leg begins at the present step."""
        if self._writes:
            with self._writing("nothing is trained, and what was there before is as it was"):
                self._run_file.begin(
                    None if resumed_from is None else name_in(self._args.directory, resumed_from),
                    collectives.world_size(),
                    self._state.global_step,
                    PreviousLeg.from_environment(),
                    parallel=text_of(self._args.parallel),
                    mesh=self._layout.dimensions,
                    memory=self._memory,
                    goal_given_up=_goal(self._state.given_up),
                )

    def prove(self, proof: ResumeProof) -> None:
        """Record whether the leg repeats the steps of the leg before; if not, stop it if the user asks for that."""
        self._state.resume_proof = proof
        if self._writes:
            with self._writing(f"that the leg has {proof.line} is not in there, and training ends"):
                self._run_file.prove(proof)
        if proof.verdict == "differs" and self._args.on_resume == "stop":
            self._control.stop(proof.line, save=False, by="on_resume")

    def end(self, result: TrainResult) -> None:
        """Record how the leg ended; and the goal of the run, if a callback has judged the training to be over."""
        if not self._writes:
            return
        args, given_up, request = self._args, self._state.given_up, self._control.stop_request
        if result.reason in ("stopped", "aborted") and request is not None:  # after the last step, perhaps
            given_up = given_up or request.given_up(args.max_steps, args.num_train_epochs)
        safe = f"{result.checkpoint} and the logs are safe" if result.checkpoint else "no checkpoint was saved"
        with self._writing(
            f"how this leg ended ({result.reason} at step {result.global_step}) is not in there, but {safe}. Started "
            "again, the run resumes from its newest checkpoint and records its end"
        ):
            self._run_file.end(
                result.reason,
                result.stopped_by,
                result.global_step,
                result.metrics,
                result.why,
                _goal(given_up),
                diverged=result.diverged,
            )

    @contextmanager
    def _writing(self, consequence: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SaveFailed(
                f"{self._run_file.path} could not be written: {error}; {consequence}; make room first"
            ) from error


def _goal(given_up: GivenUp | None) -> dict[str, float] | None:
    return None if given_up is None else given_up["goal"]
