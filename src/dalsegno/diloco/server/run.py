"""OuterRun: the global parameters of a DiLoCo run, and the events that change them.

An event changes them at once, and is in the journal before anything that depends on it leaves the server. So after a
kill, the newest checkpoint and the events after it lead to the same parameters, bit by bit.
"""

from __future__ import annotations

import copy
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from dalsegno.diloco.server.rounds import Accepted, Applied, Event, ServerState
from dalsegno.diloco.wire.messages import Result, Settings, Submission
from dalsegno.diloco.wire.signature import Specs, TensorSpec
from dalsegno.errors import NotFound, SaveFailed, StateMismatch
from dalsegno.system.durability import NotDurable

from .files import SpooledTensors, Version
from .outer import BLOCK, MakeOptimizer, ReadBlock, describe, outer_step
from .store import Globals, Scratch, ServerStore, TensorFile

logger = logging.getLogger("dalsegno")


class OuterRun:
    """The run in ``folder``; a new one has no parameters until :meth:`begin`. A checkpoint is due every ``save_every``
    outer steps. Used by one thread at a time, except :meth:`commit`, and except :meth:`write_versions` and :meth:`save`
    while other threads record events."""

    def __init__(self, folder: Path, make_optimizer: MakeOptimizer, save_every: int) -> None:
        self.store = ServerStore(folder)
        self.newest_record: dict[str, Any] | None = None
        """Of the newest outer step."""
        self._make_optimizer = make_optimizer
        self._save_every = save_every
        self._state: ServerState | None = None
        self._parts: Globals | None = None
        self._fragments: list[Specs] = []
        self._opened = time.monotonic()  # the round in progress
        self._recover()

    @property
    def has_begun(self) -> bool:
        return self._state is not None

    @property
    def state(self) -> ServerState:
        """Changed by :meth:`record` only."""
        if self._state is None:
            raise NotFound("this run has no parameters yet; register first")
        return self._state

    def begin(self, arrived: SpooledTensors, num_fragments: int = 1) -> None:
        """Take a worker's parameters as the first version, and save them. The run has not begun if this raises."""
        file, scratch = TensorFile(arrived.path, arrived.specs), Scratch()

        def fill(spec: TensorSpec, parameter: Tensor) -> None:
            flat = parameter.view(-1)
            for begin in range(0, spec.count, BLOCK):
                part = flat[begin : begin + BLOCK]
                part.copy_(file.block(spec.name, begin, len(part), scratch))

        self.begin_with(arrived.specs, num_fragments, fill)

    def begin_with(self, specs: Specs, num_fragments: int, fill: Callable[[TensorSpec, Tensor], object]) -> None:
        """As :meth:`begin`, with the parameters that ``fill`` writes, one after the other."""
        settings = Settings([spec.to_json() for spec in specs], num_fragments)
        parts = Globals.of(specs, self._make_optimizer)
        for spec in specs:
            fill(spec, parts.model.by_name[spec.name].data)
        state = ServerState(uuid.uuid4().hex, settings, describe(parts.optimizer))
        self.store.journal.clear()
        self.store.save(state, parts)
        self._take(state, parts)
        logger.info("DiLoCo run %s begins, with %d tensors", state.run_id, len(specs))

    def _recover(self) -> None:
        found = self.store.find()
        if found is None:
            self.store.release_submissions(except_for=())
            return
        checkpoint, state = found
        parts = Globals.of(state.settings.specs(), self._make_optimizer)
        if state.optimizer != (now := describe(parts.optimizer)):
            raise StateMismatch(
                f"{self.store.folder}: its outer optimizer is {state.optimizer}, now it is {now}; start the server as "
                "before, or with a new folder"
            )
        self._take(state, parts)
        self.store.load(checkpoint, parts)
        self.newest_record = self.store.newest_record()
        events = self.store.journal.recover(state.events)
        self.store.release_submissions(except_for=_submissions_after(state, events))
        self.store.versions.release_damaged()
        for event in events:
            self._carry_out(event)
        self.store.write_log()
        self.keep_versions()
        logger.info(
            "DiLoCo run %s continues at version %d: %s, and %d events after it",
            state.run_id,
            state.version,
            checkpoint.path.name,
            len(events),
        )

    def _take(self, state: ServerState, parts: Globals) -> None:
        self._state, self._parts, self._fragments = state, parts, state.settings.fragments()

    @property
    def _globals(self) -> Globals:
        assert self._parts is not None, "the run has begun"
        return self._parts

    def close(self, *, save: bool) -> None:
        """Save a checkpoint if ``save``, then close the log. The journal has what was acknowledged."""
        try:
            if save and self._state is not None:
                self._save_last(self._state)
        finally:
            self.store.close()

    def _save_last(self, state: ServerState) -> None:
        try:
            self.commit()
        except OSError as error:
            raise SaveFailed(
                f"no checkpoint of version {state.version}: the journal cannot be written: {error}"
            ) from error
        if not self.store.save(state, self._globals):
            return
        try:
            if self._shorten_journal(state):
                self.release_submissions()
        except OSError as error:  # the checkpoint needs neither
            logger.error(
                "version %d is saved, and what it contains is not removed from the journal: %s", state.version, error
            )

    # -- events -----------------------------------------------------------------------------------------------------

    def record(self, event: Event, make_durable: Callable[[], object] | None = None) -> None:
        """Carry out an event. Call :meth:`commit` before anything that depends on it leaves the server.

        It is recorded first, so that commits of other threads write it to disk during an outer step. If carrying it out
        raises, nothing is committed any more: another event would get its number.
        """
        self.store.journal.record(event, self.state.events + 1, make_durable)
        try:
            self._carry_out(event)
        except BaseException:
            self.store.journal.close()
            raise

    def accept(self, submission: Submission, arrived: SpooledTensors) -> None:
        """Give a submission's file its name, and record that it is accepted."""
        self.store.keep(arrived, submission)
        self.record(Accepted(submission), arrived.make_durable)

    def commit(self) -> None:
        """Write what was recorded to disk, on any thread."""
        self.store.journal.commit()

    def _carry_out(self, event: Event) -> None:
        state = self.state
        if isinstance(event, Applied):
            self._step(state, self._globals, event)
            return
        if isinstance(event, Accepted):
            state.bytes_received += sum(spec.size for spec in self.sent(event.submission))
        state.change(event)

    def _step(self, state: ServerState, parts: Globals, event: Applied) -> None:
        submissions, loss = state.pending(event.worker_ids), state.mean_loss(event.worker_ids)
        specs = self._fragments[submissions[0].fragment]
        weights = [each.samples for each in submissions]
        files = [self.store.tensors(each, specs) for each in submissions]

        def open_reader() -> ReadBlock:
            scratch = Scratch()
            return lambda number, spec, begin, count: files[number].block(spec.name, begin, count, scratch)

        outer_step(parts.model, parts.optimizer, specs, weights, open_reader)
        staleness = max(state.version - each.base for each in submissions)
        state.change(event)
        now = time.monotonic()
        record = {
            "timestamp": time.time(),
            "global_step": state.version,
            **({} if loss is None else {"loss": loss}),
            "workers": len(submissions),
            "samples": sum(weights),
            "staleness": staleness,
            "bytes": state.bytes_received,
            "round_runtime": now - self._opened,
        }
        self._opened = now
        self.newest_record = record
        self.store.unlogged.append(record)

    def state_to_save(self) -> ServerState | None:
        """A copy of the state, if a checkpoint of this version is due."""
        return copy.deepcopy(self.state) if self.state.version % self._save_every == 0 else None

    def save(self, state: ServerState) -> bool:
        """Save a checkpoint of the present parameters, and drop the events that it contains from the journal. They were
        committed. Meanwhile, other threads may record events, but no outer step.

        Returns whether both are done, so that :meth:`release_submissions` may follow. A failure is logged: the journal
        has everything, unless the disk may lose it (NotDurable).
        """
        try:
            return self.store.save(state, self._globals) and self._shorten_journal(state)
        except SaveFailed as error:
            logger.error("version %d is not saved: %s; the journal has it", state.version, error)
            return False

    def _shorten_journal(self, state: ServerState) -> bool:
        try:
            self.store.journal.shorten(state.events)
        except NotDurable:
            raise
        except OSError as error:
            logger.error("the journal is not shortened: %s; it will be after the next checkpoint", error)
            return False
        return True

    def release_submissions(self) -> None:
        """Release the submissions that are applied. The newest checkpoint has the present version."""
        self.store.release_submissions(except_for=_submissions_after(self.state, ()))

    # -- versions ---------------------------------------------------------------------------------------------------

    def specs(self, fragment: int | None) -> Specs:
        """Of a fragment; None: of the whole model."""
        return self.state.settings.specs() if fragment is None else self._fragments[fragment]

    def sent(self, submission: Submission) -> Specs:
        """Of the frame of a submission."""
        return submission.sent(self._fragments[submission.fragment])

    def has(self, result: Result | None) -> bool:
        """Whether the parameters of a result can be fetched, now or later: :meth:`keep_versions` makes the present
        ones."""
        if result is None or result.version >= self.state.version:
            return result is not None
        return self.store.versions.has(Version(result.version, result.fragment))

    def begin_versions(self) -> list[Version]:
        """Announce the present parameters that workers will fetch; from now on they can be. The caller writes them, and
        at the end, also after a failure, calls :meth:`.Versions.abandon`."""
        state, versions = self.state, self.store.versions
        present = {each for each in self._needed_versions(state.members) if each.number == state.version}
        missing = sorted((each for each in present if not versions.has(each)), key=lambda each: each.file_name)
        versions.begin({each: self.specs(each.fragment) for each in missing}, self._globals.model)
        return missing

    def write_versions(self, begun: Iterable[Version]) -> None:
        """Write the present parameters. Meanwhile, other threads may record events, but no outer step."""
        for each in begun:
            self.store.versions.write(each)

    def release_versions(self, worker_ids: Iterable[str]) -> None:
        """Release versions that none of these workers needs."""
        self.store.versions.release(except_for=self._needed_versions(worker_ids))

    def keep_versions(self) -> None:
        """Write the present parameters for workers that will fetch them."""
        begun = self.begin_versions()
        try:
            self.write_versions(begun)
        finally:
            self.store.versions.abandon(begun)

    def _needed_versions(self, worker_ids: Iterable[str]) -> set[Version]:
        results = [each for name in worker_ids for each in self.state.members[name].results.values()]
        return {Version(each.version, each.fragment) for each in results}


def _submissions_after(state: ServerState, events: Iterable[Event]) -> set[str]:
    """Names of the files that the events after ``state`` need."""
    accepted = [event.submission for event in events if isinstance(event, Accepted)]
    return {each.file_name for each in (*state.pending(state.members), *accepted)}
