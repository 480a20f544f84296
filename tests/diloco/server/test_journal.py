"""The journal: an event takes effect at once, and counts once it is committed."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest

from dalsegno.diloco.server.journal import Journal
from dalsegno.diloco.server.rounds import Accepted, Event, Joined, Left
from dalsegno.errors import NotRunning, StateMismatch
from dalsegno.system import filesystem
from diloco.scenes import submission_of

JOINED, LEFT = Joined("w0", 0, 0, False), Left("w0")


def test_an_event_is_written_after_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(filesystem, "watcher", lambda what, path: order.append(what))
    journal = Journal(tmp_path / "journal")
    journal.record(JOINED, 1, lambda: order.append("needed"))
    journal.record(LEFT, 2, lambda: order.append("needed too"))
    assert not order
    journal.commit()
    assert order[:4] == ["needed", "needed too", "write", "fsync"]
    journal.commit()
    assert order.count("write") == 1
    assert Journal(tmp_path / "journal").after(0) == [JOINED, LEFT]


def test_what_the_disk_refuses_is_committed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(what: str, path: Path) -> None:
        if what == "write":
            raise OSError(errno.ENOSPC, "No space left on device")

    journal = Journal(tmp_path / "journal")
    journal.record(JOINED, 1)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(filesystem, "watcher", refuse)
        journal.commit()
    journal.record(LEFT, 2)
    journal.commit()
    assert Journal(tmp_path / "journal").after(0) == [JOINED, LEFT]


def test_two_events_of_one_number_are_refused(tmp_path: Path) -> None:
    """The same one twice is not: a write that could not be undone, and was repeated."""
    journal = Journal(tmp_path / "journal")
    for event in (JOINED, JOINED):
        journal.record(event, 1)
        journal.commit()
    assert journal.after(0) == [JOINED]
    journal.record(LEFT, 1)
    journal.commit()
    with pytest.raises(StateMismatch, match="event 1 is there twice"):
        journal.after(0)


PAGE = 512


def written(path: Path, *batches: int) -> list[Event]:
    """A journal of batches of so many events."""
    journal, events = Journal(path), list[Event]()
    for size in batches:
        for _ in range(size):
            events.append(Accepted(submission_of(f"w{len(events)}", 1, 0)))
            journal.record(events[-1], len(events))
        journal.commit()
    return events


def with_holes(data: bytes, begin: int, pages: Iterable[int]) -> bytes:
    """What is on disk if these pages of an append at ``begin`` are not."""
    torn = bytearray(data)
    for page in pages:
        first, end = max(begin, page * PAGE), min(len(data), (page + 1) * PAGE)
        torn[first:end] = bytes(max(0, end - first))
    return bytes(torn)


@pytest.mark.parametrize("size", [1, 9])
def test_a_power_cut_may_leave_holes_in_the_last_batch(tmp_path: Path, size: int) -> None:
    path = tmp_path / "journal"
    events = written(path, 2, size)
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    begin = len(lines[0] + lines[1])
    pages = range(begin // PAGE, -(-len(data) // PAGE))
    for lost in itertools.chain.from_iterable(itertools.combinations(pages, count) for count in (0, 1, 2, len(pages))):
        path.write_bytes(with_holes(data, begin, lost))
        found = Journal(path).recover(0)
        assert found == events[: len(found)]
        assert len(found) == len(events) if not lost else 2 <= len(found) < len(events)
        journal = Journal(path)  # and continues
        journal.record(LEFT, len(found) + 1)
        journal.commit()
        assert Journal(path).recover(0) == [*found, LEFT]
    removed = sorted(tmp_path.glob("journal.torn.*"))
    assert removed and data.endswith(lines[-1]) and b"\0" in removed[0].read_bytes()


def test_a_hole_before_a_later_batch_is_damage(tmp_path: Path) -> None:
    """What the later one follows on was acknowledged."""
    path = tmp_path / "journal"
    written(path, 2, 9, 1)
    data = path.read_bytes()
    path.write_bytes(with_holes(data, 0, [2]))
    for number in (0, 11):  # of the last event in a checkpoint
        with pytest.raises(StateMismatch, match="is damaged"):
            Journal(path).recover(number)
    assert path.read_bytes() == with_holes(data, 0, [2])


def test_events_that_come_during_a_checkpoint_remain(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for number, event in enumerate([JOINED, LEFT, JOINED], 1):
        journal.record(event, number)
    journal.commit()
    journal.record(LEFT, 4)
    journal.shorten(1)
    assert Journal(tmp_path / "journal").after(1) == [LEFT, JOINED]
    journal.commit()
    assert Journal(tmp_path / "journal").after(1) == [LEFT, JOINED, LEFT]


def test_a_closed_journal_is_left_alone(tmp_path: Path) -> None:
    """It may be another server's by now; what it did not write is not acknowledged."""
    journal = Journal(tmp_path / "journal")
    journal.record(JOINED, 1)
    journal.commit()
    journal.record(LEFT, 2)
    journal.close()
    with pytest.raises(NotRunning, match="start it again"):
        journal.commit()
    assert Journal(tmp_path / "journal").after(0) == [JOINED]
