"""One log, of dalsegno or of any program that writes JSON: what can be asked of it, and what became of its bytes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import dalsegno as ds
from dalsegno.logs import RecordLog

HEADER = {"timestamp": 1.7e9, "kind": "header", "run": "one", "lr": 0.1}


def train(step: int, **metrics: Any) -> dict[str, Any]:
    return {"timestamp": 1.7e9 + step, "global_step": step, "epoch": step / 100, "loss": 3 / step, **metrics}


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    """As a run writes it; the suffix says which shape."""
    log = RecordLog(path.name, path.parent)
    log.open()
    for record in records:
        log.append(record)
    log.close()
    return path


@pytest.fixture(params=[".jsonl", ".json"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"train{request.param}"


def test_what_can_be_asked(path: Path) -> None:
    evaluation = {**train(20), "kind": "eval", "eval_loss": 2.5}
    del evaluation["loss"]
    write(path, [HEADER, train(10, lr=0.1), train(20, lr=0.2), evaluation, {**train(30), "kind": "user", "note": "hi"}])
    log = ds.open_log(path)
    assert log.name == "train"
    assert log.header == {"run": "one", "lr": 0.1}
    assert log.metrics() == ["loss", "lr", "eval_loss"]
    loss = log.metric("loss")
    assert loss.steps.tolist() == [10, 20, 30]
    assert loss.values.tolist() == [3 / 10, 3 / 20, 3 / 30]
    assert loss.epochs is not None
    assert loss.epochs.tolist() == [0.1, 0.2, 0.3]
    assert loss.times is not None
    assert loss.times.tolist() == [1.7e9 + 10, 1.7e9 + 20, 1.7e9 + 30]
    assert log.metric("loss", "train").steps.tolist() == [10, 20]
    assert [record["kind"] for record in log.records()] == ["train", "train", "eval", "user"]
    assert [record["eval_loss"] for record in log.records("eval")] == [2.5]
    assert not log.skipped
    frame = log.frame()
    assert frame["kind"].to_list() == ["train", "train", "eval", "user"]
    assert frame["lr"].to_list() == [0.1, 0.2, None, None]
    assert "run" not in frame.columns


def test_numbers_that_are_none(path: Path) -> None:
    values = [1.5, math.nan, math.inf, -math.inf]
    write(path, [train(step + 1, loss=value) for step, value in enumerate(values)])
    log = ds.open_log(path)
    np.testing.assert_array_equal(log.metric("loss").values, values)
    np.testing.assert_array_equal(log.frame()["loss"].to_numpy(), values)


def test_bare_nan_of_other_writers(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": -Infinity}\n')
    np.testing.assert_array_equal(ds.open_log(path).metric("loss").values, [math.nan, -math.inf])


def test_a_column_that_changes_its_type(path: Path) -> None:
    """Numbers are numbers; what stands between them is none, neither as 0 nor as a text."""
    write(path, [train(1, x=1), train(2, x=2.5), train(3, x="n/a"), train(4, x=None), train(5, x=True), train(6, x=7)])
    log = ds.open_log(path)
    assert log.metric("x").steps.tolist() == [1, 2, 6]
    assert log.metric("x").values.tolist() == [1.0, 2.5, 7.0]
    assert log.frame()["x"].to_list() == [1.0, 2.5, None, None, None, 7.0]
    assert [record["x"] for record in log.records()][2] == "n/a"


def test_a_whole_number_that_no_float_can_be(path: Path) -> None:
    write(path, [train(1, x=10**400), train(2, x=-(10**400)), train(3, x=2**53 + 1)])
    assert ds.open_log(path).metric("x").values.tolist() == [math.inf, -math.inf, float(2**53)]
    assert ds.open_log(path).frame()["x"].to_list()[:2] == [math.inf, -math.inf]


def test_lists_and_dicts_are_no_metrics(path: Path) -> None:
    write(path, [train(1, norms={"a": 1.0}, shape=[1, 2])])
    log = ds.open_log(path)
    assert log.metrics() == ["loss"]
    assert next(log.records())["norms"] == {"a": 1.0}
    assert json.loads(log.frame()["norms"][0]) == {"a": 1.0}


def test_a_name_nobody_knows(path: Path) -> None:
    write(path, [train(1)])
    log = ds.open_log(path)
    with pytest.raises(ds.UnknownName, match="unknown metric of train 'los'; did you mean 'loss'"):
        log.metric("los")
    with pytest.raises(ds.UnknownName, match="unknown kind of record 'evl'; did you mean 'eval'"):
        log.metric("loss", "evl")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"[", b"[\n", b"[]", b"[\n\n]\n"])
def test_nothing_has_been_logged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train.json"
    path.write_bytes(content)
    log = ds.open_log(path)
    assert (list(log.records()), log.metrics(), log.header, len(log.frame())) == ([], [], {}, 0)
    assert not log.skipped


def test_cut_at_every_byte(path: Path) -> None:
    """All whole records are read, whatever a kill or a copy has left of the next."""
    records = [HEADER, *(train(step, text='ö\\"]},') for step in range(1, 4))]
    whole = write(path, records).read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        log = ds.open_log(path)
        lines = [line.strip(b"[],") for line in whole[:length].splitlines()]
        sound = [record for line in lines if (record := _record(line)) is not None]
        assert list(log.records()) == [{"kind": "train", **record} for record in sound[1:]], length
        assert log.header == ({"run": "one", "lr": 0.1} if sound else {})
        assert log.skipped.count == sum(bool(line) for line in lines) - len(sound), length


def _record(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def test_what_was_skipped_is_counted_and_told(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    lines = [
        '{"global_step": 1, "loss": 1.0}',
        "[1, 2]",
        "nonsense",
        '{"loss": 2.0}',
        '{"global_step": 2, "loss": 0.5}',
        '{"gl',
    ]
    path.write_text("\n".join(lines))
    log = ds.open_log(path)
    assert log.metric("loss").values.tolist() == [1.0, 0.5]
    assert log.skipped.count == 4
    lines = [sentence.partition(":")[0] for sentence in log.skipped.sentences]
    assert lines == ["line 2", "line 3", "line 4", "line 6"]
    assert "line 4: no number under 'global_step'" in str(log.skipped)
    assert "line 6: torn" in str(log.skipped)


def test_many_skipped_lines_are_a_number_and_ten_sentences(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"step": 1}\n' + "x\n" * 50)
    log = ds.open_log(path)
    assert len(list(log.records())) == 1
    assert (log.skipped.count, len(log.skipped.sentences)) == (50, 10)
    assert str(log.skipped).endswith("and 40 more")


def test_a_file_that_is_being_written(tmp_path: Path) -> None:
    log = RecordLog("train.jsonl", tmp_path)
    log.open()
    log.append(train(1))
    reader = ds.open_log(log.path)
    assert len(reader.metric("loss")) == 1
    log.append(train(2))
    assert len(reader.metric("loss")) == 2
    assert reader.metric("loss").values.tolist() == [3.0, 1.5]
    log.close()


@pytest.mark.parametrize("name", ["step", "iteration", "_step", "trainer/global_step"])
def test_other_programs_count_steps_too(tmp_path: Path, name: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({name: step, "loss": 1.0, "_timestamp": 1.7e9}) + "\n" for step in (1, 2)))
    log = ds.open_log(path)
    assert log.metric("loss").steps.tolist() == [1, 2]
    assert log.metric("loss").times is not None
    assert log.metrics() == ["loss"]


@pytest.mark.parametrize("step", ["NaN", '"NaN"', "-Infinity", "1e30", "99999999999999999999", "true", "null"])
def test_what_no_steps_can_be_counted_by(tmp_path: Path, step: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"global_step": 1, "loss": 2.0}\n{"global_step": ' + step + ', "loss": 1.0}\n')
    log = ds.open_log(path)
    assert log.metric("loss").steps.tolist() == [1]
    assert log.skipped.sentences == ["line 2: no number under 'global_step'"]


def test_what_windows_puts_before_a_text(tmp_path: Path) -> None:
    state = '{"max_steps": 9, "log_history": [{"step": 1, "epoch": 0.5, "loss": 2.0}]}'
    texts = {
        "log.jsonl": '{"step": 1, "loss": 2.0}\n',
        "log.json": '[{"step": 1, "loss": 2.0}]',
        "trainer_state.json": state,
        "metrics.csv": "step,loss\n1,2.0\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text.replace("\n", "\r\n"), encoding="utf-8-sig", newline="")
        log = ds.open_log(tmp_path / name)
        assert (log.metric("loss").values.tolist(), log.skipped.count) == ([2.0], 0), name
    assert ds.open_log(tmp_path / "trainer_state.json").header == {"max_steps": 9}


def test_a_step_of_an_unusual_name(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"seen": 64, "loss": 1.0}\n{"seen": 128, "loss": 0.5}\n')
    with pytest.raises(ds.ConfigurationError, match=r"no step in its records, .* are: seen, loss; .*--step-key"):
        ds.open_log(path).metrics()
    assert ds.open_log(path, step_key="seen").metric("loss").steps.tolist() == [64, 128]
    with pytest.raises(ds.ConfigurationError, match="no number under 'sen'"):
        ds.open_log(path, step_key="sen").metrics()


def test_a_duration_is_no_time_of_day(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 0.25}\n')
    log = ds.open_log(path)
    assert log.metrics() == ["time"]
    assert log.metric("time").times is None


@pytest.mark.parametrize("long", [0, 1 << 20])
@pytest.mark.parametrize(
    "text", ["2023-11-14T22:13:21.5Z", "2023-11-14 22:13:21.5", "2023-11-15T00:13:21.500+02:00", "20231114T221321.5"]
)
def test_times_as_texts(text: str, long: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a zone they are UTC. What is no time is none, in whichever way the log is read."""
    from dalsegno.analysis.formats import json_lines

    monkeypatch.setattr(json_lines, "LONG", long)
    path = tmp_path / "metrics.jsonl"
    records = [
        {"step": 1, "time": text, "loss": 2.0},
        {"step": 2, "time": "soon", "loss": 1.0},
        {"step": 3, "loss": 1.0},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    log = ds.open_log(path)
    np.testing.assert_array_equal(log.metric("loss").times, [1_700_000_001.5, math.nan, math.nan])
    assert log.frame()["timestamp"].to_list() == [1_700_000_001.5, None, None]


def test_records_that_do_not_say_their_kind(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [{"step": 1, "loss": 1.0}, {"step": 1, "val/loss": 2.0}, {"step": 2, "loss": 1.0, "val/loss": 2.0}]
    records.append({"step": 2, "train_runtime": 3.5})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert [record["kind"] for record in ds.open_log(path).records()] == ["train", "eval", "train", "final"]


def test_forgathers_log_that_lacks_its_end(tmp_path: Path) -> None:
    """Records separated by a comma and a newline; no bracket before the end of training."""
    lines = [json.dumps(train(step)) for step in (1, 2)] + [
        json.dumps({"global_step": 2, "epoch": 1, "eval_loss": 2.0})
    ]
    (tmp_path / "trainer_logs.json").write_text("[\n" + ",\n".join(lines) + ',\n{"global_step": 3, "norms": {"a": 1')
    log = ds.open_log(tmp_path)
    assert [record["kind"] for record in log.records()] == ["train", "train", "eval"]
    assert log.skipped.count == 1


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_of_any_layout(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "log.json"
    whole = json.dumps([train(step, loss=math.nan) for step in (1, 2, 3)], indent=indent)
    for length in range(2, len(whole) + 1):
        path.write_text(whole[:length])
        log = ds.open_log(path)
        assert [record["global_step"] for record in log.records()] == [1, 2, 3][: whole[:length].count("}")]


records_strategy = st.lists(
    st.dictionaries(
        st.sampled_from(["loss", "eval_loss", "x", "y z", 'quo"te']),
        st.one_of(
            st.floats(),
            st.integers(-(2**70), 2**70),
            st.booleans(),
            st.none(),
            st.sampled_from(["a", '"', "null", "1", "true", [1, 2], ["a"], {"a": 1.0}]),
        ),
    ),
    max_size=12,
)


@given(records=records_strategy)
@example(records=[{"loss": 0.0, "x": None, 'quo"te': 0.0}, {'quo"te': math.inf}, {'quo"te': 0.0}])
@example(records=[{"loss": math.inf}, {"loss": 0.0, "eval_loss": None}, {"x": 0.0}])
@example(records=[{"x": "a"}, {"x": 1, "loss": None}])
@example(records=[{"loss": math.inf, "x": 0.0}, {"loss": math.inf, "x": 0.0}, {"loss": 0.0, "x": None, "y z": 1e15}])
def test_the_long_way_and_the_short_way_read_the_same(
    tmp_path_factory: pytest.TempPathFactory, records: list[Any]
) -> None:
    """Long logs are read through Polars, in chunks: as if they were read one by one."""
    from dalsegno.analysis.formats import json_lines

    path = tmp_path_factory.mktemp("log") / "train.jsonl"
    write(path, [{"global_step": step, **record} for step, record in enumerate(records)])
    short = ds.open_log(path)
    names, expected = short.metrics(), short.frame()
    of_kinds = {kind: short.series(names, kind) for kind in (None, "train", "eval")}  # read before the patch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "LONG", 0)
        patch.setattr(json_lines.read_chunks, "__defaults__", (200,))
        long = ds.open_log(path)
        assert long.metrics() == names
        for kind, other in of_kinds.items():
            mine = long.series(names, kind)
            for name in names:
                np.testing.assert_array_equal(mine[name].steps, other[name].steps)
                np.testing.assert_array_equal(mine[name].values, other[name].values)
        frame = long.frame()
    for name in names:
        np.testing.assert_array_equal(_numbers(frame, name), _numbers(expected, name))


def _numbers(frame: Any, name: str) -> Any:
    return frame[name].cast(float).to_numpy()


def test_an_ordinary_log_is_read_the_fast_way_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a name that comes up late, nulls, texts, and an array's commas."""
    from dalsegno.analysis.blocks import FrameBlock
    from dalsegno.analysis.formats import json_lines

    records = [HEADER, *(train(step) for step in range(1, 400))]
    records += [train(400, eval_loss=1.0), train(401, eval_loss=None), {**train(402), "kind": "user", "note": "a"}]
    monkeypatch.setattr(json_lines, "LONG", 0)
    for suffix in (".jsonl", ".json"):
        log = ds.open_log(write(tmp_path / f"train{suffix}", records))
        assert [type(block) for block in log.source.blocks(log.skipped)] == [FrameBlock]
        assert log.metric("eval_loss").steps.tolist() == [400]
        assert len(log.metric("loss", "train")) == 401
        assert log.frame()["note"].to_list()[-1] == "a"


def test_a_long_log_is_not_lost_where_it_is_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dalsegno.analysis.formats import json_lines

    path = write(tmp_path / "train.jsonl", [train(step) for step in range(1, 100)])
    lines = path.read_bytes().splitlines(keepends=True)
    lines[49] = lines[49][:30] + b"\n"
    path.write_bytes(b"".join(lines)[:-5])
    monkeypatch.setattr(json_lines, "LONG", 0)
    monkeypatch.setattr(json_lines.read_chunks, "__defaults__", (1000,))
    log = ds.open_log(path)
    assert log.metric("loss").steps.tolist() == [step for step in range(1, 99) if step != 50]
    assert [sentence.partition(":")[0] for sentence in log.skipped.sentences] == ["line 50", "line 99"]
