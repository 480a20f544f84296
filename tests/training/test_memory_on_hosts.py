"""Memory checkpoints of a run on several hosts: each rank has a directory of its own in place of its host's memory."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash

import dalsegno as ds
import dalsegno.distributed.hosts as transfers
from checkpoint.remote.jobs import until
from dalsegno.checkpoint import in_memory, memory_dir, restore
from dalsegno.checkpoint.in_memory import MemoryPublication
from dalsegno.distributed import collectives
from dalsegno.distributed.collectives import BackgroundGroup
from dalsegno.distributed.hosts import Transfer
from dalsegno.errors import DalsegnoError
from dalsegno.logs import RunFile
from dalsegno.system import progress
from dalsegno.system.progress import Progress
from dalsegno.testing import compare_runs, run_ranks
from training.test_memory_checkpoints import origins, trainer


class Messages(logging.Handler):
    """Messages of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class GoesBack(ds.Callback):
    """Goes back, and dies before the next save."""

    def on_step_end(self, ctx: Any) -> None:
        if ctx.state.global_step == 7:
            ctx.control.roll_back("the loss is bad", by="the test")

    def on_rollback(self, ctx: Any) -> None:
        raise RuntimeError("CUDA error: right after the rollback")


def leg(folder: Path, hosts: Sequence[str], crash: int | None, parallel: str, changes: dict[str, Any]) -> str:
    """One leg of the run, each rank on the host of that name; the messages, and the error if one was raised."""
    place = folder / "hosts" / hosts[collectives.rank()]
    place.mkdir(parents=True, exist_ok=True)
    os.environ[memory_dir.PLACE_VARIABLE] = str(place)
    restore.boot_id = lambda: hosts[collectives.rank()]  # type: ignore[assignment]
    logging.getLogger("dalsegno").addHandler(messages := Messages())
    logging.getLogger("dalsegno").setLevel(logging.INFO)
    goes_back = changes.pop("goes_back", False)
    running = trainer(folder / "run", crash, parallel=parallel, **changes)
    if "frozen" in changes:
        running.add_callback(Thaws())
    if goes_back:
        running.add_callback(GoesBack())
    try:
        running.train()
    except (RuntimeError, DalsegnoError) as error:
        messages.texts.append(f"{type(error).__name__}: {error}")
    return "\n".join(messages.texts)


class Run:
    """A run on hosts of which some are lost between its legs."""

    def __init__(self, folder: Path, parallel: str, copies: int = 1, **changes: Any) -> None:
        self.folder, self.parallel = folder, parallel
        self.changes = {"save_in_memory": f"InMemory(steps=1, copies={copies})", **changes}

    def leg(self, *hosts: str, crash: int | None = None, **changes: Any) -> str:
        """Rank 0's messages."""
        changes = self.changes | changes
        return run_ranks(leg, len(hosts), self.folder, hosts, crash, self.parallel, changes)[0]

    def lose(self, *hosts: str) -> None:
        for host in hosts:
            shutil.rmtree(self.folder / "hosts" / host)

    @property
    def origins(self) -> list[str | None]:
        return origins(self.folder / "run")

    def memory_of(self, host: str) -> list[Path]:
        return [*(self.folder / "hosts" / host).glob("dalsegno-*/*")]

    def expect_equal(self, other: Run) -> None:
        comparison = compare_runs(other.folder / "run", self.folder / "run")
        assert comparison.identical, comparison.table()


def test_a_host_that_replaces_a_lost_one_gets_its_part_from_the_neighbour(tmp_path: Path) -> None:
    uninterrupted, run = Run(tmp_path / "uninterrupted", "fsdp"), Run(tmp_path / "lossy", "fsdp")
    assert "CUDA error" in run.leg("a", "b", crash=5)
    run.lose("b")
    assert "fetching" in run.leg("a", "c", crash=11)
    run.lose("a")
    run.leg("d", "c", crash=11)
    run.lose("d")
    run.leg("e", "c")
    assert run.origins == [None, "memory step-00000005", "memory step-00000011", "memory step-00000011"]
    uninterrupted.leg("a", "b")
    run.expect_equal(uninterrupted)
    assert [run.memory_of(host) for host in ("c", "e")] == [[], []]


def test_without_the_neighbours_copy_it_resumes_from_the_disk(tmp_path: Path) -> None:
    run = Run(tmp_path, "fsdp")
    run.leg("a", "b", crash=11)
    run.lose("a", "b")
    run.leg("a", "b", crash=10)
    assert run.origins == [None, "step-00000008"]
    uncopied = {"save_in_memory": "Every(steps=1)"}
    run.leg("a", "b", crash=13, **uncopied)
    run.leg("a", "b", crash=14, **uncopied)
    assert run.origins[2:] == ["memory step-00000010", "memory step-00000013"]
    run.lose("b")
    assert "was in the memory of a lost host" in run.leg("a", "c", crash=12, **uncopied)
    assert run.origins[4:] == ["step-00000008"]


