"""What records hold: numbers of every library, non-finite ones too, and nothing that JSON cannot hold."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.errors import CannotSave, NotFound
from dalsegno.logs import ReadReport, RecordLog, read_records

texts = st.text().filter(lambda text: text not in ("NaN", "Infinity", "-Infinity"))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=6,
)


@settings(max_examples=40)
@given(records=st.lists(st.dictionaries(texts, values), max_size=4), suffix=st.sampled_from([".jsonl", ".json"]))
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]], suffix: str
) -> None:
    log = RecordLog(f"a{suffix}", tmp_path_factory.mktemp("values"))
    log.open()
    for record in records:
        log.append(record)
    log.close()
    assert repr(list(read_records(log.path))) == repr(records)  # repr: NaN equals itself there
    if suffix == ".json":
        json.loads(log.path.read_bytes(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (torch.tensor(1.5), 1.5),
        (torch.tensor(3), 3),
        (torch.tensor(True), True),
        (torch.tensor(2.5, dtype=torch.bfloat16), 2.5),
        (np.float32(0.5), 0.5),
        (np.float64("inf"), "Infinity"),
        (np.int64(7), 7),
        (np.array(-math.inf), "-Infinity"),
        (torch.tensor(math.nan), "NaN"),
        ((1, 2), [1, 2]),
        ({"a": [np.float16(1)]}, {"a": [1]}),
    ],
)
def test_scalars_of_other_libraries(tmp_path: Path, value: object, written: object) -> None:
    log = RecordLog("a.jsonl", tmp_path)
    log.open()
    log.append({"x": value})
    assert json.loads(log.path.read_bytes()) == {"x": written}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"a": {"b": [1, object()]}}, r"record key 'a\.b\[1\]': JSON cannot hold a object"),
        ({"grads": torch.zeros(2, 3)}, r"record key 'grads': JSON cannot hold a Tensor of shape \(2, 3\)"),
        ({"x": np.zeros(4)}, r"'x': JSON cannot hold a ndarray of shape \(4,\)"),
        ({"x": 1j}, "cannot hold a complex"),
        ({"x": b"raw"}, "cannot hold a bytes"),
        ({"x": np.longdouble(1)}, "cannot hold a longdouble"),
        ({"layers": {3: 0.1}}, r"key 3 in 'layers': JSON keys are strings, this is a int; use str\(key\)"),
        ({3: 0.1}, "key 3 of the record"),
    ],
)
def test_what_json_cannot_hold_names_its_key_and_writes_nothing(tmp_path: Path, record: Any, message: str) -> None:
    log = RecordLog("a.jsonl", tmp_path)
    log.open()
    with pytest.raises(CannotSave, match=message):
        log.append(record)
    assert log.path.read_bytes() == b""


def test_lines_that_are_no_records_are_skipped_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    nested = b'{"a": ' + b"[" * 200_000
    path.write_bytes(b'{"a": 1}\n\xff\xfe\n\0\0\0\n[1]\n\n' + nested + b'\n{"a": 2}\n{"a": {"b": 3}')
    report = ReadReport()
    assert list(read_records(path, report)) == [{"a": 1}, {"a": 2}]
    assert report.records == 2
    assert [reason.split(":")[0] for reason in report.skipped] == [f"line {n}" for n in (2, 3, 4, 6, 8)]
    list(read_records(path))
    assert "skipped line 8" in caplog.text


def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such log"):
        list(read_records(tmp_path / "none.jsonl"))


def test_logs_need_no_torch() -> None:
    names = "dalsegno.logs, dalsegno.analysis.divergence"
    program = f"import sys, {names}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
