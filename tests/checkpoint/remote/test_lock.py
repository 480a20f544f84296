"""Two hosts at one URL that share nothing else: real processes with host names of their own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import boto3
import fsspec
import pytest

import dalsegno as ds
from checkpoint.remote import jobs
from checkpoint.remote.s3 import BUCKET, S3
from checkpoint.remote.there import steps_at
from dalsegno.checkpoint.remote.store import Store
from dalsegno.checkpoint.remote.store_mirror import StoreMirror
from dalsegno.system import lease
from dalsegno.system.lease import Holder
from dalsegno.testing import Ranks, run_ranks, start_ranks
from support.hosts import needs_pid_namespaces
from support.listeners import Listener

URL = "memory://runs/claimed"
OF_NODE_17 = {"host": "node-17", "pid": 4711, "since": 0.0, "token": "0123456789abcdef", "lives": {}}


@pytest.fixture
def there() -> Iterator[Store]:
    """An empty store."""
    fsspec.filesystem("memory").store.clear()
    yield Store(URL)
    fsspec.filesystem("memory").store.clear()


def started(url: str, folder: Path, host: str, ttl: float = 60.0) -> Ranks:
    """A run on that host that trains until it is stopped. ``ttl``: seconds of its lease."""
    ranks = start_ranks(jobs.train_on_host, 1, host, url, folder, None, ttl)
    jobs.until(lambda: bool(steps_at(Store(url))))
    return ranks


def test_another_host_is_kept_out_until_the_run_has_ended(url: str, tmp_path: Path) -> None:
    first = started(url, tmp_path / "one", "node-1")
    (outcome,) = run_ranks(jobs.train_on_host, 1, "node-2", url, tmp_path / "two", 4)
    assert re.match(
        rf"Locked: {url}: in use by process \d+ on node-1 since .*, whose lease is held until .* UTC; wait for it",
        outcome,
    ), outcome
    assert [path.name for path in (tmp_path / "two").iterdir()] == [".lock"], "nothing was brought or trained"
    (tmp_path / "one/stop").touch()
    (end,) = first.wait()
    assert end.value == "stopped"
    (outcome,) = run_ranks(jobs.train_on_host, 1, "node-2", url, tmp_path / "two", 2)
    assert outcome == "finished"


def test_the_lock_of_a_dead_host_expires(url: str, tmp_path: Path) -> None:
    first = started(url, tmp_path / "one", "node-1", ttl=0.3)
    first.kill()
    assert first.wait()[0].was_killed
    assert run_ranks(jobs.train_on_host, 1, "node-2", url, tmp_path / "two", 2) == ["finished"]
    assert Store(url).read(".lock") is None
    assert [name for name in Store(url).sizes() if name.startswith(".")] == []


def test_the_lock_of_a_former_version_is_taken_over_on_request(there: Store, tmp_path: Path) -> None:
    """It is not renewed, so it never expires."""
    there.write(".lock", json.dumps(OF_NODE_17).encode())
    with pytest.raises(ds.Locked, match=r"cannot see whether that process is alive; .*take_over_lock=True"):
        jobs.trainer(URL, tmp_path, 2).train()
    assert jobs.trainer(URL, tmp_path, 2, take_over_lock=True).train().reason == "finished"


def test_two_that_take_over_at_once(url: str, tmp_path: Path) -> None:
    Store(url).write(".lock", json.dumps(OF_NODE_17 | {"lease": 0.3}).encode())
    places = [tmp_path / "one", tmp_path / "two"]
    takers = [start_ranks(jobs.train_on_host, 1, place.name, url, place, None) for place in places]
    jobs.until(lambda: not all(taker.alive for taker in takers))
    for place in places:
        place.mkdir(exist_ok=True)
        (place / "stop").touch()
    values = sorted(str(taker.wait()[0].value) for taker in takers)
    assert values[0].startswith(f"Locked: {url}: ") and values[1] == "stopped", values


def test_only_one_call_creates_a_file(url: str) -> None:
    store = Store(url)
    with ThreadPoolExecutor(8) as threads:
        created = list(threads.map(lambda number: store.create("taken", b"%d" % number), range(8)))
    assert created.count(True) == 1
    assert store.read("taken") == b"%d" % created.index(True)


def test_one_that_was_killed_here_holds_nothing(url: str, tmp_path: Path) -> None:
    first = started(url, tmp_path / "one", "node-1")
    first.kill()
    assert first.wait()[0].was_killed
    assert run_ranks(jobs.train_on_host, 1, "node-1", url, tmp_path / "two", 2) == ["finished"]


def test_one_that_was_taken_over_stops_and_sends_nothing_more(
    there: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not dead after all. What the other one has there stays as it is."""
    monkeypatch.setattr(lease, "RENEW_S", 0.01)

    def take_over(ctx: Any) -> None:
        if ctx.step == 3:
            jobs.until(lambda: steps_at(there) == [2])
            there.write(".lock", json.dumps(OF_NODE_17).encode())

    trainer = jobs.trainer(URL, tmp_path, 1_000_000, Listener({"on_step_end": take_over}))
    with pytest.raises(ds.LeaseLost, match=f"{URL}: was taken over by process 4711 on node-17"):
        trainer.train()
    assert steps_at(there) == [2]
    assert json.loads(there.read(".lock") or b"") == OF_NODE_17


