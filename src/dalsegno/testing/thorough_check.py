"""check_resume_thoroughly: interrupt a run in each of its first epochs, by kill and by stop, on one rank and on two.

A Break saves a checkpoint at a given step and ends the leg there, so that the next leg resumes from that step.
"""

from __future__ import annotations

import enum
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, cast

from dalsegno.checkpoint import CheckpointManager
from dalsegno.data import NOT_EXACT
from dalsegno.distributed import collectives
from dalsegno.errors import DalsegnoError, RankFailed
from dalsegno.events.callback import Callback, FlaglessCallback
from dalsegno.events.contexts import Context, LoadContext
from dalsegno.events.registration import register_global_callback
from dalsegno.logs import RunFile

from .compare import RunComparison, compare_runs
from .equivalence import Factory, build_in
from .faults import EventRecorder, EventTrace
from .processes import start_ranks, values

How = Literal["kill", "stop"]
"""``kill``: SIGKILL, once the checkpoint is published and three more steps are done, or at the next save; ``stop``:
SIGTERM, which saves."""

Moment = Literal["inside", "last step", "end"]
"""After a step in the middle of an epoch; after its last step, before ``on_epoch_end``; after ``on_epoch_end``."""

Pattern = Sequence[Sequence[tuple[Moment, How]]]
"""The breaks of each epoch, starting with the first."""

THOROUGH: tuple[Pattern, ...] = (
    (
        (("inside", "kill"), ("last step", "stop")),
        (("inside", "stop"), ("end", "kill")),
        (("inside", "kill"), ("end", "stop")),
        (("inside", "stop"), ("last step", "kill")),
    ),
    (
        (("inside", "stop"), ("end", "kill")),
        (("inside", "kill"), ("last step", "stop")),
        (("inside", "stop"), ("last step", "kill")),
        (("inside", "kill"), ("end", "stop")),
    ),
)
"""Together they kill and stop in the middle and at the end of each epoch, before and after ``on_epoch_end``."""

BRIEF: tuple[Pattern, ...] = (
    ((("inside", "kill"),), (("end", "stop"),), (("end", "kill"),), (("inside", "stop"),)),
    ((("end", "kill"),), (("inside", "stop"),), (("last step", "stop"),), (("inside", "kill"),)),
)
"""One break in each epoch, to check many runs quickly."""

_SAVE_TIMEOUT = 60.0  # seconds
_LOST = 3
"""Steps that a kill loses, and the next leg repeats, unless a save comes before."""


@dataclass(frozen=True, slots=True)
class Break:
    """One interruption of a run."""

    epoch: int
    """Counted from 1."""
    moment: Moment
    step: int
    """Finished steps of the checkpoint from which the next leg resumes."""
    how: How

    @property
    def place(self) -> str:
        if self.moment == "inside":
            return f"in epoch {self.epoch}, after step {self.step}"
        return f"{'at' if self.moment == 'end' else 'before'} the end of epoch {self.epoch}, after step {self.step}"

    def __str__(self) -> str:
        return f"{'killed' if self.how == 'kill' else 'stopped'} {self.place}"


def breaks_of(trace: EventTrace, pattern: Pattern) -> Iterator[Break]:
    """The breaks of a pattern in the run of a trace.

    Leaves out the run's last step, since a finished run has nothing to resume, and the middle of an epoch of one step.
    """
    begin = 0
    for epoch, (end, breaks) in enumerate(zip([*trace.epoch_ends, trace.steps], pattern, strict=False), start=1):
        for moment, how in breaks:
            step = (begin + end + 1) // 2 if moment == "inside" else end
            if begin < step < trace.steps and (moment != "inside" or step < end):
                yield Break(epoch, moment, step, how)
        begin = end


