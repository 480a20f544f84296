"""Witness: records the inputs and outcomes of steps, and compares them when a resumed leg repeats the steps.

::

    begin_leg                    reads what the leg before recorded after the checkpoint
    begin_step ┐ for each step   digests of batches and generators;
    end_step   ┘                 loss, gradient norm and learning rate; compared, or recorded
    conclude                     behind the last step that the leg before had made: one exchange, and the verdict

The first three steps after each checkpoint are recorded, then one in 1, 2, 4, … so that it takes no more than 0.3 % of
the time. A leg that repeats steps looks at those that were recorded, and records none itself until one differs.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch

from dalsegno.distributed import accelerator, collectives
from dalsegno.distributed.sharded_tensors import local_part
from dalsegno.errors import first_few
from dalsegno.logs import RecordLog
from dalsegno.logs.repeats import RecordDifference
from dalsegno.logs.values import Record, decode, encode
from dalsegno.state import CAUSES, ResumeProof

from .rows import BEGUN, CHANGED, GENERATORS, SETTINGS, BatchDigest, WitnessRows, generator_digests, gradient_sum
from .unsaved import FIRST, SHARE, Unsaved

logger = logging.getLogger("dalsegno")

ROWS = 512
"""Rows of a file after which only half as many of the following steps are recorded, and so on."""

Number = torch.Tensor | float | None
OnResume = Literal["warn", "stop", "ignore"]

_OUTCOMES = {"loss": "loss", "gradients": "gradients", "grad_norm": "gradient norm", "learning_rate": "learning rate"}
"""Keys of a row, in the order in which a step computes them, and their names."""


class Witness:
    """Of one rank, over all legs of a run in this process.

    Args:
        output_dir: of the run.
        device: that computes the steps.
        on_resume: as in ``TrainingArguments``.
        causes: what a difference means where it is not what :data:`~dalsegno.state.CAUSES` says.
        restores_generators: whether a resume restores all random generators. Otherwise one in another state counts
            only if it has an effect.
        excuse: why a record differs without meaning anything; None: it means something.
    """

    def __init__(
        self,
        output_dir: Path,
        device: torch.device,
        on_resume: OnResume,
        *,
        causes: Mapping[str, str] = CAUSES,
        restores_generators: bool = True,
        excuse: Callable[[RecordDifference], str | None] = lambda found: None,
    ) -> None:
        self._output_dir = output_dir
        self._device = device
        self._on_resume = on_resume
        self._causes = {**CAUSES, **causes}
        self._restores_generators = restores_generators
        self._excuse = excuse
        self._report: Callable[[ResumeProof], None] = lambda proof: None
        self._rows: WitnessRows | None = None  # None: nothing is recorded
        self._unsaved: Unsaved | None = None  # before the first leg
        self._reset(0)

    def _reset(self, step: int) -> None:
        self._begin = step  # the leg's first step follows it
        self._checkpoint = step
        self._leg: Record | None = None  # what rank 0 records of this leg
        self._owes_leg = True  # the first row of a file follows it
        self._reasons: list[str] = []
        self._expected: dict[int, Record] = {}
        self._waiting: deque[int] = deque()  # steps of these that are not compared yet
        self._end: int | None = None  # last step that is compared, on every rank; None: nothing is, any more
        self._has_records = False  # which repeated steps write again
        self._compared = 0  # steps
        self._equal_until = step  # last step that was compared, and equal
        self._others: list[str] = []  # what no checkpoint contains, and this leg began with otherwise, in words
        self._without_effect: dict[str, None] = {}  # what differs, in words
        self._difference: ResumeProof | None = None
        self._row: Record | None = None
        self._data: BatchDigest | None = None  # of this row; None if the loop does not show its batches
        self._numbers: dict[str, Number] = {}  # of this row
        self.is_recording = False
        """Whether the step in progress is recorded, so that :meth:`end_step` is to be called."""
        self._late: deque[tuple[Record, Sequence[str], accelerator.LateNumbers]] = deque()
        self._every, self._written = 1, 0
        self._cost = self._spent = 0.0  # seconds that recording a step takes, and those of this step before its end
        self._last = (step, perf_counter())
        self.next_step = step + 1
        """The next step for which :meth:`begin_step` is to be called."""

    # -- legs and checkpoints -----------------------------------------------------------------------------------

    def begin_leg(
        self,
        step: int,
        settings: Mapping[str, Any],
        *,
        is_resumed: bool,
        explain: Callable[[Mapping[str, Any]], Sequence[str] | None],
        report: Callable[[ResumeProof], None],
        unsaved: Unsaved,
    ) -> None:
        """Prepare to compare, or to record, the steps after ``step``, when logs are open. Collective.

        Args:
            settings: of this leg, plain values; rank 0's are recorded.
            is_resumed: the run's state after ``step`` was restored from a checkpoint of its own.
            explain: reasons why a leg with other settings makes other steps; None: they are of a leg of another run.
            report: called with what is known of the resume: at this rank's first difference, and in the end.
            unsaved: what no checkpoint contains.
        """
        self._report, self._unsaved = report, unsaved
        begun = unsaved.begin()
        rank, world_size = collectives.rank(), collectives.world_size()
        rows = self._rows = WitnessRows(self._output_dir, rank)
        self._reset(step)
        self._leg = decode(encode({SETTINGS: settings, BEGUN: begun})) if rank == 0 else None
        if not is_resumed:
            self._try(lambda rows: rows.cut(step + 1))
        expected, legs = rows.read(step) if is_resumed else ({}, [])
        explained = [explain(each[SETTINGS]) for each in legs]
        self._others = [f"{name} was another as the leg began" for name in _others(begun, legs)]
        unsaved.expect(name for leg in legs for name in leg.get(CHANGED, ()))
        reasons = list(dict.fromkeys(reason for each in explained for reason in each or ()))
        newest = max(expected, default=step)
        last = step if None in explained else newest
        logged = RecordLog.repeats_until(self._output_dir) if is_resumed else 0
        fewest, logged, has_reasons = collectives.all_reduce_max(
            [-last, logged, bool(reasons)], "which steps are repeated"
        )
        recorded = -fewest
        end, self._has_records = max(recorded, logged), logged > step
        everywhere = collectives.gather(reasons, "why steps may differ") if has_reasons else []
        self._reasons = [reason for found in everywhere for reason in found]
        if rank == 0:
            self._try(lambda rows: rows.remove_other_ranks(world_size))
        if newest > recorded:
            self._try(lambda rows: rows.cut(recorded + 1))
        self._open(step)
        if end > step:
            self._expected = {number: row for number, row in expected.items() if number <= recorded}
            self._waiting, self._end = deque(sorted(self._expected)), end
            self._advance(step)
        elif is_resumed:
            proof = ResumeProof(verdict="not proven", why="the leg before recorded no step after the checkpoint")
            if rank == 0:
                self._log(proof)
            self._report(proof)

    def expect_difference(self, reason: str) -> None:
        """Steps of this leg may differ from those of the leg before, for a ``reason`` that the user was told."""
        self._reasons.append(reason)

    def note_captured(self, step: int) -> None:
        """The state after ``step`` is being saved: from here on, another file. Warns of what is not."""
        if self._unsaved is not None and collectives.rank() == 0:
            self._unsaved.warn()
        self._checkpoint, self._written, self._every = step, 0, 1
        self._open(step)
        self._advance(step)

    def note_published(self, step: int) -> None:
        """Forget the steps before ``step``, the last checkpoint but one."""
        self._try(lambda rows: rows.remove_before(step))

    def go_back(self, finished: int, step: int) -> None:
        """After ``finished`` steps the leg returns to the checkpoint of ``step``: what it makes from there on repeats
        nothing. Collective."""
        self.conclude(finished)
        leg = self._leg
        self._reset(step)
        self._leg = leg
        RecordLog.stop_comparing(self._output_dir)
        self._try(lambda rows: rows.cut(step + 1))
        self._open(step)

    def close(self, finished: int) -> None:
        """At the end of a leg, on any path. Not collective: a comparison that all ranks have not concluded stays open,
        unless this is the only rank."""
        if self._end is not None:
            if collectives.world_size() == 1:
                self.conclude(finished)
            elif self._difference is not None:
                self._report(self._difference)
        if self._rows is not None:
            self._rows.close()

    @property
    def is_comparing(self) -> bool:
        """Whether this leg repeats steps, and has not concluded about them yet; equal on all ranks."""
        return self._end is not None

    def _open(self, step: int) -> None:
        self._owes_leg = True
        if self._rows is not None:
            self._rows.begin(step)

    # -- steps --------------------------------------------------------------------------------------------------

    def begin_step(self, step: int, batches: Iterable[Any] = ()) -> None:
        """To be called before each step from :attr:`next_step` on, with what is read of its batches. Collective behind
        the last repeated step."""
        if step > self._begin + 1 and self._unsaved is not None:
            self._unsaved.end_first_step()
        if self._end is not None and step > self._end:
            self.conclude(step - 1)
        elif self._end is not None:
            self._check_records(step - 1)
        if self._rows is None and self._end is None:
            self.next_step = sys.maxsize
        if step < self.next_step:
            return
        self.is_recording = True
        self._row, self._numbers, self._data = {"global_step": step}, {}, None
        self._spent = 0.0
        for batch in batches:
            self.add_batch(batch)
        began = perf_counter()
        self._row["random"] = generator_digests()
        self._spent += perf_counter() - began

    def add_batch(self, batch: Any) -> None:
        """To be called for each batch of a step that :attr:`is_recording`, unless :meth:`begin_step` got it."""
        began = perf_counter()
        self._data = self._data or BatchDigest()
        self._data.add(batch)
        self._spent += perf_counter() - began

    def add_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """To be called before the update of a step that :attr:`is_recording`, where a loop may not know the loss."""
        began = perf_counter()
        self._numbers["gradients"] = gradient_sum(optimizer)
        self._spent += perf_counter() - began

    def end_step(self, loss: Number, grad_norm: Number, lr: Number) -> None:
        """To be called after each step that :attr:`is_recording`. What is None is not known."""
        row, self._row, self.is_recording = self._row, None, False
        assert row is not None, "begin_step() comes first"
        began = perf_counter()
        if self._data is not None:
            row["data"] = str(self._data)
            self._numbers["contents"] = self._data.on_device
        self._numbers |= {"loss": loss, "grad_norm": grad_norm, "learning_rate": lr}
        given = {name: each for name, each in self._numbers.items() if each is not None}
        # Reading a DTensor would wait for other ranks.
        known = {name: local_part(each.detach()) if torch.is_tensor(each) else each for name, each in given.items()}
        self._late.append((row, list(known), accelerator.LateNumbers(list(known.values()))))
        self._finish(wait=False)
        step = row["global_step"]
        self._adapt(step, began)
        self._advance(step)

    def _adapt(self, step: int, began: float) -> None:
        """Choose how often steps are recorded, by what this one cost."""
        now = perf_counter()
        before, then = self._last
        each = (now - then) / max(step - before, 1)  # seconds
        cost = self._spent + now - began
        self._cost = min(cost, (self._cost + cost) / 2) if self._cost else cost  # the first one opens a file
        affordable = max(self._cost / (SHARE * max(each, 1e-9)), 2.0 ** (self._written // ROWS))
        self._every = 1 << max(0, math.ceil(math.log2(max(affordable, 1.0))))
        self._last = step, now

    def _advance(self, step: int) -> None:
        """Set the next step at which there is something to do."""
        if self._end is not None:
            while self._waiting and self._waiting[0] <= step:
                self._waiting.popleft()
            self.next_step = self._waiting[0] if self._waiting else self._end + 1
        elif step < self._checkpoint + FIRST:
            self.next_step = step + 1
        else:
            self.next_step = (step // self._every + 1) * self._every

    def _finish(self, *, wait: bool) -> None:
        """Compare or write the rows whose numbers have arrived from the device."""
        while self._late and (wait or self._late[0][2].are_here()):
            row, names, numbers = self._late.popleft()
            row |= dict(zip(names, numbers.values(), strict=True))
            expected = self._expected.pop(row["global_step"], None)
            if expected is not None and self._difference is None:
                self._compare(expected, row)
            if expected is None or self._difference is not None:
                self._write(row)

    def _write(self, row: Record) -> None:
        if self._rows is None:
            return
        if self._owes_leg and self._leg is not None and self._unsaved is not None:
            leg = self._leg | {CHANGED: self._unsaved.found()}
            self._try(lambda rows: rows.append(leg))
        self._owes_leg = False
        self._try(lambda rows: rows.append(row))
        self._written += 1

    def _try(self, work: Callable[[WitnessRows], None]) -> None:
        """Do this with the rows, if any are recorded. If the disk is full, record nothing more: training goes on."""
        try:
            if self._rows is not None:
                work(self._rows)
        except OSError as error:
            self._rows = None
            logger.info("the witness of the steps could not be written, so a resume may not be proven: %s", error)

    # -- the verdict --------------------------------------------------------------------------------------------

    def conclude(self, finished: int) -> None:
        """Report the outcome of the comparison, if one is in progress, after ``finished`` steps. Collective."""
        if self._end is None:
            return
        self._finish(wait=True)
        last = min(finished, self._end)
        self._check_records(last)
        mine = None if self._difference is None else asdict(self._difference)
        known = mine, [*self._others, *self._without_effect], self._unsaved_names()
        everywhere = collectives.gather(known, "whether the repeated steps are equal")
        found = [ResumeProof(**proof) for proof, _, _ in everywhere if proof is not None]
        self._end = None
        self._expected.clear()
        self._advance(last)
        RecordLog.stop_comparing(self._output_dir)
        if found:
            # The first one, which may be why others differ, as gradients are shared.
            proof = min(found, key=lambda each: (each.differs_at or 0, list(CAUSES).index(str(each.what))))
            if proof != self._difference and collectives.rank() == 0:
                self._log(proof)
            self._report(proof)
            return
        if last == self._begin:
            proof = ResumeProof(verdict="not proven", why="the leg ended before it had repeated a step")
        elif not (self._compared or self._has_records):
            proof = ResumeProof(verdict="not proven", why="neither the loss nor the gradients of a step are known")
        else:
            every = max(1, round((last - self._begin) / max(self._compared, 1)))
            why = ", ".join(dict.fromkeys(each for _, found, _ in everywhere for each in found)) or None
            unsaved = sorted({each for _, _, names in everywhere for each in names})
            proof = ResumeProof(
                verdict="exact",
                first_step=self._begin + 1,
                last_step=last,
                every=every,
                why=why,
                unsaved=first_few(unsaved, 5) or None,
            )
        if collectives.rank() == 0:
            self._log(proof)
        self._report(proof)

    def _unsaved_names(self) -> list[str]:
        return [] if self._unsaved is None else self._unsaved.names()

    def _log(self, proof: ResumeProof) -> None:
        level = logging.WARNING if proof.verdict == "differs" else logging.INFO
        if level == logging.INFO or self._on_resume != "ignore":
            logger.log(level, "%s", proof.line)

    def _compare(self, before: Record, now: Record) -> None:
        """Compare what both legs know of a step, bit for bit."""
        step = now["global_step"]
        known = before.keys() & now.keys()
        different = {key for key in known if repr(before[key]) != repr(now[key])}  # NaN equals itself
        states = zip_longest(str(before.get("random")).split(), now["random"].split())
        generators = [name for name, (was, found) in zip(GENERATORS, states, strict=False) if was != found]
        outcome = next((key for key in _OUTCOMES if key in different), None)
        self._compared += not known.isdisjoint(("loss", "gradients"))
        if different & {"data", "contents"}:
            self._differs(step, "data", self._causes["data"])
        elif generators and (outcome is not None or self._restores_generators):
            cause = self._causes["random numbers"]
            self._differs(step, "random numbers", f"from {' and '.join(generators)} generator; {cause}")
        elif outcome is not None:
            name = _OUTCOMES[outcome]
            self._differs(step, name, f"{before[outcome]} before, {now[outcome]} now; {self._causes[name]}")
        else:
            self._equal_until = step
            self._without_effect |= {f"{name} generator was in another state": None for name in generators}

    def _check_records(self, step: int) -> None:
        """Report a record that differs, unless a row that is still to come may say what of its step does."""
        if self._difference is not None or (found := RecordLog.difference_in(self._output_dir)) is None:
            return
        if (why := self._excuse(found)) is not None:
            self._without_effect[why] = None
            RecordLog.stop_comparing(self._output_dir)
            return
        written = step if found.step is None else found.step
        if written <= self._equal_until:
            self._differs(written, "record", f"{found}; {self._causes['record']}")
        elif not self._expected or step >= (self._end or 0):
            self._differs(written, "record", f"{found}; what the steps computed until there is not recorded")

    def _differs(self, step: int, what: str, cause: str) -> None:
        """The first difference on this rank."""
        reasons = self._reasons
        kind = self._device.type
        is_deterministic = kind == "cpu" or torch.are_deterministic_algorithms_enabled()
        if what in ("loss", "gradients", "gradient norm", "record") and not is_deterministic:
            reasons = [*reasons, f"{kind} without torch.use_deterministic_algorithms(True) rounds as it happens to"]
        why = "; ".join([*(reasons or [cause]), *self._others])
        if collectives.world_size() > 1:
            why = f"on rank {collectives.rank()}, {why}"
        self._difference = ResumeProof(
            verdict="changed" if reasons else "differs",
            first_step=self._begin + 1,
            last_step=self._end,
            differs_at=step,
            what=what,
            why=why,
            unsaved=first_few(self._unsaved_names(), 5) or None,
        )
        if self._on_resume == "stop" and not reasons:
            self._rows = None  # the next leg compares again
        else:
            self._try(lambda rows: rows.cut(step))
            self._open(self._checkpoint)
        self._log(self._difference)
        self._report(self._difference)


def _others(begun: Mapping[str, str], legs: Sequence[Record]) -> list[str]:
    """What this leg began with otherwise than one before it; of a container, its name."""
    before: set[tuple[str, str]] = {each for leg in legs for each in leg.get(BEGUN, {}).items()}
    return sorted({name.partition("[")[0] for name, was in before if begun.get(name, was) != was})
