"""The journal: an event takes effect at once, and counts once it is committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.diloco.journal import Journal
from dalsegno.diloco.state import Joined, Left
from dalsegno.errors import NotRunning
from dalsegno.system import filesystem

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


def test_what_the_disk_refuses_is_committed_later(tmp_path: Path) -> None:
    refused = [OSError("no space")]

    def make_durable() -> None:
        if refused:
            raise refused.pop()

    journal = Journal(tmp_path / "journal")
    journal.record(JOINED, 1, make_durable)
    with pytest.raises(OSError, match="no space"):
        journal.commit()
    assert not (tmp_path / "journal").exists()
    journal.record(LEFT, 2)
    journal.commit()
    assert Journal(tmp_path / "journal").after(0) == [JOINED, LEFT]


def test_events_that_come_during_a_checkpoint_remain(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for number, event in enumerate([JOINED, LEFT, JOINED], 1):
        journal.record(event, number)
    journal.commit()
    journal.record(LEFT, 4)
    assert journal.shorten(1) == [LEFT, JOINED, LEFT]
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