class Milestones(Callback):
    """Requests a checkpoint at each break of a run, and ends the leg at one of them.

    Every leg of the run has this callback, so that all legs save at the same steps.
    """

    def __init__(self, breaks: Collection[Break], breaks_off: Break | None) -> None:
        self._steps = {each.step for each in breaks if each.moment != "end"}
        self._epochs = {each.epoch for each in breaks if each.moment == "end"}
        self._break = breaks_off

    def on_step_end(self, ctx: Any) -> None:
        step = ctx.state.global_step
        ctx.control.should_save |= step in self._steps
        if self._break is not None and self._break.moment != "end" and step == self._break.step:
            self._stop()

    def on_epoch_end(self, ctx: Any) -> None:
        epoch = ctx.epoch + 1
        ctx.control.should_save |= epoch in self._epochs
        if self._break is not None and self._break.moment == "end" and epoch == self._break.epoch:
            self._stop()

    def on_step_done(self, ctx: Any) -> None:
        self._kill_after(_LOST, ctx)

    def on_before_save(self, ctx: Any) -> None:
        self._kill_after(1, ctx)

    def _kill_after(self, steps: int, ctx: Any) -> None:
        """Kill that many steps after the break; their records are written and not saved."""
        wanted = self._break
        if wanted is None or wanted.how != "kill" or ctx.state.global_step < wanted.step + steps or collectives.rank():
            return
        published = CheckpointManager(ctx.args.directory).path_of(wanted.step)
        deadline = time.monotonic() + _SAVE_TIMEOUT
        while not published.exists():  # a background save
            if time.monotonic() > deadline:
                raise RankFailed(f"{published}: requested, and not saved after {_SAVE_TIMEOUT:g} s")
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        if self._break is not None and self._break.how == "stop" and collectives.rank() == collectives.world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)


_OF_EXTRA_SAVES = ("trainer.best_model_checkpoint",)
"""Values that depend on where a run saves: of two equal runs, only one may have saved at the best step."""


class Verdict(enum.StrEnum):
    """Result of comparing an interrupted run with an uninterrupted one."""

    EXACT = "exact"
    """Equal, bit by bit."""
    REFUSED = "refused"
    """A leg raised a dalsegno error before its first step."""
    SAID = "said"
    """A warning or a changed setting announced a difference, or the proof of a resumed leg contains it."""
    UNPROVEN = "not proven"
    """Different, and a resumed leg had no step to repeat, or ended before it had compared one."""
    DIFFERENT = "different"
    """Different, and neither announced nor in a proof; or a leg failed."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run, interrupted at each of its breaks in turn."""

    world_size: int
    breaks: tuple[Break, ...]
    """Empty: the run was refused before the first break."""
    verdict: Verdict
    words: str = ""
    """Message of the refusal, warning or error, or the first difference."""
    comparison: RunComparison | None = None
    """Comparison with the uninterrupted run, if both finished."""

    def __str__(self) -> str:
        where = ", ".join(map(str, self.breaks)) or "from the beginning"
        return f"{_ranks(self.world_size)}, {where}: {self.verdict}" + (f": {self.words}" if self.words else "")


@dataclass(frozen=True, slots=True)
class _Leg:
    trace: EventTrace
    refusal: str | None


def check_resume_thoroughly(
    factory: Factory,
    *,
    folder: Path,
    world_sizes: Sequence[int] = (1, 2),
    patterns: Sequence[Pattern] = THOROUGH,
    find_out_which: bool = True,
    timeout: float = 300.0,
    say: Callable[[str], None] = lambda line: None,
) -> list[Trial]:
    """Interrupt a run in each of its first four epochs, resume it each time, and compare it with an uninterrupted one.

    For each number of ranks, one run is uninterrupted, and two are interrupted: in the middle and at the end of each
    epoch, by SIGKILL and by SIGTERM in turn. Each break saves a checkpoint, so that the next leg resumes right there.

    Args:
        factory: builds the trainer, as for :func:`check_resume`.
        folder: gets the runs, in one directory per number of ranks.
        world_sizes: numbers of ranks, joined over gloo.
        patterns: where and how to interrupt; one run for each pattern.
        find_out_which: if a run is not exact, interrupt further runs at each of its breaks alone.
        timeout: time limit of each leg, in seconds.
        say: called with each line of progress.

    Raises:
        RankFailed: if the uninterrupted run fails.
    """
    trials: list[Trial] = []
    for world_size in world_sizes:
        bench = _Bench(factory, folder / f"ranks-{world_size}", world_size, timeout)
        for trial in bench.trials(patterns, find_out_which, say):
            say(str(trial))
            trials.append(trial)
    return trials


def _ranks(world_size: int) -> str:
    return f"{world_size} rank{'s' * (world_size > 1)}"


def _warnings_file(output_dir: Path) -> Path:
    """File for warnings before a leg's first step; a killed leg cannot return them."""
    return output_dir.with_suffix(".said")


def worst(trials: Sequence[Trial]) -> Verdict:
    """The worst verdict of several trials."""
    return max((trial.verdict for trial in trials), key=list(Verdict).index)


