"""Restarts and rollbacks, from the legs and the archived tails of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

from dalsegno.analysis import Restart
from dalsegno.analysis.lineage import find_restarts, read_tails
from dalsegno.logs import Leg


def leg(number: int, started: float, first_step: int, reason: str | None = "died") -> Leg:
    return Leg(
        leg=number,
        started=started,
        from_checkpoint=None,
        world_size=1,
        host="here",
        pid=1,
        first_step=first_step,
        last_step=first_step,
        reason=reason,
    )


def archive(logs: Path, number: int, steps: range, began: float, log: str = "train.jsonl") -> None:
    """A tail with a record every 5 steps, 1 second apart."""
    (logs / "rewound").mkdir(exist_ok=True)
    records = [
        {"timestamp": began + index, "global_step": step, "loss": 1.0 + step} for index, step in enumerate(steps)
    ]
    (logs / "rewound" / f"{log}.{number:04}").write_text("".join(json.dumps(each) + "\n" for each in records))


def test_a_killed_run(tmp_path: Path) -> None:
    archive(tmp_path, 1, range(105, 145, 5), began=1000)
    tails = read_tails(tmp_path / "train.jsonl")
    legs = [leg(1, 900, 0), leg(2, 2000, 100), leg(3, 3000, 100), leg(4, 4000, 300, None)]
    assert find_restarts(legs, tails) == [Restart(100, 140, 2), Restart(100, 100, 3), Restart(300, 300, 4)]
    (tail,) = tails
    assert (tail.first_step, tail.last_step) == (105, 140)
    assert tail.series("loss").values.tolist() == [1.0 + step for step in range(105, 145, 5)]
    assert len(tail.series("accuracy")) == 0


def test_rollbacks_within_a_leg(tmp_path: Path) -> None:
    archive(tmp_path, 1, range(51, 60), began=1000)
    archive(tmp_path, 2, range(81, 90), began=1100)
    archive(tmp_path, 3, range(101, 105), began=1200)
    restarts = find_restarts([leg(1, 900, 0), leg(2, 2000, 100)], read_tails(tmp_path / "train.jsonl"))
    assert restarts == [Restart(50, 59, None), Restart(80, 89, None), Restart(100, 104, 2)]
    assert [restart.redone for restart in restarts] == [9, 9, 4]


def test_a_leg_that_saved_its_last_step_cuts_nothing(tmp_path: Path) -> None:
    archive(tmp_path, 1, range(51, 60), began=1000)
    legs = [leg(1, 900, 0, "stopped"), leg(2, 2000, 100)]
    assert find_restarts(legs, read_tails(tmp_path / "train.jsonl")) == [Restart(50, 59, None), Restart(100, 100, 2)]


def test_the_final_record_of_a_stopped_leg_is_cut_off_by_the_restart(tmp_path: Path) -> None:
    archive(tmp_path, 1, range(156, 157), began=1000)
    legs = [leg(1, 900, 0, "stopped"), leg(2, 2000, 156)]
    assert find_restarts(legs, read_tails(tmp_path / "train.jsonl")) == [Restart(156, 156, 2)]


def test_no_archive_and_an_empty_one(tmp_path: Path) -> None:
    assert read_tails(tmp_path / "train.jsonl") == []
    archive(tmp_path, 1, range(0), began=0)
    assert read_tails(tmp_path / "train.jsonl") == []
    assert find_restarts([], []) == []


def test_a_tail_whose_last_record_has_no_time(tmp_path: Path) -> None:
    (tmp_path / "rewound").mkdir()
    for number, time in enumerate(("null", '"noon"', '"NaN"'), 1):
        (tmp_path / "rewound" / f"train.jsonl.{number:04}").write_text(f'{{"timestamp": {time}, "global_step": 5}}\n')
    tails = read_tails(tmp_path / "train.jsonl")
    assert [math.isnan(tail.timestamp) for tail in tails] == [True] * 3
    assert find_restarts([leg(1, 900, 0)], tails) == []


def test_a_log_that_went_on_in_another_file(tmp_path: Path) -> None:
    """What was cut off before it did belongs to it; what was cut off of others does not."""
    archive(tmp_path, 1, range(300, 310), began=1, log="train-2.jsonl")
    archive(tmp_path, 1, range(100, 110), began=1)
    archive(tmp_path, 2, range(200, 210), began=1)
    archive(tmp_path, 1, range(400, 410), began=1, log="train-3.jsonl")
    archive(tmp_path, 1, range(500, 510), began=1, log="evaluate.jsonl")
    tails = {
        name: [tail.first_step for tail in read_tails(tmp_path / name)] for name in ("train.jsonl", "train-2.jsonl")
    }
    assert tails == {"train.jsonl": [100, 200], "train-2.jsonl": [100, 200, 300]}
