"""Many asynchronous workers of a DiLoCo server, some of which die: no submission is lost, none counts twice.

The workers are threads with a connection each, the server is another process. The pseudo-gradient of a worker is -1 in
an element of its own, and the outer optimizer subtracts it: so that element of the global parameters is the number of
the worker's submissions that were applied. The worker checks it whenever it fetches them, and after its last death.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from dalsegno.diloco import DiLoCoClient, DiLoCoServer, Rules, nesterov
from dalsegno.diloco.wire.messages import Result, Settings, Submission
from dalsegno.diloco.wire.signature import TensorSpec
from dalsegno.testing import start_ranks

from .row import Row

_PATIENCE = 60.0  # seconds for a submission to be applied; after these it is a deadlock


def crowd(workers: int, seconds: float, deaths_per_minute: float) -> Row:
    """So many workers, for so long. ``deaths_per_minute``: of each.

    Raises:
        NotRunning: if a submission is not applied in a minute.
    """
    specs = (TensorSpec("counts", torch.float32, (workers,)),)
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".benchmark-") as folder:
        server = start_ranks(_serve, 1, Path(folder), workers)
        try:
            address, token = _address(Path(folder))
            with DiLoCoClient(address, token=token) as client:
                client.register("w0", _settings(specs), count=None, run_id=None, dylu=False)
                client.initialize("w0", specs, [torch.zeros(workers)])
            end = time.monotonic() + seconds
            everyone = [_Worker(number, specs, address, token, end, deaths_per_minute) for number in range(workers)]
            for worker in everyone:
                worker.start()
            for worker in everyone:
                worker.join()
        finally:
            server.kill()
            server.wait()
    if failed := [worker.failure for worker in everyone if worker.failure is not None]:
        raise failed[0]
    wrong = sum(worker.wrong for worker in everyone)
    applied, died = sum(worker.number for worker in everyone), sum(worker.deaths for worker in everyone)
    return Row(
        f"lost or doubled submissions of {workers} asynchronous workers, "
        f"{deaths_per_minute:.0%} of which die per minute",
        str(wrong),
        f"{applied:,} submissions, {died} deaths in {seconds:g} s; "
        f"staleness up to {max(worker.staleness for worker in everyone)}",
        "",
        "0",
        wrong == 0,
    )


def _serve(folder: Path, workers: int) -> None:
    rules = Rules(workers, asynchronous=True, heartbeat_timeout=5.0)
    with DiLoCoServer(folder, workers, nesterov(1.0, 0.0), rules) as server:
        (folder / "address.part").write_text(f"{server.address} {server.token}")
        (folder / "address.part").rename(folder / "address")
        server.wait()


def _address(folder: Path) -> tuple[str, str]:
    while not (folder / "address").exists():
        time.sleep(0.05)
    address, token = (folder / "address").read_text().split()
    return address, token


def _settings(specs: tuple[TensorSpec, ...]) -> Settings:
    return Settings([spec.to_json() for spec in specs], 1)


class _Dies(Exception):
    """The worker's connection is cut, and it forgets everything."""


class _Worker(threading.Thread):
    """Submits until ``end``, and dies at random moments: before a submission, in the midst of one, or after it."""

    def __init__(
        self,
        place: int,
        specs: tuple[TensorSpec, ...],
        address: str,
        token: str,
        end: float,
        deaths_per_minute: float,
    ) -> None:
        super().__init__(daemon=True)
        self.number = 0
        """Of its newest submission whose result it has."""
        self.deaths = self.staleness = self.wrong = 0
        self.failure: BaseException | None = None
        self._place, self._id = place, f"w{place}"
        self._specs = specs
        self._address, self._token = address, token
        self._end = end
        self._deaths_per_second = deaths_per_minute / 60
        self._chance = random.Random(place)
        self._global = torch.zeros(specs[0].shape)

    def run(self) -> None:
        try:
            is_over = False
            while not is_over:
                with DiLoCoClient(self._address, token=self._token, timeout=_PATIENCE) as client:
                    try:
                        self._live(client)
                        is_over = True
                    except _Dies:
                        self.deaths += 1
        except BaseException as error:
            self.failure = error

    def _live(self, client: DiLoCoClient) -> None:
        """From a registration, without a checkpoint, to the end."""
        dies_at = time.monotonic() + self._chance.expovariate(self._deaths_per_second)
        where = self._chance.randrange(3)

        def maybe_die(here: int) -> None:
            if here == where and time.monotonic() >= dies_at:
                raise _Dies

        def tensors(change: torch.Tensor) -> Iterator[torch.Tensor]:
            maybe_die(1)
            yield change

        answer = client.register(self._id, _settings(self._specs), count=None, run_id=None, dylu=False)
        for number in range(answer["adopt"], answer["known"] + 1):
            version = self._take(client, number)
        while time.monotonic() < self._end:
            maybe_die(0)
            change = torch.zeros_like(self._global)
            change[self._place] = -1
            submission = Submission(self._id, self.number + 1, version, 0, False, 1, 1, 1.0, None, self.number)
            assert client.offer(submission), "it is the next one"
            client.submit(submission, self._specs, tensors(change))
            maybe_die(2)
            applied = self._take(client, submission.number)
            self.staleness = max(self.staleness, applied - 1 - version)
            version = applied

    def _take(self, client: DiLoCoClient, number: int) -> int:
        """Fetch the parameters after a submission, which count it, and those before. Returns their version."""
        result: Result = client.await_result(self._id, number, _PATIENCE)
        client.fetch(result, self._specs, lambda reader: reader.tensor(self._global))
        self.number = number
        self.wrong += int(self._global[self._place]) != number
        return result.version
