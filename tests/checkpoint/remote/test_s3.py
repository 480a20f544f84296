"""A run on S3: killed during an upload, disconnected, continued elsewhere. A real server, real processes."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest

from checkpoint.remote import jobs
from checkpoint.remote.s3 import S3
from checkpoint.remote.there import steps_at, training
from dalsegno.checkpoint.remote import store_mirror
from dalsegno.checkpoint.remote.store import Store
from dalsegno.testing import Ranks, run_ranks, start_ranks


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run of ten steps that nothing has befallen, on this disk: its folder, and what it has come to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, run_ranks(jobs.train, 1, folder, None, 10)[0]


@pytest.mark.parametrize(
    ("part", "count"),
    [
        ("logs/array.json", 1),
        ("step-00000008/", 1),
        ("step-00000008/", 4),
        ("step-00000008/manifest.json", 1),
        ("step-00000006/", 2),
    ],
    ids=["log", "first", "fourth", "manifest", "older"],
)
def test_a_new_host_resumes_after_a_kill_during_an_upload(
    s3: S3, url: str, tmp_path: Path, whole: tuple[Path, Any], part: str, count: int
) -> None:
    """The process dies when the server is sent a file of such a name for the ``count``-th time."""
    run_ranks(jobs.train, 1, url, tmp_path / "one", 4)
    left = itertools.count(count - 1, -1)
    ranks: Ranks

    def kill(method: str, path: str, query: str) -> None:
        if method == "PUT" and part in path and next(left) == 0:
            ranks.kill()

    s3.watch = kill
    ranks = start_ranks(jobs.train, 1, url, tmp_path / "one", 8)
    (end,) = ranks.wait()
    assert end.was_killed, end
    s3.reset()
    whole_there = steps_at(Store(url))
    (second,) = run_ranks(jobs.train, 1, url, tmp_path / "two", 10)
    unbroken, outcome = whole
    assert second["from"] == whole_there[-1] and whole_there[:2] == [2, 4]
    assert second["weights"] == outcome["weights"]
    for name in ("train.jsonl", "array.json"):
        assert training(tmp_path / "two/logs" / name) == training(unbroken / "logs" / name)
    assert steps_at(Store(url))[-1] == 10


def test_two_ranks(s3: S3, url: str, tmp_path: Path) -> None:
    run_ranks(jobs.train_fsdp, 2, url, tmp_path / "one", 4)
    second, _ = run_ranks(jobs.train_fsdp, 2, url, tmp_path / "two", 8)
    whole, _ = run_ranks(jobs.train_fsdp, 2, tmp_path / "whole", None, 8)
    assert second["from"] == 4 and second["weights"] == whole["weights"]


def test_large_files_are_sent_in_parts_and_half_a_file_is_ignored(s3: S3, url: str, tmp_path: Path) -> None:
    parts: list[str] = []
    ranks: Ranks

    def kill(method: str, path: str, query: str) -> None:
        if method == "PUT" and "partNumber=" in query:
            parts.append(path)
            if "step-00000002/" in path:
                ranks.kill()

    s3.watch = kill
    ranks = start_ranks(jobs.train_large, 1, url, tmp_path / "one", 2)
    (end,) = ranks.wait()
    assert end.was_killed
    assert sum("step-00000001/" in path for path in parts) == 3
    assert not any("step-00000002/model" in name for name in Store(url).sizes())
    s3.reset()
    (second,) = run_ranks(jobs.train_large, 1, url, tmp_path / "two", 2)
    (whole,) = run_ranks(jobs.train_large, 1, f"{url}-whole", tmp_path / "whole", 2)
    assert second == {**whole, "from": 1}


def test_an_outage_ends_no_training_and_costs_no_checkpoint(
    s3: S3, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(method: str, path: str, query: str) -> None:
        s3.is_down = s3.is_down or (method == "PUT" and "checkpoints/step-" in path)

    s3.watch = fail
    with caplog.at_level(logging.WARNING, "dalsegno"), monkeypatch.context() as patched:
        patched.setattr(store_mirror, "PATIENCE", 2.0)  # which is too short for a server of a busy machine
        assert jobs.train(url, tmp_path, 6)["step"] == 6
    messages = [record.getMessage() for record in caplog.records]
    assert sum("could not be written to" in each for each in messages) == 1
    assert "could not be sent: step-00000006" in messages[-2] and str(tmp_path) in messages[-2]
    assert "its lock could not be released" in messages[-1]
    s3.reset()
    assert jobs.train(url, tmp_path, 6)["from"] == 6
    assert steps_at(Store(url)) == [2, 4, 6]


def test_nothing_is_trained_while_the_url_cannot_be_read(s3: S3, url: str, tmp_path: Path) -> None:
    s3.is_down = True
    with pytest.raises(OSError) as raised:
        jobs.train(url, tmp_path, 2)
    notes: Any = raised.value.__notes__
    assert f"while reading output_dir={url!r}; nothing was trained" in notes
    assert not (tmp_path / "checkpoints").exists()
