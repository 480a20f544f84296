"""launch: run a function that builds a trainer on several ranks, from a program or a notebook."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from dalsegno.config import Factory
from dalsegno.distributed import accelerator
from dalsegno.errors import ConfigurationError, DalsegnoError, LeaseLost, Locked, RankFailed
from dalsegno.events.registration import check_callbacks
from dalsegno.system.exit_status import ExitStatus
from dalsegno.training.result import TrainResult
from dalsegno.training.stop_requests import SIGNALS

from .agent import ENDED, MONITOR_INTERVAL, ForwardedSignals, RankAgent, rendezvous_for
from .options import HANG_TIMEOUT, MAX_RESTARTS, LaunchOptions, Start
from .parcel import main_is_importable, write_private
from .ranks import TARGET, RankStart, run_rank, warm_up
from .targets import FactoryTarget, Target, read_outcome, to_tree

logger = logging.getLogger("dalsegno")

_ERRORS: Mapping[int, type[DalsegnoError]] = {
    ExitStatus.WRONG_USE: ConfigurationError,
    ExitStatus.TAKEN_OVER: LeaseLost,
    ExitStatus.IN_USE: Locked,
}
"""Of a job that ended with this status. If its ranks have several, it ends with the first of these."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a launch ended."""

    status: ExitStatus | int
    why: str
    """Why it failed; empty if it did not."""
    result: TrainResult | None


