"""Coordinator: decides which workers are in a DiLoCo run, and when their submissions are applied. No network here.

A thread applies submissions, so that a worker's request does not wait for an outer step; requests and that thread take
turns by one lock. Without the lock, it waits for the disk, and writes parameters and checkpoints: nothing else changes
what these contain.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from io import FileIO
from time import monotonic
from typing import Any

from dalsegno.diloco.server.rounds import Applied, Joined, Left, Member, Returned, ServerState
from dalsegno.diloco.wire.messages import FrameReader, Settings, Submission
from dalsegno.diloco.wire.signature import Specs, check_same
from dalsegno.errors import DalsegnoError, NotFound, NotRunning, StateMismatch
from dalsegno.system.durability import NotDurable

from .files import Growth, SpooledTensors, Version
from .rounds import Rounds, Rules
from .run import InitialWeights, OuterRun

logger = logging.getLogger("dalsegno")

_PAUSE = 0.5  # seconds between two attempts
_REPORT_EVERY = 60.0  # seconds
_FINAL = {errno.ENOENT, errno.EROFS}
"""The folder is gone, or the disk is read-only, as Linux makes it after an error: neither passes by itself."""

_PATROL = 0.5  # seconds between two looks for workers that have died


class Closing(Exception):
    """The server closes while the disk refuses a write."""


class Patience:
    """Waits for a disk that is full, or has another trouble that may pass. Used by one thread."""

    def __init__(self) -> None:
        self.obstacle: str | None = None
        """Why the disk refuses what workers wait for, if it does."""
        self.closing = threading.Event()
        """Set on any thread: wait no longer."""

    def insist(self, write: Callable[[], object]) -> None:
        """Call ``write`` until it raises no OSError that may pass. Raises Closing if :attr:`closing` is set before."""
        report_at = -math.inf
        while True:
            try:
                write()
                break
            except (DalsegnoError, NotDurable):
                raise
            except OSError as error:
                if error.errno in _FINAL:
                    raise
                self.obstacle = str(error)
            if (now := monotonic()) >= report_at:
                report_at = now + _REPORT_EVERY
                logger.error(
                    "the DiLoCo server cannot write: %s; workers wait until it can. Make room, or restore the folder's "
                    "permissions; if the disk is broken, stop the server, and start it with a copy of the folder",
                    self.obstacle,
                )
            if self.closing.wait(_PAUSE):
                raise Closing
        if self.obstacle is not None:
            logger.warning("the DiLoCo server can write again")
            self.obstacle = None


class Coordinator:
    """Lets workers join, takes their submissions, and applies them by the rules.

    Args:
        run: the run, which this closes.
        changed: called on any thread when a result may have become available.
    """

    def __init__(
        self,
        run: OuterRun,
        rules: Rules,
        changed: Callable[[], object] = lambda: None,
        weights: InitialWeights | None = None,
    ) -> None:
        self.rules = rules
        self.failure: BaseException | None = None
        """Why no submission is applied any more."""
        self._run = run
        self._changed = changed
        self._weights = weights
        self._lock = threading.Condition(threading.RLock())
        self.rounds = Rounds(rules)
        self._is_closing = False
        self._patience = Patience()
        self._committed = run.state.version if run.has_begun else 0  # newest version whose events are on disk
        for worker_id in run.state.members if run.has_begun else ():
            self.rounds.note_seen(worker_id)
        self._thread = threading.Thread(target=self._apply_submissions, name="dalsegno-diloco-outer", daemon=True)
        self._thread.start()

    # -- start and end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop applying, and save a checkpoint. Requests must have ended."""
        with self._lock:
            self._is_closing = True
            self._patience.closing.set()
            self._lock.notify_all()
        self._thread.join()
        self._run.close(save=self.failure is None)

    # -- members ----------------------------------------------------------------------------------------------------

    def register(
        self, worker_id: str, settings: Settings, *, count: int | None, run_id: str | None, dylu: bool
    ) -> dict[str, Any]:
        """A worker joins, or comes back.

        Args:
            settings: its model, and number of fragments.
            count: number of its newest submission whose result it has, if it resumes from a checkpoint; None: it has no
                parameters yet.
            run_id: of the run that its checkpoint is of.
            dylu: whether its number of local steps is to follow its speed.

        Returns:
            As JSON values: ``needs_parameters`` if the run has none, so that the worker sends its own and registers
            again. Otherwise ``run_id`` and ``asynchronous``; ``adopt``, the number of the result with which the worker
            begins, or None if it continues with the parameters of its checkpoint; ``known``, the number of its newest
            submission here.
        """
        specs = settings.specs()
        with self._lock:
            self._check_running()
            if not self._run.has_begun:
                settings.fragments()
                if run_id is not None:
                    raise StateMismatch(f"the worker's checkpoint is of DiLoCo run {run_id}, this server has none yet")
                if self._weights is None:
                    return {"needs_parameters": True}
                with self._failing():
                    self._run.begin_with(specs, settings.num_fragments, self._weights.fill)
            state = self._run.state
            check_same(state.settings.specs(), specs)
            if settings.num_fragments != state.settings.num_fragments:
                raise StateMismatch(
                    f"num_fragments={settings.num_fragments}; this run has {state.settings.num_fragments}"
                )
            if run_id not in (None, state.run_id):
                raise StateMismatch(
                    f"the worker's checkpoint is of DiLoCo run {run_id}, this server's is {state.run_id}; give the "
                    "worker another output_dir, or the server the folder of that run"
                )
            if dylu and not self.rules.dylu:
                raise StateMismatch("the worker has dylu=True, and the server was started without --dylu")
            self.rounds.note_seen(worker_id)
            adopt = self._admit(state, worker_id, count, dylu)
            self._run.keep_versions()
            self._lock.notify_all()
            answer = {
                "needs_parameters": False,
                "run_id": state.run_id,
                "asynchronous": self.rules.asynchronous,
                "adopt": adopt,
                "known": state.members[worker_id].number,
            }
        self._commit()
        return answer

    def _admit(self, state: ServerState, worker_id: str, count: int | None, dylu: bool) -> int | None:
        """The result with which the worker begins; None if it continues with its own parameters."""
        member = state.members.get(worker_id)
        if member is None:
            self._join(state, worker_id, count or 0, dylu)
            return count or 0
        if count is not None and count > member.number:
            raise StateMismatch(
                f"{worker_id} has the results of {count} submissions, this server knows {member.number}: its folder "
                "was taken back to an older state; restore the folder, or start server and workers from scratch"
            )
        begin = min(member.results) if count is None else count
        if self._can_repeat(state, member, begin, has_parameters=count is not None):
            if member.has_left or member.dylu != dylu:
                self._run.record(Returned(worker_id, dylu))
            return begin if count is None else None
        self._join(state, worker_id, member.number, dylu)
        return member.number

    def _can_repeat(self, state: ServerState, member: Member, begin: int, *, has_parameters: bool) -> bool:
        """Whether a worker that has the result ``begin`` gets to the present by those after it, which it had before it
        was killed; and its next submission is not too late."""
        last = member.number if member.pending is None else member.number - 1
        if not has_parameters and member.results[begin].fragment is not None:
            return False
        if not all(self._run.has(member.results.get(each)) for each in range(begin + has_parameters, last + 1)):
            return False
        return self.rules.asynchronous or member.pending is not None or member.base >= state.version

    def _join(self, state: ServerState, worker_id: str, number: int, dylu: bool) -> None:
        """Let a worker begin with the present parameters; with those of the next version if a round is in progress."""
        is_in_round = self.rounds.is_in_progress(state, worker_id)
        self._run.record(Joined(worker_id, number, state.version + is_in_round, dylu))

    def deregister(self, worker_id: str) -> None:
        """A worker ends. What it has submitted counts."""
        with self._lock:
            self._check_running()
            if not self._member(worker_id).has_left:
                self._run.record(Left(worker_id))
            self._lock.notify_all()
        self._commit()

    def _member(self, worker_id: str) -> Member:
        members = self._run.state.members
        if worker_id not in members:
            raise NotFound(f"{worker_id} has not joined this run; register first")
        return members[worker_id]

    # -- parameters -------------------------------------------------------------------------------------------------

    def spooled(self, specs: Specs, frame: FrameReader) -> AbstractContextManager[SpooledTensors]:
        return self._run.spooled(specs, frame)

    def initialize(self, arrived: SpooledTensors, num_fragments: int = 1) -> None:
        """Take a worker's parameters as the first version."""
        with self._lock:
            self._check_running()
            if self._run.has_begun:
                raise StateMismatch("this run has parameters already; register again")
            with self._failing():
                self._run.begin(arrived, num_fragments)

    def parameters(self, version: int, fragment: int | None) -> tuple[FileIO, Growth]:
        """Open the file of a version, a frame, for the caller to close; it may grow. Takes no lock."""
        return self._run.versions.open(Version(version, fragment))

    # -- submissions ------------------------------------------------------------------------------------------------

    def offer(self, submission: Submission) -> Specs | None:
        """What the frame of a submission must have; None if it has been accepted before. Raises StateMismatch if it is
        not the worker's next one, or of an old round: the worker registers again."""
        with self._lock:
            if self._is_new(submission):
                return self._run.sent(submission)
        self._commit()
        return None

    def _is_new(self, submission: Submission) -> bool:
        member = self._member(submission.worker_id)
        self.rounds.note_seen(submission.worker_id)
        if submission.number <= member.number:
            return False
        self.rounds.check_next(self._run.state, submission)
        return True

    def accept(self, submission: Submission, arrived: SpooledTensors) -> None:
        """Accept a submission. Once this returns it is never lost. NotDurable: the disk has lost it, and the server has
        failed; restarted, it takes the submission again."""
        with self._lock:
            self._check_running()
            is_new = self._is_new(submission)  # again: things may have changed while it was sent
            if is_new:
                self._run.accept(submission, arrived)
                self._lock.notify_all()
        self._commit(arrived if is_new else None)

    def result(self, worker_id: str, number: int) -> dict[str, Any] | None:
        """What became of a submission, or of joining, as JSON values; None if it is not known yet."""
        with self._lock:
            self._check_running()
            member = self._member(worker_id)
            self.rounds.note_seen(worker_id)
            result = member.results.get(number)
            if member.pending is not None and number == member.number:
                return None
            if result is None:
                raise NotFound(f"{worker_id}, submission {number}: its result is not here; register again")
            return dataclasses.asdict(result) if result.version <= self._committed else None

    # -- the outer step ---------------------------------------------------------------------------------------------

    def _apply_submissions(self) -> None:
        begun: list[Version] = []
        try:
            while (change := self._next_change()) is not None:
                begun, to_save = change
                self._publish(begun)
                if to_save is not None and self._run.save(to_save):
                    self._insist_locked(self._run.release_submissions)
        except Closing:
            pass  # the journal has what was acknowledged
        except BaseException as error:
            self._fail(error)
        finally:
            self._run.versions.abandon(begun)  # not before it has failed: a worker must not register again

    def _next_change(self) -> tuple[list[Version], ServerState | None] | None:
        """Wait until submissions are to be applied, or workers to begin, and do it. Returns the versions to publish,
        and the state of a checkpoint that is due; None at the end."""
        with self._lock:
            while not self._is_closing and self.failure is None:
                if self._run.has_begun:
                    state = self._run.state
                    if worker_ids := self.rounds.ready(state):
                        self._run.record(Applied(worker_ids, self.rounds.recommended_steps(state, worker_ids)))
                        to_save = self._run.state_to_save()  # first: it may find no memory
                        return self._run.begin_versions(), to_save
                    if self._begin_waiting_members():
                        return self._run.begin_versions(), None
                self._lock.wait(_PATROL if self.rules.heartbeat_timeout else None)
            return None

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
            self._lock.notify_all()
        logger.error("the DiLoCo server cannot apply submissions any more; what was accepted is kept", exc_info=error)
        self._changed()

    def _commit(self, arrived: SpooledTensors | None = None) -> None:
        """Write a submission to disk, then what was recorded. Called without the lock, so that the disk works for the
        threads of all workers at once."""
        with self._failing():
            if arrived is not None:
                arrived.make_durable()
            self._run.commit()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Make the server fail if the disk has lost what is written inside: a restarted server does not have it."""
        try:
            yield
        except NotDurable as error:
            self._fail(error)
            raise

    def _check_running(self) -> None:
        if self._is_closing:
            raise NotRunning("the server is stopping; start it again, and it continues")
        if self.failure is not None:
            raise NotRunning(f"the server failed: {self.failure}; restart it, and it continues from its journal")

    def _begin_waiting_members(self) -> bool:
        """Let workers that wait for the next round begin now, if the present one has lost all its workers. Returns
        whether there are any."""
        state = self._run.state
        waiting = self.rounds.waiting(state)
        if waiting:
            self._committed = state.version - 1  # they get no result before the events are on disk
        for name in waiting:
            member = state.members[name]
            self._run.record(Joined(name, member.number, state.version, member.dylu))
        return bool(waiting)

    def _publish(self, begun: Sequence[Version]) -> None:
        """Allow workers to fetch what a change led to, once the change is on disk. They may begin while the versions
        are written."""
        self._patience.insist(self._commit)
        self._committed = self._run.state.version
        self._changed()
        self._patience.insist(partial(self._run.write_versions, begun))
        self._patience.insist(self._run.write_log)
        self._insist_locked(lambda: self._run.release_versions(self.rounds.may_repeat(self._run.state)))

    def _insist_locked(self, write: Callable[[], object]) -> None:
        def locked() -> None:
            with self._lock:
                write()

        self._patience.insist(locked)

    # -- status -----------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The run, for people: JSON values."""
        with self._lock:
            state = self._run.state if self._run.has_begun else None
            members = {} if state is None else state.members
            return {
                "run_id": None if state is None else state.run_id,
                "mode": "asynchronous" if self.rules.asynchronous else "synchronous",
                "version": None if state is None else state.version,
                "num_fragments": None if state is None else state.settings.num_fragments,
                "num_workers": self.rules.num_workers,
                "min_workers": self.rules.min_workers,
                "parameters": 0 if state is None else sum(math.prod(each["shape"]) for each in state.settings.tensors),
                "bytes_received": 0 if state is None else state.bytes_received,
                "failure": None if self.failure is None else str(self.failure),
                "obstacle": self._patience.obstacle,
                "newest": self._run.newest_record,
                "workers": [
                    {
                        "worker_id": name,
                        "state": _state_of(each, is_alive=self.rounds.is_alive(name)),
                        "submissions": each.number,
                        "base": each.base,
                        "staleness": max(0, (state.version if state else 0) - each.base),
                        "steps_per_second": each.speed,
                        "seen_seconds_ago": self.rounds.seconds_ago(name),
                    }
                    for name, each in sorted(members.items())
                ],
            }


def _state_of(member: Member, *, is_alive: bool) -> str:
    if member.has_left:
        return "left"
    if not is_alive:
        return "dead"
    return "submitted" if member.pending is not None else "training"
