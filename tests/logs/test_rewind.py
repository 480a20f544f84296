"""Every row of the rewind table, in both formats, also when the rewind itself is killed."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dalsegno.errors import StateMismatch
from dalsegno.logs import RecordLog
from dalsegno.system import filesystem
from logs.sample import KEPT, begun, fill, record, steps

pytestmark = pytest.mark.parametrize("suffix", [".jsonl", ".json"])


class Killed(BaseException):
    """Stands for SIGKILL: from its first raise on, no file operation happens any more."""


def archived_bytes(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(root.glob("logs/rewound/*")))


def test_tail_matches_and_file_is_longer(log: RecordLog, tmp_path: Path) -> None:
    state = begun(log)
    rest = log.path.read_bytes()[state["offset"] :]
    report = log.open(state)
    assert report.action == "rewound"
    assert report.archived == tmp_path / "logs/rewound" / f"{log.path.name}.0001"
    assert report.archived.read_bytes() == rest
    assert steps(log.path) == list(range(KEPT))
    fill(log, KEPT, 2)
    assert steps(log.path) == list(range(KEPT + 2))
    assert log.state()["records"] == KEPT + 2


def test_a_second_rewind_has_an_archive_of_its_own(log: RecordLog, tmp_path: Path) -> None:
    state = begun(log)
    for _ in range(2):
        log.open(state)
        fill(log, KEPT, 1)
        log.close()
    log.open(state)
    assert len(list((tmp_path / "logs/rewound").iterdir())) == 3


def test_nothing_is_cut_before_its_archive_is_on_the_disk(log: RecordLog, monkeypatch: pytest.MonkeyPatch) -> None:
    state = begun(log)
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(filesystem, "watcher", lambda operation, path: seen.append((operation, path.name)))
    log.open(state)
    archive = [
        ("write", f".{log.path.name}.0001.tmp"),
        ("fsync", f".{log.path.name}.0001.tmp"),
        ("rename", f"{log.path.name}.0001"),
    ]
    positions = [seen.index(operation) for operation in [*archive, ("fsync", "rewound"), ("truncate", log.path.name)]]
    assert positions == sorted(positions)
    seen.clear()
    log.append(record(KEPT))
    log.make_durable()
    assert seen == [("write", log.path.name), ("fsync", log.path.name)]


def test_a_log_without_a_record_leaves_no_archive(log: RecordLog, tmp_path: Path) -> None:
    for _ in range(2):
        assert log.open(None).action == "started"
        log.close()
    assert list((tmp_path / "logs").iterdir()) == [log.path]


def test_same_length_changes_nothing(log: RecordLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.open()
    fill(log, 0, KEPT)
    state = log.state()
    log.close()
    before = log.path.read_bytes()
    seen: list[str] = []
    monkeypatch.setattr(filesystem, "watcher", lambda operation, _: seen.append(operation))
    assert log.open(state).action == "unchanged"
    assert set(seen) <= {"fsync"}
    assert log.path.read_bytes() == before
    assert not (tmp_path / "logs/rewound").exists()


def test_shorter_file_is_kept_and_goes_on(log: RecordLog, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = begun(log)
    short = RecordLog(log.path.with_name(f"short{log.path.suffix}"), tmp_path)
    short.open()
    fill(short, 0, 2)
    short.close()
    short.path.rename(log.path)
    with caplog.at_level(logging.WARNING, "dalsegno"):
        report = log.open(state)
    assert (report.action, report.missing_records, report.last_step) == ("shorter", KEPT - 2, 1)
    assert f"{KEPT - 2} of {KEPT} records are missing" in caplog.text
    fill(log, 7, 1)
    assert steps(log.path) == [0, 1, 7]


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 400))
def test_a_log_cut_at_any_byte_goes_on_and_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, cut: int
) -> None:
    root = tmp_path_factory.mktemp("cut")
    log = RecordLog(f"logs/train{suffix}", root)
    state = begun(log)
    whole = log.path.read_bytes()
    cut = min(cut, len(whole))
    os.truncate(log.path, cut)
    report = log.open(state)
    left = steps(log.path)
    assert left == list(range(len(left)))
    assert len(left) == KEPT - report.missing_records == log.records
    body = log.path.read_bytes()[: report.offset]
    assert whole[:cut].rstrip(b"\n]") in body + archived_bytes(root)
    fill(log, 90, 1)
    assert steps(log.path) == [*left, 90]
    log.close()


def test_another_tail_is_left_alone(log: RecordLog, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = begun(log)
    changed = bytearray(log.path.read_bytes())
    changed[state["offset"] - 4] ^= 1
    log.path.write_bytes(changed)
    with caplog.at_level(logging.WARNING, "dalsegno"):
        report = log.open(state)
    assert report.action == "differs"
    assert report.path == log.path == tmp_path / "logs" / f"train-2{log.path.suffix}"
    assert str(report.path) in caplog.text
    assert (tmp_path / "logs" / f"train{log.path.suffix}").read_bytes() == changed
    fill(log, KEPT, 2)
    second = log.state()
    fill(log, KEPT + 2, 3)
    log.close()

    again = RecordLog(f"logs/train{log.path.suffix}", tmp_path)
    assert again.open(second).action == "rewound"
    assert again.path == report.path
    assert steps(again.path) == [KEPT, KEPT + 1]


def test_a_file_that_is_gone_starts_anew(log: RecordLog, caplog: pytest.LogCaptureFixture) -> None:
    state = begun(log)
    log.path.unlink()
    log.path.parent.rmdir()
    with caplog.at_level(logging.WARNING, "dalsegno"):
        report = log.open(state)
    assert (report.action, report.missing_records) == ("gone", KEPT)
    assert "no longer exists" in caplog.text
    fill(log, KEPT, 1)
    assert steps(log.path) == [KEPT]


def test_without_a_state_what_is_there_is_archived_whole(log: RecordLog) -> None:
    begun(log)
    before = log.path.read_bytes()
    report = log.open(None)
    assert report.action == "restarted"
    assert report.archived is not None
    assert report.archived.read_bytes() == before
    assert steps(log.path) == []


def damage_nothing(log: RecordLog, state: Any) -> Any:
    return state


def forget_state(log: RecordLog, state: Any) -> Any:
    return None


def cut_inside(log: RecordLog, state: Any) -> Any:
    os.truncate(log.path, state["offset"] // 2)
    return state


def cut_before_the_first(log: RecordLog, state: Any) -> Any:
    os.truncate(log.path, 9)
    return state


def remove(log: RecordLog, state: Any) -> Any:
    log.path.unlink()
    return state


@pytest.mark.parametrize("damage", [damage_nothing, forget_state, cut_inside, cut_before_the_first, remove])
def test_a_rewind_killed_at_any_file_operation_can_be_repeated(
    tmp_path: Path, suffix: str, damage: Callable[[RecordLog, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    survived = 0
    while True:
        root = tmp_path / str(survived)
        log = RecordLog(f"logs/train{suffix}", root)
        state = damage(log, begun(log))
        before = set(lines(root))
        expected = expected_after(tmp_path / "calm", suffix, damage)

        monkeypatch.setattr(filesystem, "watcher", kill_from(survived))
        try:
            log.open(state)
        except Killed:
            killed = True
        else:
            killed = False
        monkeypatch.setattr(filesystem, "watcher", None)
        log.close()
        assert before <= set(lines(root)), "bytes were lost by the kill"

        log.open(state)
        assert steps(log.path) == expected
        assert before <= set(lines(root)), "bytes were lost by the second try"
        log.close()
        if not killed:
            break
        survived += 1
    assert survived > 0


def kill_from(count: int) -> filesystem.Watcher:
    """Lets ``count`` operations happen, none after."""
    left = count

    def watch(operation: str, path: Path) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed(f"{operation} {path}")

    return watch


def lines(root: Path) -> list[bytes]:
    """The records, torn ones too, that are anywhere below ``root``."""
    paths = [path for path in root.rglob("*") if path.is_file()]
    return [line.strip(b"[],\n") for path in paths for line in path.read_bytes().split(b"\n")]


def expected_after(root: Path, suffix: str, damage: Callable[[RecordLog, Any], Any]) -> list[int]:
    """The steps that a rewind leaves that nobody disturbs."""
    root = root / f"{len(list(root.glob('*'))):03d}"
    log = RecordLog(f"logs/train{suffix}", root)
    log.open(damage(log, begun(log)))
    log.close()
    return steps(log.path)


def test_a_rewind_reads_and_writes_only_the_rest(log: RecordLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is 8 GB long, nearly all of it a hole: reading it would take seconds, reading the rest does not."""
    log.open()
    os.truncate(log.path, 8 << 30)
    size = 8 << 30
    with log.path.open("r+b") as file:
        file.seek(size)
        file.write(b"x" * 5000)
    tail = b"\0" * 4096
    state = {**log.state(), "offset": size, "tail": xxhash.xxh3_128_hexdigest(tail)}
    log.close()
    touched = 0
    real_pread, real_write = os.pread, os.write

    def pread(descriptor: int, length: int, offset: int) -> bytes:
        nonlocal touched
        data = real_pread(descriptor, length, offset)
        touched += len(data)
        return data

    def write(descriptor: int, data: memoryview) -> int:
        nonlocal touched
        touched += len(data)
        return real_write(descriptor, data)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(os, "write", write)
    report = log.open(state)
    assert (report.action, report.offset) == ("rewound", size)
    assert report.archived is not None
    assert report.archived.read_bytes() == b"x" * 5000
    assert touched < 20_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "../train.jsonl"}, "the checkpoint's log is"),
        ({"path": "/etc/passwd"}, "the checkpoint's log is"),
        ({"path": "logs/other.jsonl"}, "give it the earlier path"),
        ({"path": "checkpoints/step-1/manifest.json"}, "the checkpoint's log is"),
        ({"offset": -1}, r"offset: is -1; must be 0 or more"),
        ({"offset": "12"}, "offset: is '12'; must be a 64-bit integer"),
        ({"records": 1.5}, r"records: is 1\.5; must be a 64-bit integer"),
        ({"records": True}, "records: is True; must be a 64-bit integer"),
        ({"tail": None}, "tail: is None; must be"),
        ({"more": 1}, "its keys must be path, offset, records, last_step, tail"),
    ],
)
def test_a_state_that_is_none_is_refused_and_touches_nothing(
    log: RecordLog, change: dict[str, Any], message: str
) -> None:
    state = begun(log)
    before = log.path.read_bytes()
    with pytest.raises(StateMismatch, match=message):
        log.open({**state, **change})
    with pytest.raises(StateMismatch, match="must be a dict with the keys path, offset"):
        log.open("logs/train.jsonl")
    assert log.path.read_bytes() == before
