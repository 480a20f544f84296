"""OuterRun: the global parameters of a DiLoCo run, and the events that change them.

An event is in the journal before it takes effect. So after a kill, the newest checkpoint and the events after it lead
to the same parameters, bit by bit.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from pathlib import Path
from typing import Any

import torch

from dalsegno.errors import NotFound, SaveFailed, StateMismatch

from .outer import BLOCK, MakeOptimizer, describe, outer_step, without_kernels
from .signature import Specs, TensorSpec
from .spool import SpooledTensors
from .state import Accepted, Applied, Event, Result, ServerState, Settings, Submission
from .store import Globals, ServerStore, TensorFile

logger = logging.getLogger("dalsegno")

MOST_RECORDS = 2000
"""Records of outer steps that the live page shows."""


class OuterRun:
    """The run in ``folder``: continued, or empty until :meth:`begin`. Used by one thread at a time.

    Args:
        folder: of the run.
        make_optimizer: makes the outer optimizer.
        save_every: outer steps between two checkpoints.

    Raises:
        StateMismatch: if the folder is another kind of run's, or was trained by another optimizer.
        DamagedCheckpoint: if none of its checkpoints verifies.
    """

    def __init__(self, folder: Path, make_optimizer: MakeOptimizer, save_every: int) -> None:
        self.store = ServerStore(folder)
        self.records: deque[dict[str, Any]] = deque(maxlen=MOST_RECORDS)
        """The newest ones of the log."""
        self._make_optimizer = make_optimizer
        self._save_every = save_every
        self._state: ServerState | None = None
        self._parts: Globals | None = None
        self._fragments: list[Specs] = []
        self._opened = time.monotonic()  # the round in progress
        self._recover()

    @property
    def has_begun(self) -> bool:
        """Whether it has parameters."""
        return self._state is not None

    @property
    def state(self) -> ServerState:
        """Changed by :meth:`record` only.

        Raises:
            NotFound: if no worker has sent its parameters yet.
        """
        if self._state is None:
            raise NotFound("this run has no parameters yet; register first")
        return self._state

    def begin(self, arrived: SpooledTensors, num_fragments: int = 1) -> None:
        """Take a worker's parameters as the first version, and save them.

        Raises:
            ConfigurationError: if a parameter has an impossible name.
            SaveFailed: if they cannot be saved; the run has not begun.
        """
        specs = arrived.specs
        settings = Settings([spec.to_json() for spec in specs], num_fragments)
        parts = Globals.of(specs, self._make_optimizer)
        file = TensorFile(arrived.path, specs)
        for spec in specs:
            flat = parts.model.by_name[spec.name].data.view(-1)
            for begin in range(0, spec.count, BLOCK):
                part = flat[begin : begin + BLOCK]
                part.copy_(file.block(spec.name, begin, len(part)))
        state = ServerState(uuid.uuid4().hex, settings, describe(parts.optimizer))
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
        before, now = without_kernels(state.optimizer), describe(parts.optimizer)
        if before != now:
            raise StateMismatch(
                f"{self.store.folder}: its outer optimizer is {before}, now it is {now}; start the server as before, "
                "or with a new folder"
            )
        self._take(state, parts)
        self.store.load(checkpoint, parts)
        self.records.extend(self.store.records())
        events = list(self.store.events(after=state.events))
        accepted = [event.submission for event in events if isinstance(event, Accepted)]
        needed = [*state.pending(state.members), *accepted]
        self.store.release_submissions(except_for={each.file_name for each in needed})
        self.store.release_damaged_versions()
        for event in events:
            self._carry_out(event)
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
        """Close the log, and save a checkpoint before.

        Raises:
            SaveFailed: if it cannot be written; the journal has everything.
        """
        try:
            if save and self._state is not None:
                self.store.save(self._state, self._globals)
        finally:
            self.store.close()

    # -- events -----------------------------------------------------------------------------------------------------

    def record(self, event: Event) -> None:
        """Write an event to the journal, then carry it out."""
        self.store.record(event, self.state.events + 1)
        self._carry_out(event)

    def _carry_out(self, event: Event) -> None:
        state = self.state
        if isinstance(event, Applied):
            self._step(state, self._globals, event)
        elif isinstance(event, Accepted):
            submission = event.submission
            sent = self.sent(submission)
            state.bytes_received += sum(spec.size for spec in sent)
            state.change(event)
        else:
            state.change(event)

    def _step(self, state: ServerState, parts: Globals, event: Applied) -> None:
        """The outer step of an event, and its record in the log."""
        submissions, loss = state.pending(event.worker_ids), state.mean_loss(event.worker_ids)
        specs = self._fragments[submissions[0].fragment]
        files = [self.store.tensors(each, specs) for each in submissions]
        weights = [each.samples for each in submissions]

        def read(number: int, spec: TensorSpec, begin: int, count: int) -> torch.Tensor:
            return files[number].block(spec.name, begin, count)

        outer_step(parts.model, parts.optimizer, specs, weights, read)
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
        self.records.append(record)
        self.store.log(record)

    def save_if_due(self) -> None:
        """Save a checkpoint every ``save_every`` outer steps. A failure is logged: the journal has everything."""
        if self.state.version % self._save_every == 0:
            try:
                self.store.save(self.state, self._globals)
            except SaveFailed as error:
                logger.error("version %d is not saved: %s; the journal has it", self.state.version, error)

    # -- versions ---------------------------------------------------------------------------------------------------

    def specs(self, fragment: int | None) -> Specs:
        """What a fragment has; None: the whole model."""
        return self.state.settings.specs() if fragment is None else self._fragments[fragment]

    def sent(self, submission: Submission) -> Specs:
        """What the frame of a submission has."""
        return submission.sent(self._fragments[submission.fragment])

    def parameters(self, version: int, fragment: int | None) -> Path:
        """The file of a version.

        Raises:
            NotFound: if it is not kept.
        """
        if not self._is_kept(version, fragment):
            raise NotFound(f"version {version} of the parameters is not kept; register again")
        return self.store.version_path(version, fragment)

    def has(self, result: Result | None) -> bool:
        """Whether the parameters of a result can be fetched, now or later."""
        if result is None or result.version > self.state.version:
            return result is not None
        return self._is_kept(result.version, result.fragment)

    def _is_kept(self, version: int, fragment: int | None) -> bool:
        return self.store.version_path(version, fragment).exists()

    def keep_versions(self) -> None:
        """Write the present parameters for workers that will fetch them; release versions that no worker needs."""
        state = self.state
        results = [each for member in state.members.values() for each in member.results.values()]
        for fragment in {each.fragment for each in results if each.version == state.version}:
            if not self._is_kept(state.version, fragment):
                self.store.write_version(state.version, fragment, self.specs(fragment), self._globals.model)
        self.store.release_versions(
            except_for={self.store.version_path(each.version, each.fragment) for each in results}
        )
