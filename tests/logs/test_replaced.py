"""A log whose file is deleted, moved, replaced or cut while it is written, and what a later rewind makes of it."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.errors import ConfigurationError
from dalsegno.logs import RecordLog
from logs.sample import KEPT, LOST, fill, record, steps

pytestmark = pytest.mark.parametrize("suffix", [".jsonl", ".json"])

LAST = KEPT + LOST


def delete(path: Path) -> None:
    path.unlink()


def rotate(path: Path) -> None:
    path.rename(path.with_name("rotated"))


def save_older_copy(path: Path) -> None:
    """As an editor that has read the file two records ago: it writes a new one, and gives it the name."""
    lines = path.read_bytes().splitlines(keepends=True)
    records = [line for line in lines if b"global_step" in line][:-2]
    text = b"".join(records) if path.suffix == ".jsonl" else b"[\n" + b"".join(records).rstrip(b",\n") + b"\n]\n"
    path.with_suffix(".tmp").write_bytes(text)
    path.with_suffix(".tmp").replace(path)


def save_same(path: Path) -> None:
    path.with_suffix(".tmp").write_bytes(path.read_bytes())
    path.with_suffix(".tmp").replace(path)


def cut(path: Path) -> None:
    """As ``> train.jsonl`` does, or a log rotation that copies and truncates."""
    os.truncate(path, 0)


def put_another_there(path: Path) -> None:
    path.with_suffix(".tmp").write_text("what somebody else has written there, and wants to find again\n" * 50)
    path.with_suffix(".tmp").replace(path)


def written(log: RecordLog) -> None:
    log.open()
    fill(log, 0, LAST)


@pytest.mark.parametrize(
    ("change", "left", "warning"),
    [
        (delete, [], "no longer exists; 9 records are lost, starting it again"),
        (rotate, [], "no longer exists; 9 records are lost, starting it again"),
        (save_same, list(range(LAST)), None),
        (save_older_copy, list(range(LAST - 2)), "2 of 9 records are missing"),
        (cut, [], "9 of 9 records are missing"),
    ],
)
def test_what_is_written_next_is_where_it_is_looked_for(
    log: RecordLog,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Path], None],
    left: list[int],
    warning: str | None,
) -> None:
    written(log)
    change(log.path)
    with caplog.at_level(logging.WARNING):
        fill(log, LAST, 2)
    assert steps(log.path) == [*left, LAST, LAST + 1]
    assert log.state()["records"] == len(left) + 2
    assert len(caplog.messages) == (warning is not None), "warned once"
    assert warning is None or warning in caplog.messages[0]


def test_the_file_of_somebody_else_stays(log: RecordLog, suffix: str) -> None:
    written(log)
    path = log.path
    put_another_there(path)
    theirs = path.read_bytes()
    fill(log, LAST, 2)
    assert path.read_bytes() == theirs
    assert log.path.name == f"train-2{suffix}"
    assert steps(log.path) == [LAST, LAST + 1]


def test_bytes_that_somebody_has_added_are_kept_aside(log: RecordLog, tmp_path: Path) -> None:
    written(log)
    with log.path.open("ab") as file:
        file.write(b"a note\n")
    log.append(record(LAST))
    assert steps(log.path) == list(range(LAST + 1))
    [aside] = (tmp_path / "logs/rewound").iterdir()
    assert aside.read_bytes().endswith(b"a note\n")


@pytest.mark.parametrize("more", [1, 30], ids=["shorter than the checkpoint knew", "longer"])
def test_a_resume_from_before_the_change_sets_aside_what_came_after(log: RecordLog, tmp_path: Path, more: int) -> None:
    """The new file holds nothing that the older checkpoint knew: all of it is of a timeline that was left."""
    log.open()
    fill(log, 0, KEPT)
    before = log.state()
    fill(log, KEPT, LOST)
    log.path.unlink()
    fill(log, LAST, more)
    left = log.path.read_bytes()
    log.close()
    report = log.open(before)
    assert report.missing_records == KEPT
    fill(log, KEPT, 2)
    assert steps(log.path) == [KEPT, KEPT + 1]
    assert log.path.name == f"train{log.path.suffix}"
    [aside] = (tmp_path / "logs/rewound").iterdir()
    assert aside.read_bytes() in left
    assert b"global_step" in aside.read_bytes()


def test_a_resume_from_after_the_change_goes_on_in_the_new_file(log: RecordLog) -> None:
    written(log)
    log.path.unlink()
    fill(log, LAST, 3)
    after = log.state()
    fill(log, LAST + 3, 1)
    log.close()
    assert log.open(after).action == "rewound"
    fill(log, LAST + 3, 1)
    assert steps(log.path) == list(range(LAST, LAST + 4))


def test_a_resume_from_before_an_older_copy_came_back_keeps_what_the_checkpoint_knew(log: RecordLog) -> None:
    log.open()
    fill(log, 0, LAST)
    before = log.state()
    save_older_copy(log.path)
    fill(log, LAST, 1)
    log.close()
    assert log.open(before).missing_records == 2
    fill(log, LAST, 1)
    assert steps(log.path) == [*range(LAST - 2), LAST]


def test_a_new_file_has_the_header_too(tmp_path: Path, suffix: str) -> None:
    log = RecordLog(f"train{suffix}", tmp_path, lambda: {"global_step": -1})
    log.open()
    fill(log, 0, 2)
    log.path.unlink()
    fill(log, 2, 2)
    assert steps(log.path) == [-1, 2, 3]


def test_a_log_that_is_a_link_is_not_followed(log: RecordLog, tmp_path: Path) -> None:
    mine = tmp_path / "thesis.txt"
    mine.write_text("three years of work")
    log.path.parent.mkdir()
    log.path.symlink_to(mine)
    with pytest.raises(OSError, match="this is a symbolic link, which is not followed"):
        log.open()
    assert mine.read_text() == "three years of work"


def test_a_log_that_is_a_fifo_does_not_hang(log: RecordLog) -> None:
    written(log)
    state = log.state()
    log.close()
    log.path.unlink()
    os.mkfifo(log.path)
    for saved in (None, state):
        with pytest.raises(ConfigurationError, match="is not a regular file; move it away"):
            log.open(saved)
