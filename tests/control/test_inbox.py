"""Commands as files: each is read once and answered, and no name or content of a file does harm."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dalsegno as ds
from dalsegno.control import Answer, CommandQueue, Inbox, Journal, send


def queue_in(output_dir: Path) -> CommandQueue:
    queue = CommandQueue(Journal(output_dir), ds.TrainingArguments(output_dir))
    queue.resume()
    queue.open()
    return queue


@contextmanager
def served(output_dir: Path) -> Iterator[CommandQueue]:
    queue = queue_in(output_dir)
    inbox = Inbox(output_dir, queue)
    inbox.start()
    try:
        yield queue
    finally:
        queue.close(99)
        inbox.close()


def wait_for(condition: Callable[[], bool]) -> None:
    """An event of the file system; there is nothing to be woken by."""
    waited = threading.Event()
    for _ in range(3000):
        if condition():
            return
        waited.wait(0.01)
    raise AssertionError("nothing happened within 30 s")


def answered(output_dir: Path, name: str) -> dict[str, Any]:
    path = output_dir / "control" / "answers" / name
    wait_for(path.exists)
    return dict(json.loads(path.read_text()))


def put(output_dir: Path, name: str, content: bytes | str) -> Path:
    """As a client does: under its name once it is whole."""
    folder = output_dir / "control"
    folder.mkdir(exist_ok=True)
    (folder / ".part").write_bytes(content.encode() if isinstance(content, str) else content)
    return (folder / ".part").rename(folder / name)


def test_a_request_is_accepted_deleted_and_answered(tmp_path: Path) -> None:
    with served(tmp_path) as queue:
        path = put(tmp_path, "one.json", '{"command": "set", "data": {"save_steps": 5}, "by": "me"}')
        answer = answered(tmp_path, "one.json")
        (entry,) = queue.waiting()
        assert answer == {"id": entry.id, "step": None, "error": None, "kind": None}
        assert (entry.command, entry.data, entry.by) == ("set", {"save_steps": 5}, "me")
        assert not path.exists()
        queue.resolve(queue.record(queue.waiting(), 7))
        wait_for(lambda: answered(tmp_path, "one.json")["step"] == 7)


@pytest.mark.parametrize(
    ("content", "kind", "error"),
    [
        ('{"command": "sett"}', "UnknownName", "unknown command 'sett'; did you mean 'set'?"),
        ('{"command": "set", "data": {"save_steps": -1}}', "ConfigurationError", "needs an integer"),
        ('{"command": "log", "by": "\\u0000"}', "ConfigurationError", "printable"),
        ('{"command": "log", "more": 1}', "ConfigurationError", "more"),
        ('{"command": ["log"]}', "ConfigurationError", "command"),
        ('["log"]', "ConfigurationError", "needs"),
        ("", "ConfigurationError", "needs"),
        (b"\xff\xfe", "ConfigurationError", "needs"),
        ("[" * 60_000, "ConfigurationError", "nested too deeply"),
        ('{"command": "log", "data": {"x": "' + "y" * 70_000 + '"}}', "ConfigurationError", "larger than 65536"),
    ],
)
def test_a_bad_request_is_answered_with_the_reason(tmp_path: Path, content: Any, kind: str, error: str) -> None:
    with served(tmp_path) as queue:
        path = put(tmp_path, "bad.json", content)
        answer = answered(tmp_path, "bad.json")
        assert (answer["id"], answer["kind"]) == (None, kind)
        assert error in answer["error"]
        assert not path.exists()
        assert not queue.is_waiting


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
        max_leaves=8,
    ).map(lambda data: json.dumps({"command": "set", "data": data}).encode())
)
def test_no_content_ends_the_service(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("inbox")
    inbox = Inbox(folder, queue_in(folder))
    inbox._prepare()
    put(folder, "any.json", content)
    inbox._look()
    assert answered(folder, "any.json")["id"] is None
    put(folder, "next.json", '{"command": "log"}')
    inbox._look()
    assert answered(folder, "next.json")["error"] is None


@pytest.mark.parametrize("name", ["a b.json", "ä.json", "-rf.json", "x" * 120 + ".json", os.fsdecode(b"\xff.json")])
def test_a_hostile_name_is_refused(tmp_path: Path, name: str) -> None:
    with served(tmp_path) as queue:
        path = put(tmp_path, name, '{"command": "abort"}')
        wait_for(lambda: not path.exists())
        wait_for(lambda: len([*(tmp_path / "control" / "answers").glob("refused-*.json")]) == 1)
        (answer,) = (tmp_path / "control" / "answers").iterdir()
        assert "its name is not of letters" in json.loads(answer.read_text())["error"]
        assert not queue.is_waiting


def test_what_is_not_a_file_is_neither_followed_nor_deleted(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"command": "abort"}')
    with served(tmp_path) as queue:
        folder = tmp_path / "control"
        (folder / "link.json").symlink_to(secret)
        (folder / "folder.json").mkdir()
        os.mkfifo(folder / "pipe.json")
        for name in ("link.json", "folder.json", "pipe.json"):
            assert answered(tmp_path, name)["id"] is None
        put(tmp_path, "after.json", '{"command": "log"}')
        assert answered(tmp_path, "after.json")["id"]
        assert [entry.command for entry in queue.waiting()] == ["log"]
    assert secret.exists()
    assert (folder / "folder.json").is_dir()


def test_a_folder_that_is_a_link_is_not_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "answers").mkdir(parents=True)
    (tmp_path / "control").symlink_to(elsewhere)
    with served(tmp_path) as queue:
        put(tmp_path, "a.json", '{"command": "abort"}')
        wait_for(lambda: "is not a folder" in caplog.text)
        assert not queue.is_waiting
    assert (elsewhere / "a.json").exists()
    assert caplog.text.count("commands are not read") == 1


def test_what_was_sent_before_the_leg_is_refused(tmp_path: Path) -> None:
    """A stop of last week does not stop the job of today."""
    put(tmp_path, "old.json", '{"command": "abort"}')
    with served(tmp_path) as queue:
        assert "no leg was running" in answered(tmp_path, "old.json")["error"]
        assert not queue.is_waiting


def test_the_end_of_the_leg_answers_everybody(tmp_path: Path) -> None:
    with served(tmp_path):
        put(tmp_path, "one.json", '{"command": "save_checkpoint"}')
        assert answered(tmp_path, "one.json")["error"] is None
    assert answered(tmp_path, "one.json")["error"] == "the leg ended after step 99 first"


# --- the client -------------------------------------------------------------------------------------------------------


def test_a_client_sends_and_waits_for_the_effect(tmp_path: Path) -> None:
    answers: list[Answer] = []
    with served(tmp_path) as queue:
        client = threading.Thread(target=lambda: answers.append(send(tmp_path, "log", by="me", for_effect=True)))
        client.start()
        wait_for(lambda: queue.is_waiting)
        (entry,) = queue.waiting()
        queue.resolve(queue.record([entry], 3))
        client.join()
        assert answers == [Answer(entry.id, 3)]
        refused = send(tmp_path, "gracefulstop", by="me")
        assert (refused.kind, refused.is_final) == ("UnknownName", True)
        assert send(tmp_path, "evaluate", by="me") == Answer(queue.waiting()[0].id)


def test_a_client_of_a_job_that_is_gone_withdraws_its_command(tmp_path: Path) -> None:
    with pytest.raises(ds.NotRunning, match="no job has read commands here"):
        send(tmp_path, "abort", by="me")
    (tmp_path / "control").mkdir()
    with pytest.raises(ds.NotRunning, match="withdrawn"):
        send(tmp_path, "abort", by="me", timeout=0.1)
    assert list((tmp_path / "control").iterdir()) == []
