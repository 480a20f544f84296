"""Restarts and rollbacks, from the legs and the archived tails of a run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import dalsegno as ds
from dalsegno.analysis import Restart
from dalsegno.analysis.lineage import read_tails
from dalsegno.logs import Leg
from dalsegno.logs.run_file import RolledBack


def leg(number: int, started: float, first_step: int, reason: str | None = "died", *rollbacks: RolledBack) -> Leg:
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
        rollbacks=[*rollbacks],
    )


def restarts(run: Path, *legs: Leg) -> list[Restart]:
    content = {"format": 1, "run_id": "0", "created": 0.0, "legs": [*map(asdict, legs)]}
    (run / "run.json").write_text(json.dumps(content))
    (run / "train.jsonl").touch()
    return ds.open_log(run).restarts()


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
    legs = leg(1, 900, 0), leg(2, 2000, 100), leg(3, 3000, 100), leg(4, 4000, 300, None)
    assert restarts(tmp_path, *legs) == [Restart(100, 140, 2), Restart(100, 100, 3), Restart(300, 300, 4)]
    (tail,) = tails
    assert (tail.first_step, tail.last_step) == (105, 140)
    assert tail.series("loss").values.tolist() == [1.0 + step for step in range(105, 145, 5)]
    assert len(tail.series("accuracy")) == 0


def test_rollbacks_within_a_leg(tmp_path: Path) -> None:
    archive(tmp_path, 1, range(51, 60), began=1000)
    archive(tmp_path, 2, range(81, 90), began=1100)
    archive(tmp_path, 3, range(101, 105), began=1200)
    to_50, to_80 = (
        RolledBack(timestamp=at, from_step=step + 9, to_step=step, by="Watch", reason="a spike")
        for at, step in ((1050, 50), (1150, 80))
    )
    found = restarts(tmp_path, leg(1, 900, 0, "died", to_50, to_80), leg(2, 2000, 100))
    assert found == [Restart(50, 59, None, "a spike"), Restart(80, 89, None, "a spike"), Restart(100, 104, 2)]
    assert [restart.redone for restart in found] == [9, 9, 4]


def test_the_final_record_of_a_stopped_leg_is_cut_off_by_the_restart(tmp_path: Path) -> None:
    archive(tmp_path, 1, range(156, 157), began=1000)
    assert restarts(tmp_path, leg(1, 900, 0, "stopped"), leg(2, 2000, 156)) == [Restart(156, 156, 2)]


def test_no_archive_and_an_empty_one(tmp_path: Path) -> None:
    assert read_tails(tmp_path / "train.jsonl") == []
    archive(tmp_path, 1, range(0), began=0)
    assert read_tails(tmp_path / "train.jsonl") == []
    assert restarts(tmp_path) == []


def test_a_tail_whose_last_record_has_no_time(tmp_path: Path) -> None:
    (tmp_path / "rewound").mkdir()
    for number, time in enumerate(("null", '"noon"', '"NaN"'), 1):
        (tmp_path / "rewound" / f"train.jsonl.{number:04}").write_text(f'{{"timestamp": {time}, "global_step": 5}}\n')
    tails = read_tails(tmp_path / "train.jsonl")
    assert [math.isnan(tail.timestamp) for tail in tails] == [True] * 3
    assert restarts(tmp_path, leg(1, 900, 0)) == []


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
