"""control.jsonl: what is read back is what was written, whatever a kill or a stranger did to its end."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.logs.journal import Journal, JournalEntry
from dalsegno.system import filesystem


def entry(id: str, command: str = "set", **data: object) -> JournalEntry:
    return JournalEntry(id, 1.5, "me", command, dict(data))


def written(output_dir: Path) -> Journal:
    """Two commands that took effect, one that was dropped, and one that is pending."""
    journal = Journal(output_dir)
    first, second = entry("a", save_steps=5), entry("b", learning_rate=0.1)
    for each in (first, second, entry("c", "abort"), entry("d", "evaluate")):
        journal.accept(each)
    second.script = {"learning_rate": 0.2}
    journal.act([second], 3)
    journal.act([first], 4)
    journal.drop({"c": "too late"})
    journal.override({"a": ["save_steps"]})
    return journal


def test_reads_what_became_of_each_command_in_the_order_of_effect(tmp_path: Path) -> None:
    entries = written(tmp_path).read()
    assert [(each.id, each.step, each.error, each.is_pending) for each in entries] == [
        ("b", 3, None, False),
        ("a", 4, None, False),
        ("c", None, "too late", False),
        ("d", None, None, True),
    ]
    assert (entries[0].script, entries[1].overridden) == ({"learning_rate": 0.2}, ["save_steps"])
    assert [json.loads(line)["kind"] for line in (tmp_path / "control.jsonl").open()] == [
        *["accepted"] * 4,
        *["acted"] * 2,
        "dropped",
        "overridden",
    ]


def test_going_back_abandons_what_came_later(tmp_path: Path) -> None:
    journal = written(tmp_path)
    journal.rewind(3)
    journal.accept(entry("e", "log"))
    assert [(each.id, each.error) for each in journal.read()] == [
        ("b", None),
        ("a", "the run was taken back to step 3"),
        ("c", "too late"),
        ("d", "the run was taken back to step 3"),
        ("e", None),
    ]


def test_without_a_command_there_is_no_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.read() == []
    journal.rewind(0)
    journal.drop({})
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=40)
@given(st.data())
def test_a_torn_last_line_is_skipped_and_repaired(data: st.DataObject) -> None:
    """Cut anywhere: all whole lines are read, the next one can be written, and nothing else is lost."""
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder)).path
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, 1200))  # beyond its end: nothing is cut
        path.write_bytes(whole[:cut] + data.draw(st.sampled_from([b"", b"\xff\x00", b'{"kind": "acc'])))
        journal = Journal(Path(folder))
        before = journal.read()
        journal.accept(entry("z", "log"))
        assert [each.id for each in journal.read()] == [*(each.id for each in before), "z"]
        kept = [line for line in whole[:cut].split(b"\n")[:-1] if line]
        assert path.read_bytes().split(b"\n")[: len(kept)] == kept
        assert all(json.loads(line) for line in path.read_bytes().splitlines())


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=40) | st.text(max_size=40).map(str.encode), max_size=5))
def test_a_strangers_lines_are_skipped(lines: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal = written(Path(folder))
        with journal.path.open("ab") as file:
            file.writelines(line + b"\n" for line in lines)
        assert [each.id for each in journal.read()] == ["b", "a", "c", "d"]


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "acted", "id": "a", "time": 1, "step": -1, "script": {}}',
        '{"kind": "acted", "id": "unknown", "time": 1, "step": 1, "script": {}}',
        '{"kind": "accepted", "id": "z", "time": 1, "by": "me", "command": "set", "data": []}',
        '{"kind": ["accepted"]}',
        '{"kind": "of a newer version", "id": "a"}',
        "[" * 5000,
    ],
)
def test_malformed_lines_are_skipped(tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture) -> None:
    journal = written(tmp_path)
    with journal.path.open("a") as file:
        file.write(line + "\n")
    assert [each.id for each in journal.read()] == ["b", "a", "c", "d"]
    assert "control.jsonl" in caplog.text


def test_a_last_line_without_its_newline_stays(tmp_path: Path) -> None:
    """An editor has removed it."""
    journal = written(tmp_path)
    journal.accept(entry("e", "log"))
    journal.path.write_bytes(journal.path.read_bytes()[:-1])
    journal.accept(entry("f", "log"))
    assert [each.id for each in journal.read()][-2:] == ["e", "f"]


@contextmanager
def full_disk(operation: str) -> Iterator[None]:
    def refuse(called: str, path: Path) -> None:
        if called == operation:
            raise OSError(errno.ENOSPC, "No space left on device")

    filesystem.watcher = refuse
    try:
        yield
    finally:
        filesystem.watcher = None


@pytest.mark.parametrize("operation", ["write", "fsync"])
def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path, operation: str) -> None:
    journal = written(tmp_path)
    before = journal.path.read_bytes()
    with full_disk(operation), pytest.raises(OSError, match="No space left"):
        journal.accept(entry("e"))
    assert journal.path.read_bytes() == before


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("mine\n")
    (tmp_path / "control.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        Journal(tmp_path).accept(entry("a"))
    assert (tmp_path / "elsewhere").read_text() == "mine\n"
