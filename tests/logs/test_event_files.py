"""Event files: their names are on disk, or a checkpoint that refers to them is not published."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dalsegno.logs.event_files import lengths, make_durable
from dalsegno.system import filesystem
from dalsegno.system.durability import NotDurable


def create(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"an event")


def test_names_whose_fsync_failed_are_never_taken_for_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports it once, for all names in a directory; another fsync would return."""
    create(tmp_path, "tfevents.1.mine", "tfevents.2.mine", "sub/tfevents.3.mine")
    lost = [OSError(errno.EIO, "Input/output error")]

    def lose(what: str, path: Path) -> None:
        if what == "fsync" and path == tmp_path and lost:
            raise lost.pop()

    monkeypatch.setattr(filesystem, "watcher", lose)
    with pytest.raises(NotDurable, match="Input/output error"):
        make_durable(tmp_path, ".mine")
    for archived in ("tfevents.1.mine", "sub/tfevents.3.mine"):
        with pytest.raises(NotDurable, match=r"its name may be lost.*Input/output error.*restart the process"):
            make_durable(tmp_path, ".mine")
        (tmp_path / archived).unlink()
    with pytest.raises(NotDurable, match=r"restart the process.*tfevents\.2"):
        make_durable(tmp_path, ".mine")


def test_each_directory_is_flushed_once_after_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(tmp_path, "tfevents.1.mine", "tfevents.2.mine", "sub/tfevents.3.mine", "tfevents.1.other")
    flushed: list[Path] = []
    monkeypatch.setattr(filesystem, "watcher", lambda what, path: flushed.append(path) if what == "fsync" else None)
    make_durable(tmp_path, ".mine")
    assert {*flushed[:3]} == {tmp_path / name for name in lengths(tmp_path, ".mine")}
    assert sorted(flushed[3:]) == [tmp_path, tmp_path / "sub"]
