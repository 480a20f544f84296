"""RecordLog: sound after every append, whatever happens to its process, and alone on its file."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.errors import ConfigurationError
from dalsegno.logs import RecordLog, RewindReport
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
