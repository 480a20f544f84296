"""OuterRun: a DiLoCo run, its global parameters and the events that change them, in memory and on disk.

::

    FOLDER/
      checkpoints/step-00000012/           global parameters, outer optimizer, state; the step is the version
      logs/train.jsonl                     a record of each outer step
      diloco/journal.jsonl                 events after the newest checkpoint, and before it a few
      diloco/submissions/w0-00000012.safetensors
      diloco/versions/00000012-all.frame   parameters as workers fetch them: all,
      diloco/versions/00000012-3.frame     or those of a fragment

An event changes the parameters at once, and is in the journal before anything that depends on it leaves the server. So
after a kill, the newest checkpoint and the events after it lead to the same parameters, bit by bit. An outer step waits
neither for the disk nor for the journal: the submissions reach the disk meanwhile.

Once a checkpoint contains a submission, and once no worker may ask for a version again, its file is overwritten by the
next one: see :mod:`.files`.
"""

from __future__ import annotations

import copy
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dalsegno.checkpoint import CheckpointManager, ModelState, OptimizerState, saved_states
from dalsegno.checkpoint.index import Index
from dalsegno.checkpoint.listing import newest_verified
from dalsegno.checkpoint.names import MODEL
from dalsegno.checkpoint.tensor_reader import ChunkReader
from dalsegno.checkpoint.weights import Weights, naming_hint, weights_are_at
from dalsegno.diloco.server.rounds import Accepted, Applied, Event, ServerState
from dalsegno.diloco.wire.messages import FrameReader, Result, Settings, Submission
from dalsegno.diloco.wire.signature import Specs, TensorSpec
from dalsegno.errors import NotFound, SaveFailed, StateMismatch
from dalsegno.logs import RecordLog, read_records
from dalsegno.policies.retention import Latest
from dalsegno.stateful import schema
from dalsegno.stateful.component import Component
from dalsegno.system import filesystem
from dalsegno.system.durability import NotDurable

from .files import Scratch, SpareFiles, SpooledTensors, TensorFile, Version, Versions, spooled
from .journal import Journal
from .outer import BLOCK, GlobalModel, MakeOptimizer, ReadBlock, describe, outer_step

logger = logging.getLogger("dalsegno")

_STATE, _LOG = "diloco", "log"  # keys of components


