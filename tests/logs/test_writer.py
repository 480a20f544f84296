"""RecordLog: sound after every append, whatever happens to its process, and alone on its file."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.errors import ConfigurationError
from dalsegno.logs import RecordLog, RewindReport
from dalsegno.system import filesystem
from dalsegno.system.durability import NotDurable
from logs.sample import fill, record, steps

pytestmark = pytest.mark.parametrize("suffix", [".jsonl", ".json"])


def test_a_new_log_is_sound_after_every_append_and_state_is_relative(log: RecordLog, tmp_path: Path) -> None:
    report = log.open(None)
    assert (report.action, report.path) == ("started", log.path)
    for step in range(3):
        assert steps(log.path) == list(range(step))
        log.append(record(step))
    state = log.state()
    assert state["path"] == log.path.relative_to(tmp_path).as_posix()
    assert (state["records"], state["last_step"]) == (3, 2)


def test_an_append_that_fails_leaves_no_half_record(log: RecordLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log.open()
    fill(log, 0, 2)
    real_write = os.write

    def full_disk(descriptor: int, data: memoryview) -> int:
        monkeypatch.setattr(os, "write", refuse)
        return real_write(descriptor, data[:7])

    def refuse(descriptor: int, data: memoryview) -> int:
        monkeypatch.setattr(os, "write", real_write)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(OSError, match=f"No space left on device: '{log.path}'"):
        log.append(record(2))
    assert steps(log.path) == [0, 1]
    log.append(record(3))
    assert steps(log.path) == [0, 1, 3]


def lose_one_name_in(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next fsync of ``directory`` fails. The kernel reports it once: another one returns."""
    lost = [OSError(errno.EIO, "Input/output error")]

    def lose(what: str, path: Path) -> None:
        if what == "fsync" and path == directory and lost:
            raise lost.pop()

    monkeypatch.setattr(filesystem, "watcher", lose)


def test_a_log_whose_name_was_not_flushed_is_never_opened_again(
    log: RecordLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_one_name_in(log.path.parent, monkeypatch)
    with pytest.raises(NotDurable, match="Input/output error"):
        log.open()
    for same in (log, RecordLog(log.path, tmp_path)):
        with pytest.raises(NotDurable, match=r"its name may be lost.*Input/output error.*restart the process"):
            same.open()


def test_a_new_file_whose_name_was_not_flushed_is_written_but_never_taken_for_durable(
    log: RecordLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.open()
    log.path.unlink()
    lose_one_name_in(log.path.parent, monkeypatch)
    with pytest.raises(NotDurable, match="Input/output error"):
        log.append(record(0))
    log.append(record(1))
    assert steps(log.path) == [1]
    for _ in range(2):
        with pytest.raises(NotDurable, match="restart the process"):
            log.make_durable()


def test_each_process_flushes_the_name(log: RecordLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that created the file may have been killed before."""
    log.open()
    fill(log, 0, 1)
    state = log.state()
    log.close()
    flushed: list[Path] = []
    monkeypatch.setattr(filesystem, "watcher", lambda what, path: flushed.append(path) if what == "fsync" else None)
    log.open(state)
    assert flushed == [log.path.parent]


def test_killed_while_it_writes(log: RecordLog, tmp_path: Path, suffix: str) -> None:
    program = f"""
from dalsegno.logs import RecordLog
import json
log = RecordLog("logs/train{suffix}", {str(tmp_path)!r})
log.open()
for step in range(20): log.append({{"global_step": step, "text": "x" * step}})
print(json.dumps(log.state()), flush=True)
while True: log.append({{"global_step": (step := step + 1), "text": "x" * (step % 9999)}})
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        state = json.loads(child.stdout.readline())
        while log.path.stat().st_size < 200_000:
            pass
        child.send_signal(signal.SIGKILL)
    assert log.open(state).action == "rewound"
    assert steps(log.path) == list(range(20))


def test_a_path_that_cannot_be(tmp_path: Path, suffix: str) -> None:
    for path in (f"../x{suffix}", f"/x{suffix}", f"a/../../x{suffix}", ""):
        with pytest.raises(ConfigurationError, match="must be inside output_dir"):
            RecordLog(path, tmp_path)
    with pytest.raises(ConfigurationError, match=r"the suffix must be \.jsonl"):
        RecordLog("train.csv", tmp_path)
    assert RecordLog(tmp_path / f"deep/train{suffix}", tmp_path).open().action == "started"


def test_one_file_has_one_log(log: RecordLog, tmp_path: Path, suffix: str) -> None:
    other = RecordLog(f"logs/train{suffix}", tmp_path)
    log.open()
    fill(log, 0, 1)
    with pytest.raises(ConfigurationError, match="another logger writes this file"):
        other.open()
    state = log.state()
    log.close()
    report: RewindReport = other.open(state)
    assert report.action == "unchanged"
    log.close()
    with pytest.raises(ValueError, match="the log is closed"):
        log.append({})
