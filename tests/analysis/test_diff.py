"""Record by record: what differs is found, whatever is missing in between; wall-clock fields are not."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from analysis.series import NAN
from dalsegno.analysis.comparison import MISSING, FieldDifference, RecordDifference, diff_records

Log = list[dict[str, Any]]


def record(step: int, loss: float, **more: Any) -> dict[str, Any]:
    return {"timestamp": 1.7e9 + step, "global_step": step, "kind": "train", "loss": loss, **more}


LOGS = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1.0, 2.0, NAN])), max_size=12).map(
    lambda pairs: [record(step, loss) for step, loss in sorted(pairs, key=lambda pair: pair[0])]
)


@given(LOGS)
def test_a_log_and_itself(log: Log) -> None:
    assert list(diff_records(log, log)) == []


@given(LOGS, LOGS)
def test_both_ways_alike(first: Log, second: Log) -> None:
    there, back = list(diff_records(first, second)), list(diff_records(second, first))
    assert [(each.step, each.only_in is None) for each in there] == [(each.step, each.only_in is None) for each in back]
    assert bool(there) == (repr(first) != repr(second))
    alone = sum({"first": 1, "second": -1}.get(each.only_in or "", 0) for each in there)
    assert alone == len(first) - len(second)


def test_what_tells_the_time_may_differ() -> None:
    ours = record(5, 2.0, tok_per_sec=100.0, mfu=0.1, peak_mem=5, train_runtime=3.0, eval_samples_per_second=8.0)
    theirs = record(5, 2.0, tok_per_sec=200.0, train_runtime=4.0) | {"timestamp": 1.0}
    assert list(diff_records([ours], [theirs])) == []


def test_a_record_that_is_missing_moves_no_other() -> None:
    log = [record(step, 1.0 / step) for step in range(1, 100)]
    assert list(diff_records(log, log[:40] + log[41:])) == [RecordDifference(41, "train", (), only_in="first")]
    assert list(diff_records(log[:90], log)) == [
        RecordDifference(s, "train", (), only_in="second") for s in range(91, 100)
    ]


def test_records_of_one_step_are_told_apart_by_their_kind() -> None:
    evaluation = {"global_step": 5, "kind": "eval", "eval_loss": 3.0}
    assert list(diff_records([record(5, 1.0), evaluation], [evaluation, record(5, 1.0)])) == []
    (found,) = diff_records([record(5, 1.0), evaluation], [record(5, 1.0), evaluation | {"eval_loss": 3.5}])
    assert (found.kind, found.fields) == ("eval", (FieldDifference("eval_loss", 3.0, 3.5),))


def test_every_field_with_its_path() -> None:
    ours = record(5, NAN, norms={"head.weight": 1.0}, history=[1, 2], note="a")
    theirs = record(5, NAN, norms={"head.weight": 2.0}, history=[1], rank=0, note="a")
    (found,) = diff_records([ours], [theirs])
    assert [(each.field, each.first, each.second) for each in found.fields] == [
        ("norms.head.weight", 1.0, 2.0),
        ("history[1]", 2, MISSING),
        ("rank", MISSING, 0),
    ]


def test_a_whole_number_is_no_fraction() -> None:
    (found,) = diff_records([record(1, 1.0)], [record(1, 1)])
    assert found.fields[0].field == "loss"


def test_headers_have_no_step() -> None:
    header = {"kind": "header", "run": "a"}
    (found,) = diff_records([header, record(1, 1.0)], [header | {"run": "b"}, record(1, 1.0)])
    assert (found.step, found.kind, found.fields) == (None, "header", (FieldDifference("run", "a", "b"),))