class OuterRun:
    """The run in ``folder``; a new one has no parameters until :meth:`begin`. A checkpoint is due every ``save_every``
    outer steps. Used by one thread at a time, except :meth:`commit` and :meth:`spooled`, except :meth:`write_versions`
    and :meth:`save` while other threads record events, and except what :attr:`versions` allows."""

    _model: GlobalModel
    _optimizer: Optimizer

    def __init__(self, folder: Path, make_optimizer: MakeOptimizer, save_every: int) -> None:
        self._folder, self._submissions, versions = folder, folder / "diloco/submissions", folder / "diloco/versions"
        for each in (self._submissions, versions):
            filesystem.make_directory(each)
        self.versions = Versions(versions)
        self.newest_record: dict[str, Any] | None = None
        """Of the newest outer step."""
        self._journal = Journal(folder / "diloco/journal.jsonl")
        self._manager = CheckpointManager(folder, keep=Latest(2))
        self._log = RecordLog("logs/train.jsonl", folder)
        self._unlogged: deque[dict[str, Any]] = deque()  # records that write_log appends to the log
        self._spare = SpareFiles(self._submissions)
        self._make_optimizer = make_optimizer
        self._save_every = save_every
        self._state: ServerState | None = None
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
        self._build(specs)
        for spec in specs:
            fill(spec, self._model.by_name[spec.name].data)
        state = ServerState(uuid.uuid4().hex, settings, describe(self._optimizer))
        self._journal.clear()
        self._write_checkpoint(state)
        self._take(state)
        logger.info("DiLoCo run %s begins, with %d tensors", state.run_id, len(specs))

    def _build(self, specs: Specs) -> None:
        self._model = GlobalModel(specs)
        self._optimizer = self._make_optimizer(self._model.by_name.values())

    def _take(self, state: ServerState) -> None:
        self._state, self._fragments = state, state.settings.fragments()

    def _recover(self) -> None:
        """Continue from the newest checkpoint that verifies, and the events after it."""
        self._manager.remove_partial()
        self._delete_spare_files()
        checkpoint = self._manager.find()
        if checkpoint is None:
            self._log.open()
            self._release_submissions(except_for=())
            return
        states = saved_states(checkpoint)
        if _STATE not in states:
            raise StateMismatch(f"{checkpoint.path}: not a checkpoint of a DiLoCo server; use another folder")
        state = schema.check(states[_STATE][0], ServerState, "the state of a DiLoCo server")
        self._build(state.settings.specs())
        if state.optimizer != (now := describe(self._optimizer)):
            raise StateMismatch(
                f"{self._folder}: its outer optimizer is {state.optimizer}, now it is {now}; start the server as "
                "before, or with a new folder"
            )
        self._take(state)
        self._manager.load(checkpoint, self._sharded(), [Component(key, _Saved(None)) for key in (_STATE, _LOG)])
        self._log.open(states[_LOG][0])
        for record in read_records(self._log.path):
            if "kind" not in record:
                self.newest_record = record
        events = self._journal.recover(state.events)
        self._release_submissions(except_for=_submissions_after(state, events))
        self.versions.release_damaged()
        for event in events:
            self._carry_out(event)
        self.write_log()
        self.keep_versions()
        logger.info(
            "DiLoCo run %s continues at version %d: %s, and %d events after it",
            state.run_id,
            state.version,
            checkpoint.path.name,
            len(events),
        )

    def close(self, *, save: bool) -> None:
        """Save a checkpoint if ``save``, then close the journal and the log, and delete the files that nothing refers
        to. The journal has what was acknowledged."""
        try:
            if save and self._state is not None:
                self._save_last(self._state)
        finally:
            self._journal.close()
            self._log.close()
            self._delete_spare_files()

    def _save_last(self, state: ServerState) -> None:
        try:
            self.commit()
        except OSError as error:
            raise SaveFailed(
                f"no checkpoint of version {state.version}: the journal cannot be written: {error}"
            ) from error
        if not self._write_checkpoint(state):
            return
        try:
            if self._shorten_journal(state):
                self.release_submissions()
        except OSError as error:  # the checkpoint needs neither
            logger.error(
                "version %d is saved, and what it contains is not removed from the journal: %s", state.version, error
            )

    def _delete_spare_files(self) -> None:
        self._spare.delete_all()
        self.versions.spare.delete_all()

    # -- events -----------------------------------------------------------------------------------------------------

    def record(self, event: Event, make_durable: Callable[[], object] | None = None) -> None:
        """Carry out an event. Call :meth:`commit` before anything that depends on it leaves the server.

        It is recorded first, so that commits of other threads write it to disk during an outer step. If carrying it out
        raises, nothing is committed any more: another event would get its number.
        """
        self._journal.record(event, self.state.events + 1, make_durable)
        try:
            self._carry_out(event)
        except BaseException:
            self._journal.close()
            raise

    def spooled(self, specs: Specs, frame: FrameReader) -> AbstractContextManager[SpooledTensors]:
        return spooled(self._spare, specs, frame)

    def accept(self, submission: Submission, arrived: SpooledTensors) -> None:
        """Give a submission's file its name, and record that it is accepted."""
        arrived.keep(self._submissions / submission.file_name)
        self.record(Accepted(submission), arrived.make_durable)

    def commit(self) -> None:
        """Write what was recorded to disk, on any thread."""
        self._journal.commit()

    def _carry_out(self, event: Event) -> None:
        state = self.state
        if isinstance(event, Applied):
            self._step(state, event)
            return
        if isinstance(event, Accepted):
            state.bytes_received += sum(spec.size for spec in self.sent(event.submission))
        state.change(event)

    def _step(self, state: ServerState, event: Applied) -> None:
        submissions, loss = state.pending(event.worker_ids), state.mean_loss(event.worker_ids)
        specs = self._fragments[submissions[0].fragment]
        weights = [each.samples for each in submissions]
        files = [self.tensors(each) for each in submissions]

        def open_reader() -> ReadBlock:
            scratch = Scratch()
            return lambda number, spec, begin, count: files[number].block(spec.name, begin, count, scratch)

        outer_step(self._model, self._optimizer, specs, weights, open_reader)
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
        self._unlogged.append(record)

    def sent(self, submission: Submission) -> Specs:
        """Of the frame of a submission."""
        return submission.sent(self._fragments[submission.fragment])

    def tensors(self, submission: Submission) -> TensorFile:
        return TensorFile(self._submissions / submission.file_name, self.sent(submission))

    # -- records, checkpoints ---------------------------------------------------------------------------------------

    def write_log(self) -> None:
        """Append the records to the log. Raises OSError if the disk refuses one; the next call tries again."""
        while self._unlogged:
            self._log.append(self._unlogged[0])
            self._unlogged.popleft()

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
            return self._write_checkpoint(state) and self._shorten_journal(state)
        except SaveFailed as error:
            logger.error("version %d is not saved: %s; the journal has it", state.version, error)
            return False

    def _write_checkpoint(self, state: ServerState) -> bool:
        """Save a checkpoint, unless there is one of this version. Returns whether it was saved."""
        if self._manager.path_of(state.version).exists():
            return False
        try:
            self.write_log()  # the checkpoint has its length
        except OSError as error:
            raise SaveFailed(f"no checkpoint of version {state.version}: its log cannot be written: {error}") from error
        components = [
            Component(_STATE, _Saved(asdict(state))),
            Component(_LOG, _Saved(self._log.state(), self._log.make_durable)),
        ]
        self._manager.save(state.version, self._sharded(), components)
        return True

    def _sharded(self) -> list[ModelState | OptimizerState]:
        return [ModelState(self._model), OptimizerState(self._model, self._optimizer)]

    def _shorten_journal(self, state: ServerState) -> bool:
        try:
            self._journal.shorten(state.events)
        except NotDurable:
            raise
        except OSError as error:
            logger.error("the journal is not shortened: %s; it will be after the next checkpoint", error)
            return False
        return True

    def release_submissions(self) -> None:
        """Release the submissions that are applied. The newest checkpoint has the present version."""
        self._release_submissions(except_for=_submissions_after(self.state, ()))

    def _release_submissions(self, *, except_for: Collection[str]) -> None:
        """Allow the files of submissions that no event needs any more to be overwritten."""
        self._spare.release(lambda path: path.name in except_for)

    # -- versions ---------------------------------------------------------------------------------------------------

    def specs(self, fragment: int | None) -> Specs:
        """Of a fragment; None: of the whole model."""
        return self.state.settings.specs() if fragment is None else self._fragments[fragment]

    def has(self, result: Result | None) -> bool:
        """Whether the parameters of a result can be fetched, now or later: :meth:`keep_versions` makes the present
        ones."""
        if result is None or result.version >= self.state.version:
            return result is not None
        return self.versions.has(Version(result.version, result.fragment))

    def begin_versions(self) -> list[Version]:
        """Announce the present parameters that workers will fetch; from now on they can be. The caller writes them, and
        at the end, also after a failure, calls :meth:`.Versions.abandon`."""
        state, versions = self.state, self.versions
        present = {each for each in self._needed_versions(state.members) if each.number == state.version}
        missing = sorted((each for each in present if not versions.has(each)), key=lambda each: each.file_name)
        versions.begin({each: self.specs(each.fragment) for each in missing}, self._model)
        return missing

    def write_versions(self, begun: Iterable[Version]) -> None:
        """Write the present parameters. Meanwhile, other threads may record events, but no outer step."""
        for each in begun:
            self.versions.write(each)

    def release_versions(self, worker_ids: Iterable[str]) -> None:
        """Release versions that none of these workers needs."""
        self.versions.release(except_for=self._needed_versions(worker_ids))

    def keep_versions(self) -> None:
        """Write the present parameters for workers that will fetch them."""
        begun = self.begin_versions()
        try:
            self.write_versions(begun)
        finally:
            self.versions.abandon(begun)

    def _needed_versions(self, worker_ids: Iterable[str]) -> set[Version]:
        results = [each for name in worker_ids for each in self.state.members[name].results.values()]
        return {Version(each.version, each.fragment) for each in results}


