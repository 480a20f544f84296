"""RankAgent: torchrun's elastic agent, with ranks that start in a tenth of a second and say why they ended."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from dalsegno.launcher.findings import Finding, OutOfMemoryKills, RankError, RestartProgress, judge, publish, published
from dalsegno.launcher.heartbeats import DUMP, Heartbeats, print_stacks
from dalsegno.launcher.options import LaunchOptions
from dalsegno.launcher.ranks import HEARTBEATS, Ranks, RankStart
from dalsegno.logs import PreviousLeg
from dalsegno.system.exit_status import ExitStatus
from dalsegno.training.stop_requests import SIGNALS


class ForwardedSignals:
    """Records signals while ranks run, for the agent to forward. While none run, a signal ends the agent.

    A signal that the program ignores stays ignored, by the ranks too. Python handles signals on the main thread only:
    on another thread, nothing is handled.
    """

    def __init__(self) -> None:
        self.forwarded: list[signal.Signals] = []
        """Those that :meth:`take` has returned."""
        self._pending: list[signal.Signals] = []
        self._raises = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside; restore the previous handlers afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in previous.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._record)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """No ranks run inside: a signal, also one that is pending, raises SignalException."""
        self._raises = True
        try:
            self._raise_pending()
            yield
        finally:
            self._raises = False

    def take(self) -> list[signal.Signals]:
        """The signals that have arrived since the last call."""
        taken, self._pending = self._pending, []
        self.forwarded += taken
        return taken

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._pending.append(signal.Signals(number))
        if self._raises:
            self._raise_pending()

    def _raise_pending(self) -> None:
        for first in self.take():
            raise SignalException(f"{first.name} arrived while no ranks ran", first)


logger = logging.getLogger("dalsegno")

ENDED = (ExitStatus.DONE, ExitStatus.DIVERGED, ExitStatus.RUN_AGAIN)
"""Exit statuses of a rank whose training has ended; any other is a failure."""
FINAL = (ExitStatus.WRONG_USE, ExitStatus.INTERRUPTED, ExitStatus.TAKEN_OVER)
"""Failures that a restart would only repeat."""

MONITOR_INTERVAL = 0.05  # seconds
_GRACE = 3.0  # seconds that ranks have to end once one has failed or hangs; one that waits in NCCL never would
_SAVE_SECONDS = 300.0  # that ranks have to save when further hosts join


class RankAgent(SimpleElasticAgent):
    """Starts, watches and ends the ranks on this host. Rendezvous, restarts and their number are torch's.

    Args:
        folder: private to the launch.
        make: makes the start of a rank from its local rank and its environment.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        options: LaunchOptions,
        folder: Path,
        make: Callable[[int, Mapping[str, str]], RankStart],
        signals: ForwardedSignals,
    ) -> None:
        super().__init__(spec)
        self.statuses: dict[int, int] = {}
        """Exit status of each local rank, at the end."""
        self.finding: Finding | None = None
        """Why the last leg failed."""
        self.verdict: str | None = None
        """Why there is no further restart, if something other than their number decided that."""
        self._options = options
        self._folder = folder
        self._make = make
        self._signals = signals
        self._progress = RestartProgress()
        self._out_of_memory = OutOfMemoryKills()
        self._ranks: Ranks | None = None
        self._beats: Heartbeats | None = None
        self._previous: Any = None  # the store of the leg that ended

    # -- what the base class calls ------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        with self._signals.raising():
            super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        environments = self._environments(worker_group)
        for local_rank in range(self._options.ranks):
            RankError.path(self._folder, local_rank).unlink(missing_ok=True)
        self._beats = Heartbeats.create(self._folder / HEARTBEATS, self._options.ranks)
        starts = [self._make(local_rank, each) for local_rank, each in enumerate(environments)]
        self._ranks = Ranks(self._options.start, starts)
        return dict(enumerate(self._ranks.pids()))

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        """Stop ranks because another host's failed, or because hosts have joined: these ranks save first.

        Those of a leg that failed here have ended already.
        """
        if self._ranks is not None and published(worker_group.store) is None:
            self._ranks.send(signal.SIGTERM)
            self._ranks.end(_SAVE_SECONDS)
        self._end_leg(None)

    def _shutdown(self, *_: Any, **__: Any) -> None:
        if self._ranks is not None:
            self._ranks.end(0.0)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ranks = self._ranks
        assert ranks is not None, "the base class starts ranks before it monitors them"
        for number in self._signals.take():
            ranks.send(number)
        exits = ranks.exits()
        if any(status not in ENDED for status in exits.values()):
            return self._failed(worker_group, None)
        if len(exits) == self._options.ranks:
            self.statuses = exits
            values = {worker.global_rank: exits[worker.local_rank] for worker in worker_group.workers}
            return RunResult(WorkerState.SUCCEEDED, return_values=values)
        hung = self._hung()
        return RunResult(WorkerState.HEALTHY) if hung is None else self._failed(worker_group, hung)

    # -- failures -----------------------------------------------------------------------------------------------

    def _failed(self, worker_group: WorkerGroup, hung: Finding | None) -> RunResult:
        ranks = self._ranks
        assert ranks is not None
        if hung is not None:
            ranks.send(DUMP)
        self._end_leg(hung)
        exits = ranks.exits()
        self.statuses = exits
        failures = {
            worker.global_rank: ProcessFailure(worker.local_rank, worker.id, exits.get(worker.local_rank, 1), "")
            for worker in worker_group.workers
            if exits.get(worker.local_rank) not in ENDED
        }
        return RunResult(WorkerState.FAILED, failures=failures)

    def _hung(self) -> Finding | None:
        """A finding if a rank that trains has made no progress for too long. Others may be waiting for it."""
        timeout = self._options.hang_timeout
        stalled = self._beats.stalled(timeout) if self._beats is not None else None
        return stalled and Finding(f"no step for {timeout:g} s after step {stalled.step}", True, time.time())

    def _end_leg(self, hung: Finding | None) -> None:
        """End the ranks of this leg, find out why it ended, and whether to restart it."""
        ranks, group, beats = self._ranks, self._worker_group, self._beats
        if ranks is None or beats is None:
            return
        ranks.end(_GRACE)
        workers = {worker.local_rank: worker.global_rank for worker in group.workers}
        if hung is not None:
            print_stacks(self._folder, workers)
        failed = {workers[rank]: status for rank, status in ranks.exits().items() if status not in ENDED}
        errors = {workers[rank]: RankError.read(self._folder, rank) for rank in workers}
        self.finding = hung or judge(
            failed,
            {rank: error for rank, error in errors.items() if error is not None},
            out_of_memory=self._out_of_memory.happened(),
        )
        self._publish(group, ranks)
        self._ranks = None
        reached = max(beat.step for beat in beats.read())
        is_first = self._remaining_restarts == group.spec.max_restarts  # later ones resume what has trained
        has_mistake = any(error is not None and error.is_mistake for error in errors.values())
        is_final = any(status in FINAL for status in failed.values())
        self._decide(is_final or (has_mistake and is_first and reached <= 0), reached)

    def _decide(self, is_final: bool, reached: int) -> None:
        """Give up restarts that lead nowhere, and say what comes next."""
        if self._signals.forwarded:
            self.verdict = f"{self._signals.forwarded[0].name} asked the job to stop"
        elif is_final:
            self.verdict = "a restart would only repeat it"
        elif not self._progress.note(reached):
            self.verdict = str(self._progress)
        if self.verdict is not None:
            self._remaining_restarts = 0
        most = self._worker_group.spec.max_restarts
        if self.finding is None:
            logger.warning("the job's hosts have changed, or ranks of another failed; starting again")
        elif self._remaining_restarts > 0:
            number = most - self._remaining_restarts + 1
            logger.warning("%s; restarting from the newest checkpoint (%d of %d)", self.finding.cause, number, most)

    # -- first cause of the previous leg ---------------------------------------------------------------------------

    def _publish(self, group: WorkerGroup, ranks: Ranks) -> None:
        """Leave the finding where the host of the next rank 0 reads it, once all hosts have met again."""
        store: Any = group.store
        if self.finding is not None:
            publish(store, self.finding)
        for worker, pid in zip(group.workers, ranks.pids(), strict=True):
            if worker.global_rank == 0:
                store.set("dalsegno/rank-zero", f"{os.uname().nodename} {pid}")
        self._previous = store

    def _previous_leg(self) -> PreviousLeg | None:
        if self._previous is None:
            return None
        store = self._previous
        found = published(store)
        if not store.check(["dalsegno/rank-zero"]):
            return None
        host, _, pid = store.get("dalsegno/rank-zero").decode().rpartition(" ")
        return PreviousLeg(host, int(pid), found.cause if found else "a host was lost")

    def _environments(self, group: WorkerGroup) -> list[dict[str, str]]:
        """The environment of each rank: torchrun's variables, and what ended the previous leg."""
        spec = group.spec
        previous = self._previous_leg()
        common = {
            **os.environ,
            "GROUP_RANK": str(group.group_rank),
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(spec.max_restarts - self._remaining_restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
            **({} if previous is None else previous.to_environment()),
        }
        common.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        if self._options.ranks > 1:
            common.setdefault("OMP_NUM_THREADS", "1")
        return [
            {
                **common,
                "RANK": str(worker.global_rank),
                "LOCAL_RANK": str(worker.local_rank),
                "ROLE_RANK": str(worker.role_rank),
                "WORLD_SIZE": str(worker.world_size),
                "ROLE_WORLD_SIZE": str(worker.role_world_size),
            }
            for worker in group.workers
        ]


# --- how the hosts of a launch find each other, before each leg -----------------------------------------------------


_HOST = "localhost"
_TIMEOUT = timedelta(minutes=30)


def rendezvous_for(options: LaunchOptions) -> RendezvousHandler:
    """torch's c10d rendezvous, or, on one host, a store: c10d waits a second before each leg for further hosts."""
    least, most = options.nodes
    if most == 1:
        return OneHost(options.run_id)
    # Else the host of rank 0 announces its store before the first leg only, and one that joins later waits in vain.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return get_rendezvous_handler(RendezvousParameters("c10d", options.endpoint or "", options.run_id, least, most))


class OneHost(RendezvousHandler):
    """The store of a single host, on a free port; a new name space for each leg."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        self._legs = 0
        self._is_closed = False

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "one-host"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        self._legs += 1
        store = PrefixStore(f"dalsegno/{self._run_id}/{self._legs}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_HOST, self._store.port))

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def shutdown(self) -> bool:
        self.set_closed()
        return True
