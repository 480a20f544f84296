"""NaN and infinite numbers in long logs: read as fast as others, and as if they were read one by one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dalsegno as ds
from dalsegno.logs.values import to_json

values_strategy = st.one_of(
    st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, -(2.0**-1003)]), st.integers(0, 9), st.none()
)
texts_strategy = st.sampled_from(["a", "NaN", "x: NaN", "-Infinity is near", ': "NaN"', repr(-(2.0**-1003)), "N"])


@given(
    records=st.lists(
        st.tuples(st.dictionaries(st.sampled_from(["loss", "x", "NaN", "a: NaN"]), values_strategy), texts_strategy),
        max_size=12,
    ),
    noted=st.booleans(),
    separators=st.sampled_from([(", ", ": "), (",", ":"), (",", ":  ")]),
    quoted=st.booleans(),
)
def test_numbers_that_json_lacks_are_read_the_same_both_ways(
    tmp_path_factory: pytest.TempPathFactory, records: Any, noted: bool, separators: Any, quoted: bool
) -> None:
    """Bare or quoted, in numbers and in texts that only speak of them."""
    from dalsegno.analysis.formats import json_lines

    path = tmp_path_factory.mktemp("log") / "train.jsonl"
    lines = []
    for step, (record, text) in enumerate(records):
        whole = {"global_step": step, **record, **({"note": text} if noted else {})}
        lines.append(json.dumps(to_json(whole) if quoted else whole, separators=separators) + "\n")
    path.write_text("".join(lines))
    short = ds.open_log(path)
    names = short.metrics()
    other = short.series(names)  # read before the patch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "LONG", 0)
        patch.setattr(json_lines.read_chunks, "__defaults__", (300,))
        long = ds.open_log(path)
        assert sorted(long.metrics()) == sorted(names)
        mine = long.series(names)
        for name in names:
            np.testing.assert_array_equal(mine[name].steps, other[name].steps)
            np.testing.assert_array_equal(mine[name].values, other[name].values)


def test_a_log_that_stays_nan_is_read_the_fast_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dalsegno.analysis.blocks import FrameBlock
    from dalsegno.analysis.formats import json_lines

    monkeypatch.setattr(json_lines, "LONG", 0)
    values = [[1.5, math.nan, math.inf, -math.inf][step % 4] for step in range(1, 400)]
    records = [{"global_step": step, "loss": value} for step, value in enumerate(values, start=1)]
    for spelled in (records, map(to_json, records)):
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in spelled))
        log = ds.open_log(path)
        assert {type(block) for block in log.source.blocks(log.skipped)} == {FrameBlock}
        np.testing.assert_array_equal(log.metric("loss").values, values)
        np.testing.assert_array_equal(log.frame()["loss"].to_numpy(), values)