def launch(
    factory: Callable[..., Any] | str,
    *,
    nproc: int | str = "auto",
    callbacks: Sequence[object] = (),
    arguments: Mapping[str, Any] | None = None,
    nnodes: int | str = 1,
    max_restarts: int = MAX_RESTARTS,
    hang_timeout: float = HANG_TIMEOUT,
    rdzv_endpoint: str | None = None,
    rdzv_id: str | None = None,
    start: Start = "forkserver",
) -> TrainResult | None:
    """Train on several ranks, and restart them from the newest checkpoint when one fails.

    ::

        def build(callbacks):
            return ds.Trainer(model, args, train_dataset=data, callbacks=callbacks)

        if __name__ == "__main__":
            result = ds.launch(build, nproc=8, callbacks=[Tokens(every=10)])

    Each rank imports ``factory``, builds equal callbacks, and trains. Afterwards, the callbacks given here have the
    state that rank 0's have.

    Args:
        factory: returns the trainer, called as ``factory(callbacks=[…], **arguments)``; a function at the top level of
            a module, or its name ``"module:function"``. Without callbacks, a default of this parameter stays.
        nproc: ranks on this host; ``"auto"``: one per GPU.
        callbacks: travel to the ranks by the import path of their class, the arguments of its constructor, and their
            state.
        arguments: further arguments of ``factory``: numbers, strings, lists, dicts, tensors, dataclasses.
        nnodes: number of hosts, each of which calls this; ``"MIN:MAX"``.
        max_restarts: restarts after a failure. Whatever it is, three legs in a row without progress end the job.
        hang_timeout: seconds without a step after which a rank counts as failed: more than the longest step, evaluation
            or save takes.
        rdzv_endpoint: ``HOST:PORT`` of one of the hosts, the same on all; for several hosts.
        rdzv_id: identifies the job at that address; None: Slurm's job id.
        start: ``"fork"`` forks the ranks from this process, so that lambdas, and classes and functions of a notebook,
            can be used. No GPU may have been used before.

    Returns:
        Rank 0's result; None if ``train()`` of the trainer returns something else.

    Raises:
        ConfigurationError: before anything starts, if something cannot travel, or the factory does not take what it is
            given; or if a rank raises it.
        LeaseLost: if another process has taken the run over.
        Locked: if another process uses the ``output_dir``.
        RankFailed: if a rank failed and there was no restart left, or restarts did not help.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigurationError(
            "ds.launch() was reached while a rank imports this program; put the call under if __name__ == '__main__':"
        )
    options = LaunchOptions(nproc, nnodes, max_restarts, hang_timeout, rdzv_endpoint, rdzv_id, start)
    given = check_callbacks(callbacks)
    function = Factory.find(factory).function if isinstance(factory, str) else factory
    if not callable(function):
        raise ConfigurationError(f"ds.launch({function!r}): needs a function that returns a trainer, or its name")
    target = FactoryTarget(function, given, arguments or {})
    end = run_job(target, options)
    if end.status in _ERRORS:
        raise _ERRORS[end.status](end.why)
    if end.status == ExitStatus.INTERRUPTED:
        raise KeyboardInterrupt
    if end.status not in ENDED or (end.why and end.result is None):
        raise RankFailed(end.why)
    return end.result


def run_job(target: Target, options: LaunchOptions) -> JobEnd:
    """Run the target on all ranks of this host until it ends. Raises ConfigurationError before anything starts, if the
    target is invalid or cannot travel."""
    if options.start == "fork":
        if accelerator.is_initialized():
            raise ConfigurationError(
                "start='fork': this process has used a GPU already, so forked ranks could not; launch before the first "
                "use of CUDA, or define everything in a module and use start='forkserver'"
            )
    else:
        target.check()
        if hasattr(sys.modules["__main__"], "__file__") and not main_is_importable():  # a notebook has no file
            raise ConfigurationError(
                "a program on standard input cannot be imported by its ranks; put it into a file, or launch with "
                "start='fork'"
            )
        warm_up(_threads(options.ranks))
    with tempfile.TemporaryDirectory(prefix="dalsegno-launch-") as folder:  # 0700
        return _run(target, options, Path(folder))


def _run(target: Target, options: LaunchOptions, folder: Path) -> JobEnd:
    forks = options.start == "fork"
    if not forks:
        write_private(folder / TARGET, to_tree(target))
    make = partial(
        RankStart,
        folder=str(folder),
        threads=_threads(options.ranks),
        ignored=[number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN],
        launched=time.time(),
        needs_gpu=accelerator.device_count() > 0,
        target=target if forks else None,
    )
    rendezvous = rendezvous_for(options)
    spec = WorkerSpec(
        role="default",
        local_world_size=options.ranks,
        rdzv_handler=rendezvous,
        entrypoint=run_rank,
        max_restarts=options.max_restarts,
        monitor_interval=MONITOR_INTERVAL,
    )
    signals = ForwardedSignals()
    agent = RankAgent(spec, options, folder, make, signals)
    with signals.listening():
        try:
            outcome = agent.run()  # None if the other hosts have ended the job
            failed = outcome is None or outcome.is_failed()
        except RendezvousError as error:
            why = f"the hosts of this job did not meet: {type(error).__name__}: {error}"
            return JobEnd(ExitStatus.ERROR, why, None)
        except SignalException as stop:
            status = ExitStatus.INTERRUPTED if stop.sigval == signal.SIGINT else ExitStatus.RUN_AGAIN
            return JobEnd(status, str(stop), None)
        finally:
            rendezvous.shutdown()
    callbacks = target.callbacks if isinstance(target, FactoryTarget) else ()
    if not failed:
        return JobEnd(agent.statuses[0], "", read_outcome(folder, callbacks))
    return _failure(agent, signals)


def _failure(agent: RankAgent, signals: ForwardedSignals) -> JobEnd:
    cause = agent.finding.cause if agent.finding else "another host's ranks failed"
    why = f"{cause}; {agent.verdict or 'no restart is left'}"
    statuses = set(agent.statuses.values())
    if ExitStatus.INTERRUPTED in statuses:
        return JobEnd(ExitStatus.INTERRUPTED, why, None)
    if any(-number in statuses for number in signals.forwarded):  # it ended a rank that was not training
        return JobEnd(ExitStatus.RUN_AGAIN, why, None)
    return JobEnd(next((status for status in _ERRORS if status in statuses), ExitStatus.ERROR), why, None)


def _threads(nproc: int) -> int | None:
    """As torchrun sets OMP_NUM_THREADS, which a process reads before it is forked."""
    given = os.environ.get("OMP_NUM_THREADS", "1" if nproc > 1 else "")
    return int(given) if given.isdecimal() else None
