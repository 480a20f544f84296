"""CommandQueue: acceptance is durable, each command is answered once, in order, from any thread."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

import dalsegno as ds
from dalsegno.control import Command, CommandQueue, Journal, Outcome


def queue_in(output_dir: Path) -> CommandQueue:
    return CommandQueue(Journal(output_dir), ds.TrainingArguments(output_dir))


@pytest.fixture
def queue(tmp_path: Path) -> CommandQueue:
    queue = queue_in(tmp_path)
    queue.resume()
    queue.open()
    return queue


def take_effect(queue: CommandQueue, step: int) -> list[str]:
    """Carry out all that waits, as the engine does."""
    acting = queue.record(queue.waiting(), step)
    queue.resolve(acting)
    return [entry.command for entry in acting]


def test_an_accepted_command_is_on_disk_before_it_is_acknowledged(queue: CommandQueue, tmp_path: Path) -> None:
    ticket = queue.submit("set", {"save_steps": 5}, by="me")
    (line,) = (json.loads(line) for line in (tmp_path / "control.jsonl").open())
    assert line.pop("time") > 1e9
    assert line == {"kind": "accepted", "id": ticket.id, "by": "me", "command": "set", "data": {"save_steps": 5}}
    assert ticket.wait(0) is None
    assert queue.ticket(ticket.id) is ticket


def test_the_ticket_tells_the_step_of_effect(queue: CommandQueue) -> None:
    first, second = queue.submit("log", by="me"), queue.submit("evaluate", by="you")
    assert take_effect(queue, 7) == ["log", "evaluate"]
    assert first.wait(0) == second.wait(0) == Outcome(step=7)
    assert not queue.is_waiting


def test_a_waiting_thread_is_woken(queue: CommandQueue) -> None:
    outcomes: list[Outcome | None] = []
    ticket = queue.submit("log", by="me")
    thread = threading.Thread(target=lambda: outcomes.append(ticket.wait(60)))
    thread.start()
    take_effect(queue, 3)
    thread.join()
    assert outcomes == [Outcome(3)]


def test_many_threads_submit_at_once(queue: CommandQueue, tmp_path: Path) -> None:
    """The file has the order of the queue, and no line is mixed with another."""
    threads = [
        threading.Thread(target=lambda: [queue.submit("log", by=threading.current_thread().name) for _ in range(10)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = [json.loads(line)["id"] for line in (tmp_path / "control.jsonl").open()]
    assert ids == [entry.id for entry in queue.waiting()]
    assert len({*ids}) == 80


@pytest.mark.parametrize("by", ["", "a\nb", "x" * 201, 3, "signal", "clock"])
def test_the_sender_has_a_name_of_its_own(queue: CommandQueue, by: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=r"printable|reserved"):
        queue.submit("log", by=by)


def test_what_the_run_cannot_carry_out_is_refused_before_it_is_written(tmp_path: Path) -> None:
    def refuse(command: Command) -> None:
        raise ds.ConfigurationError(f"{command}: not in this run")

    queue = CommandQueue(Journal(tmp_path), ds.TrainingArguments(tmp_path), refuse)
    queue.open()
    with pytest.raises(ds.ConfigurationError, match="set save_steps=5: not in this run"):
        queue.submit("set", {"save_steps": 5}, by="me")
    assert not (tmp_path / "control.jsonl").exists()


def test_only_rank_zero_accepts(tmp_path: Path) -> None:
    queue = CommandQueue(Journal(tmp_path), ds.TrainingArguments(tmp_path), rank=1)
    with pytest.raises(ds.ConfigurationError, match="this is rank 1"):
        queue.submit("log", by="me")


def test_without_a_leg_nothing_is_accepted(tmp_path: Path) -> None:
    with pytest.raises(ds.NotRunning, match="no leg is running"):
        queue_in(tmp_path).submit("log", by="me")


def test_a_leg_that_ends_answers_those_who_wait(queue: CommandQueue, tmp_path: Path) -> None:
    stop, change = queue.submit("graceful_stop", by="me"), queue.submit("set", {"save_steps": 5}, by="me")
    queue.close(9)
    for ticket, more in ((stop, ""), (change, "; the next leg carries it out at the end of its first step")):
        assert ticket.wait(0) == Outcome(None, "the leg ended after step 9 first" + more)
    with pytest.raises(ds.NotRunning, match="ends after step 9"):
        queue.submit("log", by="me")
    later = queue_in(tmp_path)
    later.resume()
    assert [entry.command for entry in later.waiting()] == ["set"]


def test_a_killed_leg_leaves_what_the_next_one_carries_out(queue: CommandQueue, tmp_path: Path) -> None:
    done = queue.submit("log", by="me")
    take_effect(queue, 2)
    lost, kept = queue.submit("abort", by="me"), queue.submit("evaluate", by="me")
    later = queue_in(tmp_path)
    assert [(entry.id, entry.step) for entry in later.read()] == [(done.id, 2)]
    later.resume()
    assert [entry.id for entry in later.waiting()] == [kept.id]
    assert later.ticket(done.id).wait(0) == Outcome(2)
    assert later.ticket(lost.id).wait(0) == Outcome(None, "the leg was killed before it took effect")
    later.open()
    take_effect(later, 5)
    assert later.ticket(kept.id).wait(0) == Outcome(5)
    with pytest.raises(ds.NotFound):
        later.ticket("0123")
    assert [entry.step for entry in queue_in(tmp_path).read()] == [2, 5]


def test_going_back_drops_what_waits(queue: CommandQueue, tmp_path: Path) -> None:
    kept = queue.submit("log", by="me")
    take_effect(queue, 2)
    queue.submit("log", by="me")
    take_effect(queue, 5)
    queue.submit("log", by="me")
    later = queue_in(tmp_path)
    assert [entry.id for entry in later.read(rewind_to=2)] == [kept.id]
    assert len(queue_in(tmp_path).read()) == 2  # reading alone goes nowhere
    later.resume(rewind_to=2)
    assert not later.is_waiting
    assert [entry.id for entry in queue_in(tmp_path).read()] == [kept.id]
