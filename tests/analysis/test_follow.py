"""A log that is followed while it is written, cut back and replaced."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.analysis.follow import Cut, Follower
from dalsegno.logs import RecordLog


def train(step: int, loss: float = 1.0) -> dict[str, Any]:
    return {"timestamp": 1.7e9, "global_step": step, "epoch": 0.0, "loss": loss}


@pytest.fixture(params=[".jsonl", ".json"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> RecordLog:
    log = RecordLog(f"train{request.param}", tmp_path)
    log.open()
    return log


def follower(log: RecordLog) -> Follower:
    return Follower(ds.open_log(log.path).source)


def steps(news: list[Any]) -> list[Any]:
    return [each if isinstance(each, Cut) else each["global_step"] for each in news]


def test_the_last_and_then_the_new_ones(log: RecordLog) -> None:
    log.append({"timestamp": 1.0, "kind": "header", "run": "a"})
    for step in range(1, 6):
        log.append(train(step))
    follow = follower(log)
    assert follow.last(0) == []
    assert steps(follow.last(2)) == [4, 5]
    assert follow.new() == []
    log.append(train(6))
    log.append(train(7))
    assert steps(follow.new()) == [6, 7]
    assert follow.new() == []


def test_from_an_empty_log(log: RecordLog) -> None:
    follow = follower(log)
    assert follow.last(10) == []
    log.append(train(1))
    assert steps(follow.new()) == [1]


def test_a_rewind(log: RecordLog) -> None:
    log.append(train(1))
    saved = log.state()
    log.append(train(2))
    log.append(train(3))
    follow = follower(log)
    follow.last(10)
    log.open(saved)
    assert steps(follow.new()) == [Cut(1)]
    log.append(train(2, 5.0))
    assert steps(follow.new()) == [2]


def test_a_rewind_after_which_the_log_has_grown_longer_than_it_was(log: RecordLog) -> None:
    log.append(train(1))
    saved = log.state()
    log.append(train(2))
    follow = follower(log)
    follow.last(10)
    log.open(saved)
    for step in (2, 3, 4):
        log.append(train(step, 5.0))
    assert steps(follow.new()) == [Cut(1), 2, 3, 4]


def test_a_log_that_starts_anew(log: RecordLog) -> None:
    log.append(train(1))
    log.append(train(2))
    follow = follower(log)
    follow.last(10)
    log.close()
    log.path.unlink()
    assert follow.new() == []
    log.open()
    log.append(train(1, 7.0))
    assert steps(follow.new()) == [Cut(None), 1]


def test_a_record_is_told_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"step": 1}\n')
    follow = Follower(ds.open_log(path).source)
    assert steps(follow.last(10)) == [1]
    line = '{"step": 2, "loss": 1.5}\n'
    for cut in range(1, len(line) - 1):
        path.write_text('{"step": 1}\n' + line[:cut])
        assert follow.new() == []
    path.write_text('{"step": 1}\n' + line.rstrip())
    assert steps(follow.new()) == [2]
    assert steps(Follower(ds.open_log(path).source).last(1)) == [2]
    path.write_text('{"step": 1}\n' + line)
    assert follow.new() == []


def test_whatever_happens_it_ends_up_with_what_is_there(log: RecordLog) -> None:
    """After appends, rewinds and reads in any order: the records read, cut back as reported, are the log."""
    dice = random.Random(5)
    follow = follower(log)
    read: list[dict[str, Any]] = []
    follow.last(0)
    states = [log.state()]
    step = 0
    for turn in range(300):
        choice = dice.random()
        if choice < 0.6:
            step += 1
            log.append(train(step, turn))
        elif choice < 0.7:
            states.append(log.state())
        elif choice < 0.8:
            saved = dice.choice(states)
            states = [state for state in states if state["offset"] <= saved["offset"]]
            log.open(saved)
            step = saved["last_step"] or 0
        else:
            for each in follow.new():
                if isinstance(each, Cut):
                    read = [record for record in read if each.step is not None and record["global_step"] <= each.step]
                else:
                    read.append(each)
            assert read == list(ds.open_log(log.path).records())


def test_a_run_whose_log_goes_on_in_another_file(tmp_path: Path) -> None:
    """As it does where somebody else has written in the first one."""
    log = RecordLog("logs/train.jsonl", tmp_path)
    log.open()
    log.append(train(1))
    saved = log.state()
    log.append(train(2))
    run = ds.open_log(tmp_path)
    follow = Follower(run.source, run.path)
    assert steps(follow.last(10)) == [1, 2]
    log.close()
    log.path.write_text(json.dumps(train(1, 7.0)) + "\n" * 100)
    follow.new()
    log.open(saved)
    log.append(train(2, 3.0))
    assert log.path.name == "train-2.jsonl"
    assert steps(follow.new()) == [Cut(None), 2]
    log.append(train(3))
    assert steps(follow.new()) == [3]
    log.close()


def test_a_run_whose_log_is_in_each_checkpoint(tmp_path: Path) -> None:
    """As that of Hugging Face's Trainer: a new one repeats the records of the last one."""
    for step in (10, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
        history = [{"step": each, "loss": 1.0} for each in range(5, step + 1, 5)]
        state = {"global_step": step, "log_history": history}
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
        if step == 10:
            run = ds.open_log(tmp_path)
            follow = Follower(run.source, run.path)
            assert steps(follow.last(10)) == [5, 10]
    assert steps(follow.new()) == [15, 20]


def test_a_long_log_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(train(step)) + "\n" for step in range(1, 20_001)))
    follow = Follower(ds.open_log(path).source)
    assert steps(follow.last(3)) == [19_998, 19_999, 20_000]
    assert len(follow._reader._seen) < 2_000  # type: ignore[union-attr]


def test_a_format_that_is_rewritten_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n1,2.0\n2,1.0\n")
    follow = Follower(ds.open_log(path).source)
    assert steps(follow.last(1)) == [2]
    path.write_text("step,loss,val_loss\n1,2.0,\n2,1.0,\n2,,3.0\n")
    assert steps(follow.new()) == [2]
    path.write_text("step,loss\n1,2.0\n2,9.0\n")
    assert steps(follow.new()) == [Cut(1), 2]