def test_two_in_one_process(there: Store, tmp_path: Path) -> None:
    def begin_another(ctx: Any) -> None:
        if ctx.step == 1:
            with pytest.raises(ds.Locked, match=f"in use by process {os.getpid()} on "):
                jobs.trainer(URL, tmp_path / "two", 4).train()

    first = jobs.trainer(URL, tmp_path / "one", 2, Listener({"on_step_end": begin_another}))
    assert first.train().reason == "finished"


def of_this_pid(**changed: Any) -> bytes:
    """The entry of an earlier process with this one's pid, which this process would have seen but for ``changed``."""
    return json.dumps(asdict(Holder.here()) | {"token": OF_NODE_17["token"]} | changed).encode()


@pytest.mark.parametrize("unknown", [[], ["boot", "pid_namespace"]])
def test_another_life_with_the_same_number_in_the_same_pid_namespace_is_dead(
    there: Store, tmp_path: Path, unknown: list[str]
) -> None:
    """Numbers come again. The entry of a former version lacks both ids: there the host's name must do."""
    entry = json.loads(of_this_pid())
    for name in unknown:
        del entry[name]
    there.write(".lock", json.dumps(entry).encode())
    assert jobs.trainer(URL, tmp_path, 2).train().reason == "finished"


@pytest.mark.parametrize("name", ["boot", "pid_namespace"])
def test_the_same_number_in_another_pid_namespace_or_of_another_boot_counts_until_its_lease_expires(
    there: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """A container that is started again, or one beside this, has the same host and, often, the same process number."""
    there.write(".lock", of_this_pid(**{name: "another"}))
    with pytest.raises(ds.Locked, match="cannot see whether that process is alive"):
        jobs.trainer(URL, tmp_path, 2).train()
    there.write(".lock", of_this_pid(**{name: "another"}, lease=0.3))
    assert jobs.trainer(URL, tmp_path, 2).train().reason == "finished"
    beside = "in another container " if name == "pid_namespace" else ""
    assert f"the lease of process {os.getpid()} {beside}on {os.uname().nodename} since" in caplog.text


@needs_pid_namespaces
def test_two_containers_of_one_host(url: str, tmp_path: Path) -> None:
    """Both are process 1 on a host of the same name, and neither sees the other."""
    first = start_ranks(jobs.train_in_container, 1, "node-1", url, tmp_path / "one", None)
    jobs.until(lambda: bool(steps_at(Store(url))))
    (outcome,) = run_ranks(jobs.train_in_container, 1, "node-1", url, tmp_path / "two", 4)
    assert re.match(
        rf"Locked: {url}: in use by process 1 in another container on node-1 since .*, whose lease is held until ",
        outcome,
    ), outcome
    (tmp_path / "one/stop").touch()
    assert first.wait()[0].value == "stopped"
    (outcome,) = run_ranks(jobs.train_in_container, 1, "node-1", url, tmp_path / "two", 2)
    assert outcome == "finished"


@pytest.mark.parametrize("content", [b"", b"no JSON", b"[" * 100_000, b'{"host": 3}'])
def test_an_invalid_lock_file_is_ignored(there: Store, tmp_path: Path, content: bytes) -> None:
    there.write(".lock", content)
    mirror = StoreMirror(URL, tmp_path, None)
    mirror.claim(take_over=False)
    assert there.read(".lock") != content
    mirror.end()
    assert there.read(".lock") is None


def test_names_that_lead_out_of_the_folder_are_not_brought(url: str, s3: S3, tmp_path: Path) -> None:
    """To S3, a name is any text."""
    run_ranks(jobs.train, 1, url, tmp_path / "one", 2)
    client = boto3.client("s3", endpoint_url=s3.address)
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    names = [f"{tmp_path}/absolute", "logs/../../climbed", "./dot", "logs//twice"]
    for name in names:
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=b"evil")
    run_ranks(jobs.train, 1, url, tmp_path / "two", 4)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"evil"]


def test_hidden_files_there_are_not_brought(there: Store, tmp_path: Path) -> None:
    """Neither that one nor what an enemy may have put there: in the folder here they would mean something."""
    jobs.train(URL, tmp_path / "one", 2)
    there.write(".uploading/rest/run.json", b"{}")
    there.write("logs/.train.jsonl.tmp", b"{}")
    jobs.train(URL, tmp_path / "two", 4)
    assert not (tmp_path / "two/.uploading").exists() and not (tmp_path / "two/logs/.train.jsonl.tmp").exists()
