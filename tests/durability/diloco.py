"""Kill the workers and the server of a DiLoCo run with SIGKILL, again and again: ``make diloco``.

Each process is killed at a moment drawn by lot: by the clock, or before a file operation. It is started again at once,
and the others go on. At the end, the run is held against one in which nothing was killed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dalsegno.diloco import DiLoCoServer
from dalsegno.diloco.worker import exchange
from dalsegno.logs import drop_wall_clock, read_records
from dalsegno.testing import FaultPlan, start_ranks
from diloco.scenes import rules, train_as_worker
from support.loopback import reserved_port

TOKEN = "the-token-of-this-soak"
LOGS = ("outer/logs/train.jsonl", "w0/logs/train.jsonl", "w1/logs/train.jsonl")
PATIENCE = 1800.0
"""Seconds for a leg."""


@dataclass
class Moments:
    """Moments to die at, for all processes of the runs."""

    kills: int
    """To be done."""
    dice: random.Random
    by_clock: bool
    done: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self, longest: float) -> FaultPlan | None:
        """None once all kills are done. ``longest``: seconds that a leg may live."""
        with self._lock:
            if self.done >= self.kills:
                return None
            if self.by_clock and self.dice.random() < 0.5:
                return FaultPlan(seconds=self.dice.uniform(0.0, longest))
            path = self.dice.choice(["checkpoints/", "logs/", "diloco/"])
            return FaultPlan(operation="any", path=path, count=self.dice.randint(1, 40))

    def note(self) -> None:
        with self._lock:
            self.done += 1


def serve(folder: Path, port: int, plan: FaultPlan | None) -> None:
    """Until the folder has a file ``end``."""
    if plan is not None:
        plan.arm()
    with DiLoCoServer(folder / "outer", 2, rules=rules(2, save_every=3), port=port, auth_token=TOKEN):
        while not (folder / "end").exists():
            time.sleep(0.02)


def work(folder: Path, port: int, number: int, plan: FaultPlan | None) -> dict[str, list[Any]]:
    if plan is not None:
        plan.arm()
    vars(exchange)["retry_delay"] = lambda attempt: 0.1  # a server that was killed is back at once
    return train_as_worker(folder / f"w{number}", f"127.0.0.1:{port}", TOKEN, number, max_sync_retries=10_000)


def run(folder: Path, moments: Moments | None) -> dict[str, Any]:
    """One run to its end. Returns the workers' parameters and the records of all."""
    folder.mkdir()
    with reserved_port() as port, ThreadPoolExecutor(3) as threads:
        server = threads.submit(survive, serve, (folder, port), moments)
        workers = [threads.submit(survive, work, (folder, port, number), moments) for number in range(2)]
        try:
            parameters = [worker.result() for worker in workers]
        finally:
            (folder / "end").touch()
        server.result()
    records = {log: [drop_wall_clock(record) for record in read_records(folder / log)] for log in LOGS}
    return {"parameters": parameters, "records": records}


def survive(function: Callable[..., Any], arguments: tuple[Any, ...], moments: Moments | None) -> Any:
    """Start a process until it gets to its end. Returns its value."""
    while True:
        plan = None if moments is None else moments.next(4.0)
        (outcome,) = start_ranks(function, 1, *arguments, plan).wait(PATIENCE)
        if not outcome.was_killed:
            assert outcome.exit_code == 0, outcome.error
            return outcome.value
        assert moments is not None
        moments.note()


def soak(
    kills: int, folder: Path, seed: int, *, by_clock: bool = True, say: Callable[[str], object] = lambda line: None
) -> tuple[int, list[str]]:
    """Kill until so many kills are done, and the last run has come to its end. Returns kills, and what differs.

    Args:
        say: called after each run.
    """
    moments = Moments(kills, random.Random(seed), by_clock)
    reference = run(folder / "reference", None)
    differences = []
    runs = 0
    while moments.done < kills:
        runs += 1
        ended = run(folder / f"run-{runs}", moments)
        differences += [f"run {runs}: {what}" for what in reference if ended[what] != reference[what]]
        shutil.rmtree(folder / f"run-{runs}")
        say(f"{runs} runs, {moments.done} kills, {len(differences)} differences")
    return moments.done, differences


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=2026)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dalsegno-soak-") as folder:
        done, differences = soak(
            arguments.kills, Path(folder), arguments.seed, say=lambda line: print(line, flush=True)
        )
    print(f"{done} kills of workers and servers; {len(differences)} differences", *differences, sep="\n")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
