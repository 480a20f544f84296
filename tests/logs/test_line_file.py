"""An append-only file of JSON lines: what was appended is on disk, with the file's name, or the append has raised."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dalsegno.logs.line_file import LineFile
from dalsegno.system import durability, filesystem
from dalsegno.system.durability import NotDurable


def lines_of(path: Path) -> list[Any]:
    return [*LineFile(path, json.loads).read()]


def append(file: LineFile[Any], number: int) -> None:
    file.append([{"number": number}])


def replace(file: LineFile[Any], number: int) -> None:
    file.replace([{"number": number}])


@pytest.mark.parametrize("write", [append, replace])
def test_a_name_whose_fsync_failed_is_never_taken_for_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[LineFile[Any], int], None]
) -> None:
    """The kernel reports it once; another fsync of the directory would return."""
    lost = [OSError(errno.EIO, "Input/output error")]

    def lose(what: str, path: Path) -> None:
        if what == "fsync" and path == tmp_path and lost:
            raise lost.pop()

    path = tmp_path / "lines.jsonl"
    monkeypatch.setattr(filesystem, "watcher", lose)
    file = LineFile(path, json.loads)
    with pytest.raises(NotDurable, match="Input/output error"):
        write(file, 1)
    monkeypatch.chdir(tmp_path)
    for same in (file, LineFile(path, json.loads), LineFile(Path("lines.jsonl"), json.loads)):
        for again in (append, replace):
            with pytest.raises(NotDurable, match=r"its name may be lost.*Input/output error.*restart the process"):
                again(same, 2)
    assert not lost
    assert lines_of(path) == ([] if write is append else [{"number": 1}])
    monkeypatch.setattr(durability, "_failures", {})  # as in another process
    append(LineFile(path, json.loads), 3)
    assert lines_of(path)[-1] == {"number": 3}


def test_each_process_flushes_the_name_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that created the file may have been killed before."""
    flushed: list[Path] = []
    monkeypatch.setattr(filesystem, "watcher", lambda what, path: flushed.append(path) if what == "fsync" else None)
    path = tmp_path / "lines.jsonl"
    for number in (1, 2):
        file = LineFile(path, json.loads)
        append(file, number)
        append(file, number)
        assert flushed == [path, tmp_path, path]
        flushed.clear()


def move_away(path: Path) -> None:
    path.rename(path.with_name("moved"))


def put_back_a_copy(path: Path) -> None:
    path.with_name("copy").write_bytes(path.read_bytes())
    path.with_name("copy").rename(path)


@pytest.mark.parametrize("change", [move_away, Path.unlink, put_back_a_copy])
def test_the_name_of_another_file_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    file = LineFile(tmp_path / "lines.jsonl", json.loads)
    append(file, 1)
    change(file.path)
    flushed: list[Path] = []
    monkeypatch.setattr(filesystem, "watcher", lambda what, path: flushed.append(path) if what == "fsync" else None)
    append(file, 2)
    append(file, 3)
    assert flushed == [file.path, tmp_path, file.path]


def test_a_full_disk_is_not_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(what: str, path: Path) -> None:
        if what == "write":
            raise OSError(errno.ENOSPC, "No space left on device")

    file = LineFile(tmp_path / "lines.jsonl", json.loads)
    for write in (append, replace):
        with monkeypatch.context() as patch:
            patch.setattr(filesystem, "watcher", refuse)
            with pytest.raises(OSError, match="No space left"):
                write(file, 1)
    append(file, 2)
    assert lines_of(file.path) == [{"number": 2}]


class Refused(OSError):
    """Raised before an operation."""


@pytest.mark.parametrize("is_killed", [False, True], ids=["refused", "killed"])
def test_what_was_acknowledged_stays_whichever_operation_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """The file is there, with a line whose end an editor has removed. A killed process does nothing more, either."""
    acknowledged: list[Any] = []
    for last in range(8):
        path = tmp_path / f"{last}.jsonl"
        path.write_text('{"number": 1}')
        operations: list[str] = []

        def stop(what: str, path: Path, last: int = last, operations: list[str] = operations) -> None:
            operations.append(what)
            if len(operations) > last if is_killed else len(operations) == last + 1:
                raise Refused(errno.EIO, what)

        with monkeypatch.context() as patch:
            patch.setattr(filesystem, "watcher", stop)
            patch.setattr(durability, "_failures", {})  # of this process; another one appends below
            try:
                append(LineFile(path, json.loads), 2)
                acknowledged.append(lines_of(path))
            except (Refused, NotDurable):
                possible = [[{"number": 1}], [{"number": 1}, {"number": 2}]]
                assert lines_of(path) in (possible if is_killed else possible[:1]), operations
        append(LineFile(path, json.loads), 3)
        assert lines_of(path)[0] == {"number": 1}
        assert lines_of(path)[-1] == {"number": 3}
    assert acknowledged and all(each == [{"number": 1}, {"number": 2}] for each in acknowledged)
    assert len(acknowledged) < 8
