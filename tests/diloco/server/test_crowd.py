"""Many workers that come, die and come back, and a server that is killed: nothing is lost or counted twice."""

from __future__ import annotations

import random
import threading
from pathlib import Path

from dalsegno.diloco import delayed_nesterov
from dalsegno.diloco.server.coordinator import Coordinator
from dalsegno.diloco.server.run import OuterRun
from dalsegno.diloco.wire.messages import Settings
from dalsegno.logs import read_records
from diloco.scenes import SPECS, Given, rules, submission_of, values

SETTINGS = Settings([spec.to_json() for spec in SPECS], 1)


class Crowd:
    """A server without network, and what each live worker remembers: its count, and the version that this led to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.applied = threading.Event()
        self.alive: dict[str, tuple[int, int]] = {}
        self.accepted: set[tuple[str, int]] = set()
        self.staleness = 0
        self.start()
        with self.coordinator.spooled(SPECS, Given(SPECS, values(SPECS, 0))) as arrived:
            self.coordinator.initialize(arrived)

    def start(self) -> None:
        run = OuterRun(self.folder, delayed_nesterov(buffer_size=8), save_every=25)
        self.coordinator = Coordinator(run, rules(1, asynchronous=True), self.applied.set)

    def kill_server(self) -> None:
        """Nothing is saved: the next one has the journal only."""
        coordinator = self.coordinator
        with coordinator._lock:
            coordinator._is_closing = True
            coordinator._lock.notify_all()
        coordinator._thread.join()
        coordinator._run.close(save=False)
        self.start()

    def join(self, name: str) -> None:
        """As a new process, without a checkpoint."""
        answer = self.coordinator.register(name, SETTINGS, count=None, run_id=None, dylu=False)
        for number in range(answer["adopt"], answer["known"] + 1):
            self.alive[name] = number, self.result(name, number)

    def result(self, name: str, number: int) -> int:
        while (result := self.coordinator.result(name, number)) is None:
            self.applied.wait()
            self.applied.clear()
        self.coordinator.parameters(result["version"], None)[0].close()
        return int(result["version"])

    def submit(self, name: str) -> None:
        count, base = self.alive[name]
        submission = submission_of(name, count + 1, base)
        assert self.coordinator.offer(submission) is not None
        with self.coordinator.spooled(SPECS, Given(SPECS, values(SPECS, count))) as arrived:
            self.coordinator.accept(submission, arrived)
        self.accepted.add((name, count + 1))
        assert self.coordinator.offer(submission) is None  # once more, as if the answer had been lost

    def adopt(self, name: str) -> None:
        count, base = self.alive[name]
        version = self.result(name, count + 1)
        self.staleness = max(self.staleness, version - 1 - base)
        self.alive[name] = count + 1, version


def test_64_asynchronous_workers(tmp_path: Path) -> None:
    """Of 100 turns, one in ten ends with a worker's death; the server dies twice."""
    chance, crowd = random.Random(0), Crowd(tmp_path)
    names = [f"w{number}" for number in range(64)]
    for turn in range(100):
        name = chance.choice(names)
        if name not in crowd.alive:
            crowd.join(name)
        crowd.submit(name)
        if turn % 50 == 25:
            crowd.kill_server()
        if chance.random() < 0.1:
            del crowd.alive[name]
        else:
            crowd.adopt(name)
    for name in list(crowd.coordinator.status()["workers"]):
        crowd.result(name["worker_id"], name["submissions"])
    status = crowd.coordinator.status()
    crowd.coordinator.close()
    assert status["version"] == len(crowd.accepted) == 100
    assert crowd.staleness > 5
    records = list(read_records(tmp_path / "logs/train.jsonl"))
    assert [each["global_step"] for each in records] == list(range(1, 101))
    assert max(each["staleness"] for each in records) >= crowd.staleness
    again = OuterRun(tmp_path, delayed_nesterov(buffer_size=8), save_every=25)
    assert {name: each.number for name, each in again.state.members.items()} == {
        name: max(number for who, number in crowd.accepted if who == name) for name, _ in crowd.accepted
    }
    again.close(save=False)


def test_versions_of_workers_that_are_gone_are_released(tmp_path: Path) -> None:
    """Workers that come under a new name each time leave no file behind; one that comes back gets the present version,
    or repeats what it did if it is the last one that left."""
    crowd = Crowd(tmp_path)
    for number in range(12):
        crowd.join(f"w{number}")
        crowd.submit(f"w{number}")
        crowd.adopt(f"w{number}")
        crowd.coordinator.deregister(f"w{number}")
    crowd.join("stays")
    for _ in range(2):
        crowd.submit("stays")
        crowd.adopt("stays")
    crowd.join("w11")
    crowd.join("w0")
    assert crowd.alive["w11"] == (1, 12) and crowd.alive["w0"] == (1, 14)
    crowd.coordinator.close()
    frames = [path for path in (tmp_path / "diloco/versions").iterdir() if path.suffix == ".frame"]
    assert len(frames) <= 6, frames
    again = OuterRun(tmp_path, delayed_nesterov(buffer_size=8), save_every=25)
    assert again.state.members.keys() == {"stays", *(f"w{number}" for number in range(12))}
    again.close(save=False)