def _submissions_after(state: ServerState, events: Iterable[Event]) -> set[str]:
    """Names of the files that the events after ``state`` need."""
    accepted = [event.submission for event in events if isinstance(event, Accepted)]
    return {each.file_name for each in (*state.pending(state.members), *accepted)}


class InitialWeights:
    """Weights at ``path``, with which a run may begin: a checkpoint, the newest one of a run, or safetensors of another
    program."""

    def __init__(self, path: Path) -> None:
        files = Weights.open(path) if weights_are_at(path) else newest_verified(path)
        index = files.index if isinstance(files, Weights) else Index.of_checkpoint(files)
        self._reader, self._stored = ChunkReader(files), index.of(MODEL)
        self._who = f"{path}, with which the server begins"

    def fill(self, spec: TensorSpec, parameter: torch.Tensor) -> None:
        """Read a parameter, cast if it is stored in another dtype."""
        stored = self._stored.get(spec.name)
        if stored is None:
            hint = naming_hint(self._stored, [spec.name]) or "start the server with weights of the workers' model"
            raise StateMismatch(f"{self._who}, has no {spec.name}; {hint}")
        if tuple(stored.shape) != spec.shape:
            shapes = f"{list(stored.shape)}, in the worker {list(spec.shape)}"
            raise StateMismatch(f"{self._who}: {spec.name} has the shape {shapes}")
        parameter.copy_(self._reader.full_tensor(stored))
        if not parameter.isfinite().all():
            raise StateMismatch(f"{self._who}: {spec.name} contains NaN or infinity")


@dataclass(frozen=True, slots=True)
class _Saved:
    """A state that is read before there is an object to load it into."""

    state: Any
    make_durable: Callable[[], object] | None = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None: ...