def test_ranks_fetch_the_files_that_they_read(tmp_path: Path) -> None:
    """Under DDP each file is written once, and read by all ranks."""
    uninterrupted, run = Run(tmp_path / "uninterrupted", "ddp", 0), Run(tmp_path / "run", "ddp", 0)
    run.leg("a", "b", crash=5)
    assert "fetching" in run.leg("a", "b", crash=7)
    run.leg("a", "b")
    assert run.origins == [None, "memory step-00000005", "memory step-00000007"]
    uninterrupted.leg("a", "b")
    run.expect_equal(uninterrupted)


def test_a_host_may_have_more_ranks_than_its_neighbour(tmp_path: Path) -> None:
    run = Run(tmp_path, "fsdp", per_device_train_batch_size=1)
    run.leg("a", "a", "b", crash=3)
    run.lose("a")
    run.leg("c", "c", "b", crash=5)
    run.lose("b")
    run.leg("c", "c", "c", crash=6)
    assert run.origins == [None, "memory step-00000003", "memory step-00000005"]


def test_a_host_that_comes_back_has_a_dead_timeline(tmp_path: Path) -> None:
    """Host b is lost with the state of step 5, and comes back after the others have trained on, at another rate."""
    run = Run(tmp_path, "fsdp")
    run.leg("a", "b", crash=5)
    shutil.move(tmp_path / "hosts" / "b", tmp_path / "lost")
    run.leg("a", "c", crash=7, learning_rate=0.02)
    run.leg("a", "c", crash=7, learning_rate=0.02)
    run.lose("a", "c")
    shutil.move(tmp_path / "lost", tmp_path / "hosts" / "b")
    run.leg("b", "d", crash=4)
    assert run.origins == [None, "memory step-00000005", "memory step-00000007", None]


def test_a_host_that_comes_back_has_steps_that_were_rolled_back(tmp_path: Path) -> None:
    """Host b is lost with the state of step 5, from which the others resume and go back."""
    run = Run(tmp_path, "fsdp", recovery=ds.RecoveryPolicy())
    run.leg("a", "b", crash=5)
    shutil.move(tmp_path / "hosts" / "b", tmp_path / "lost")
    assert "right after the rollback" in run.leg("a", "c", goes_back=True)
    run.lose("a", "c")
    shutil.move(tmp_path / "lost", tmp_path / "hosts" / "b")
    assert run.memory_of("b")
    run.leg("b", "d", crash=2)
    assert run.origins == [None, "memory step-00000005", "step-00000000"]


def test_what_the_last_leg_gave_up_is_no_candidate(tmp_path: Path) -> None:
    """A host that was away may still have the checkpoint that the leg resumed from."""
    former, own = "0123456789abcdef", "fedcba9876543210"
    file = RunFile(tmp_path)
    file.begin(str(memory_dir.root() / former / "checkpoints" / "step-00000015"), 2, 15, memory=own)
    checkpoints = trainer(tmp_path)._lifecycle._checkpoints
    checkpoints._run_file = file
    assert checkpoints._memory_candidates() == {former: 15, own: None}
    file.roll_back({"timestamp": 1.0, "from_step": 20, "to_step": 8, "by": "the test", "reason": "the loss is bad"})
    assert checkpoints._memory_candidates() == {own: None}
    file.end("aborted", None, 8, {})
    assert checkpoints._memory_candidates() == {}


def sent_by_leg(folder: Path, crash: int | None, changes: dict[str, Any]) -> Counter[str]:
    """How often this rank sends each file in a leg on hosts a and b."""
    sent: Counter[str] = Counter()
    send = transfers._send

    def counted(transfer: Transfer, *others: Any) -> list[str]:
        sent[transfer.name] += 1
        return send(transfer, *others)

    transfers._send = counted
    leg(folder, ["a", "b"], crash, "fsdp", changes)
    return sent


class Thaws(ds.Callback):
    """Changes the frozen parameters in the middle of the run."""

    def on_step_end(self, ctx: Any) -> None:
        if ctx.state.global_step == 10:
            ctx.model.layers[0].weight.data.mul_(2)


def test_frozen_parameters_are_sent_once(tmp_path: Path) -> None:
    """Once more when they have changed, in the second save of a leg that has resumed. Then hosts are lost."""
    changes = {"frozen": ["layers.0"], "save_in_memory": "InMemory(steps=1, copies=1)"}
    run, uninterrupted = (Run(tmp_path / name, "fsdp", **changes) for name in ("run", "uninterrupted"))
    for crash, saves in ((7, 7), (11, 3)):
        for rank, sent in enumerate(run_ranks(sent_by_leg, 2, tmp_path / "run", crash, changes)):
            assert (sent[f"model/frozen-{rank:05d}.safetensors"], max(sent.values())) == (1, saves)
    run.lose("b")
    assert "fetching" in run.leg("a", "c", crash=13)
    run.lose("a")
    run.leg("d", "c")
    assert run.origins == [None, *(f"memory step-{step:08d}" for step in (7, 11, 13))]
    uninterrupted.leg("a", "b")
    run.expect_equal(uninterrupted)


