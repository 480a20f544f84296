"""Lines that are decoded together give the records that they give one by one, or are left to that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dalsegno as ds
from dalsegno.analysis.blocks import RecordBlock
from dalsegno.analysis.formats.json_lines import decode_lines, read_at_once
from dalsegno.analysis.formats.source import OURS, Naming, Skipped, named

PLAIN = (
    '{"global_step": 1, "loss": 2.5}',
    '{"global_step": 2, "loss": 1e400, "epoch": 0.5, "timestamp": 1.7e9}',
    '{"global_step": 3.0, "loss": null, "note": "größe"}',
    '{"global_step": 4, "eval_loss": 1, "kind": "eval"}',
    '{"global_step": 4, "val_loss": 1, "kind": null}',
    '{"global_step": 4, "val_loss": null, "loss": true}',
    '{"global_step": 5, "train_runtime": 1.0, "kind": "other"}',
    '{"global_step": 6, "loss": "NaN", "x": [1, "Infinity"], "y": NaN}',
    '{"global_step": 7, "loss": 2.5, "loss": 3.5}',
)
ODD = (
    '{"kind": "header", "global_step": 1, "args": {"lr": 1}}',
    '{"kind": "header", "timestamp": -1}',
    '{"loss": 2.5}',
    '{"global_step": 1, "note": "}{"}',
    '{"step": 1, "time": 1.7e9, "loss": 2.5}',
    '{"step": 1, "global_step": 2}',
    '{"global_step": true}',
    '{"global_step": 9007199254740993}',
    '{"global_step": "NaN"}',
    f'{{"global_step": 1, "loss": 1{"0" * 400}}}',
    '{"global_step": 1, "epoch": "Infinity"}',
    '{"global_step": 1, "epoch": 1e999}',
    '{"global_step": 1, "epoch": false, "timestamp": "2026-01-01"}',
    '{"global_step": 1, "timestamp": 253402300800}',
    '{"global_step": 1, "kind": ["eval"]}',
    '{"global_step": 1, "kind": 5}',
    '{"global_step": 1, "x\\ud800": 1, "y": "\\ud800"}',
    '{"global_step": 1, "x": {"y": 1}}',
    f'{{"global_step": 1, "x": {"[" * 40}{"]" * 40}}}',
    f'{{"global_step": 1, "x": {"[" * 40000}',
    '{"global_step": 1, "x": [1',
    "2]}",
    '{"global_step": 1, "x": [{}',
    "{}]}",
    '{"global_step": 1}, {"global_step": 2}',
    '{"global_step": 1}{"global_step": 2}',
    '{"global_step": 1}, 5',
    '{"global_step": 1},,',
    ' {"global_step": 1}',
    '\ufeff{"global_step": 1}',
    '{"global_step": 1}\r',
    '{"global_step": 1, \x00}',
    "[",
    "]",
    "[1]",
    "null",
    "",
    ",",
)


@given(
    lines=st.lists(st.sampled_from(PLAIN) | st.sampled_from(PLAIN + ODD), max_size=8),
    end=st.sampled_from(["\n", ",\n", " \n"]),
    naming=st.sampled_from([OURS, Naming("step", "time", None)]),
)
def test_lines_that_are_read_at_once_are_read_the_same(lines: list[str], end: str, naming: Naming) -> None:
    data = "".join(line + end for line in lines).encode("utf-8", "surrogatepass")
    found = read_at_once(data, naming)
    if found is not None:
        skipped = Skipped()
        one_by_one = named(decode_lines(data.splitlines(keepends=True), 1, skipped), naming, skipped)
        expected = RecordBlock([record for record in one_by_one if record["kind"] != "header"])
        assert not skipped
        assert len(found) == len(expected)
        assert found.kinds().tolist() == expected.kinds().tolist()
        assert found.numeric() == expected.numeric()
        for name in found.numeric():
            mine, others = found.column(name), expected.column(name)
            np.testing.assert_array_equal(mine.values, others.values)
            np.testing.assert_array_equal(mine.at(None), others.at(None))
        assert found.frame().equals(expected.frame(), null_equal=True)


@pytest.mark.parametrize("brackets", [("", "\n"), ("[\n", "\n]\n")])
def test_plain_lines_are_read_at_once(tmp_path: Path, brackets: tuple[str, str]) -> None:
    end = ",\n" if brackets[0] else "\n"
    data = (brackets[0] + end.join([ODD[0], *PLAIN]) + brackets[1]).encode()
    found = read_at_once(data, OURS)
    assert found is not None
    assert len(found) == len(PLAIN)
    path = tmp_path / "train.json"
    path.write_bytes(data)
    assert ds.open_log(path).metric("loss", "train").steps.tolist() == [1, 2, 6, 7]