@dataclass(slots=True)
class _Bench:
    factory: Factory
    folder: Path
    world_size: int
    timeout: float

    def trials(self, patterns: Sequence[Pattern], find_out_which: bool, say: Callable[[str], None]) -> Iterator[Trial]:
        reference = self._leg("reference", (), None)
        assert reference is not None, "no plan, no kill"
        if reference.refusal is not None:
            yield Trial(self.world_size, (), Verdict.REFUSED, reference.refusal)
            return
        trace = reference.trace
        epochs = len({*trace.epoch_ends, trace.steps})
        say(f"{_ranks(self.world_size)}: finished without interruption after {trace.steps} steps, {epochs} epochs")
        if epochs < max(map(len, patterns)):
            say(f"  epochs after {epochs} cannot be interrupted: build a run with less data or more steps")
        names = (f"broken-{number}" for number in count(1))
        for pattern in patterns:
            breaks = list(breaks_of(trace, pattern))
            whole = self._trial(next(names), breaks)
            if whole.verdict is Verdict.EXACT or len(breaks) == 1 or not find_out_which:
                yield whole
                continue
            alone = [self._trial(next(names), [each]) for each in breaks]
            yield from alone
            if worst(alone) is Verdict.EXACT:
                yield whole  # only the breaks together make a difference

    def _trial(self, name: str, breaks: Sequence[Break]) -> Trial:
        def trial(verdict: Verdict, words: str = "", comparison: RunComparison | None = None) -> Trial:
            return Trial(self.world_size, tuple(breaks), verdict, words, comparison)

        try:
            for breaks_off in [*breaks, None]:
                leg = self._leg(name, breaks, breaks_off)
                if leg is not None and leg.refusal is not None:
                    return trial(Verdict.REFUSED, leg.refusal)
        except RankFailed as error:
            return trial(Verdict.DIFFERENT, f"a leg failed: {error}")
        comparison = compare_runs(self.folder / "reference", self.folder / name, ignoring=_OF_EXTRA_SAVES)
        proofs = [leg.resumed for leg in RunFile(self.folder / name).legs()[1:]]
        for proof in proofs:
            if proof is not None and proof.verdict in ("differs", "changed"):
                return trial(Verdict.SAID, proof.line, comparison)
        if comparison.identical:
            return trial(Verdict.EXACT, comparison=comparison)
        for warnings in (_warnings_file(self.folder / "reference"), _warnings_file(self.folder / name)):
            if warnings.exists():
                return trial(Verdict.SAID, warnings.read_text().strip(), comparison)
        difference = next(row.difference for row in comparison.rows if row.difference is not None)
        was_proven = all(proof is not None and proof.verdict == "exact" for proof in proofs)
        return trial(Verdict.DIFFERENT if was_proven else Verdict.UNPROVEN, difference, comparison)

    def _leg(self, name: str, breaks: Sequence[Break], breaks_off: Break | None) -> _Leg | None:
        """Run one leg; None if it was killed as planned."""
        args = (self.factory, self.folder / name, tuple(breaks), breaks_off)
        outcomes = start_ranks(_train, self.world_size, *args).wait(self.timeout)
        if breaks_off is not None and outcomes[0].was_killed:
            return None
        legs = [cast(_Leg, each.value) for each in outcomes if each.value is not None]
        # Other ranks may have failed because they lost one that was refused.
        return next((leg for leg in legs if leg.refusal is not None), None) or cast(_Leg, values(outcomes)[0])


def _train(factory: Factory, output_dir: Path, breaks: Sequence[Break], breaks_off: Break | None) -> _Leg:
    recorder, beginning = EventRecorder(), _Beginning(_warnings_file(output_dir))
    register_global_callback(Milestones(breaks, breaks_off))
    recorder.start()
    beginning.start()
    refusal = None
    try:
        build_in(output_dir, factory).train()
    except DalsegnoError as error:
        if beginning.is_over:
            raise
        refusal = f"{type(error).__name__}: {error}"
    return _Leg(recorder.trace(), refusal)


class _Beginning(FlaglessCallback):
    """Records each announcement that the resumed run will differ: a warning, a changed setting."""

    def __init__(self, warnings: Path) -> None:
        self._warnings = warnings
        self.is_over = False

    def start(self) -> None:
        """Register in this process."""
        register_global_callback(self)
        handler = logging.Handler(logging.WARNING)
        handler.emit = self._record  # type: ignore[method-assign]
        logging.getLogger("dalsegno").addHandler(handler)

    def on_load(self, ctx: LoadContext) -> None:
        if ctx.report.changes:
            self._write("\n".join(map(str, ctx.report.changes)))

    def on_step_begin(self, ctx: Context) -> None:
        self.is_over = True

    def _record(self, record: logging.LogRecord) -> None:
        if getattr(record, NOT_EXACT, False):
            self._write(record.getMessage())

    def _write(self, words: str) -> None:
        self._warnings.parent.mkdir(parents=True, exist_ok=True)
        self._warnings.write_text(words)