def test_memory_for_the_copies_is_counted(tmp_path: Path) -> None:
    logged = Run(tmp_path, "fsdp").leg("a", "b", crash=0)
    assert "memory checkpoints: two slots of" in logged and "the rest copies of other hosts' parts" in logged


def refused(folder: Path) -> str:
    in_memory.free_disk = lambda directory: 1000 if collectives.rank() else 1 << 40
    return leg(folder, ["a", "b"], None, "fsdp", {"save_in_memory": "InMemory(steps=1, copies=1)"})


def test_one_host_without_room_refuses_the_run_on_all(tmp_path: Path) -> None:
    for message in run_ranks(refused, 2, tmp_path):
        assert "are free in" in message and "of the host of rank 1" in message
    assert not (tmp_path / "run" / "run.json").exists()


def test_copies_on_one_host_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path, max_steps=1, save_in_memory="InMemory(steps=1, copies=1)").train()
    assert "copies=1, and the ranks are on one host: nothing is copied" in caplog.text


@pytest.mark.parametrize("text", ["InMemory(steps=10, copies=-1)", "InMemory(steps=1) | InMemory(steps=2)"])
def test_a_wrong_number_of_copies_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ds.ConfigurationError):
        ds.TrainingArguments(tmp_path, save_in_memory=text)
    assert ds.TrainingArguments(
        tmp_path, save_in_memory="InMemory(steps=10, copies=1)"
    ).saving_in_memory == ds.InMemory(steps=10, copies=1)


def leg_that_waits(folder: Path) -> str:
    """On rank 0: the message about the wait for a save whose files are written and copied, but not published."""
    messages, publish, reports = Messages(), MemoryPublication.publish, list[str]()
    logging.getLogger("dalsegno").addHandler(messages)
    progress.REPORT_EVERY = 0.05

    def publish_late(publication: MemoryPublication, manifest: Any, advance: Any) -> None:
        messages.texts.clear()
        until(lambda: len(messages.texts) == 2)  # the first may have been on its way
        reports.append(messages.texts[1])
        publish(publication, manifest, advance)

    if collectives.rank() == 0:
        MemoryPublication.publish = publish_late  # type: ignore[method-assign]
    leg(folder, ["a", "b"], None, "fsdp", {"save_in_memory": "InMemory(steps=1, copies=1)", "max_steps": 2})
    return reports[0] if reports else ""


def test_a_wait_counts_what_is_sent_and_received(tmp_path: Path) -> None:
    report, _ = run_ranks(leg_that_waits, 2, tmp_path)
    numbers = re.fullmatch(r"waiting for step-00000001: (.+) of (.+) written", report)
    assert numbers is not None and numbers[1] == numbers[2], report


def queued_transfer(folder: Path) -> list[float]:
    """Rank 1 begins once rank 0 waits for it. On rank 0: the seconds without a byte moved, meanwhile and afterwards."""
    rank, group, progress, ready = collectives.rank(), BackgroundGroup(), Progress(), folder / "ready"
    (folder / f"{rank}").mkdir()
    (folder / f"{rank}" / "file").write_bytes(b"content")
    sent = [Transfer("file", 7, xxhash.xxh3_128_hexdigest(b"content"), 0, 1)]
    idle: list[float] = []

    def queue() -> None:
        progress.pause()
        idle.append(progress.idle)
        ready.touch()

    if rank == 1:
        while not ready.exists():
            time.sleep(0.01)
    failure = transfers.transfer(sent, folder / f"{rank}", group, progress.advance, queue)
    assert failure is None and progress.bytes == 7
    return [*idle, progress.idle]


def test_a_rank_that_queues_for_another_is_not_taken_for_stuck(tmp_path: Path) -> None:
    (queueing, moved), _ = run_ranks(queued_transfer, 2, tmp_path)
    assert queueing == -math.inf and moved >= 0


def transfers_with_a_fault(folder: Path) -> tuple[str | None, bool]:
    """Rank 0 sends a file that changes on the way, one that is gone, and a good one; rank 1 returns what it notices."""
    rank = collectives.rank()
    directory = folder / str(rank)
    directory.mkdir()
    size = (1 << 24) + 5
    content = os.urandom(size) if rank == 0 else b""
    if rank == 0:
        (directory / "changed").write_bytes(content)
        (directory / "good").write_bytes(content)
    digest = collectives.broadcast(xxhash.xxh3_128_hexdigest(content), "digest")
    sent = [Transfer(name, size, digest, 0, 1) for name in ("changed", "gone", "good")]
    if rank == 0:
        (directory / "changed").write_bytes(b"\0" * size)
    failure = transfers.transfer(sent, directory, BackgroundGroup())
    arrived = (directory / "good").read_bytes()
    return failure, xxhash.xxh3_128_hexdigest(arrived) == digest


def test_a_damaged_transfer_is_noticed_and_keeps_no_rank_waiting(tmp_path: Path) -> None:
    (sender, _), (receiver, arrived) = run_ranks(transfers_with_a_fault, 2, tmp_path)
    assert sender is not None and "gone" in sender
    assert receiver is not None and "changed: has checksum" in receiver
    assert arrived
