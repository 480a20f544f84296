"""Checkpoints and logs of every version of the format load, and their runs go on to the same end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dalsegno.analysis import open_log
from dalsegno.checkpoint import read_tensors, saved_states
from dalsegno.checkpoint.listing import list_checkpoints, newest_verified
from dalsegno.checkpoint.manifest import _checksum_of
from dalsegno.errors import RankFailed
from dalsegno.logs import RunFile, read_records
from dalsegno.testing import run_ranks
from golden import run

HERE = Path(__file__).parent
TIMED = ("timestamp", "_runtime", "_per_second", "tok_per_sec", "mfu", "peak_mem")
KEPT = sorted(path for path in (HERE / "checkpoints").glob("format-*/*") if path.is_dir())


@pytest.fixture(params=KEPT, ids=[f"{path.parent.name}/{path.name}" for path in KEPT])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """A copy of one, and what was noted when it was made."""
    folder = tmp_path / "run"
    shutil.copytree(request.param, folder)
    return folder, json.loads((folder / "expected.json").read_text())


def close(value: Any) -> Any:
    """What another machine or torch may compute in its place."""
    if isinstance(value, dict):
        return {key: close(each) for key, each in value.items()}
    if isinstance(value, list):
        return [close(each) for each in value]
    return pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(value, float) else value


def records(lines: list[str]) -> list[dict[str, Any]]:
    """Of a log in either form, without what tells the time."""
    parsed = [json.loads(line.rstrip(",")) for line in lines if line.strip() not in ("[", "]", "")]
    return [{key: value for key, value in each.items() if not key.endswith(TIMED)} for each in parsed]


def test_a_run_goes_on_to_the_same_end(kept: Any) -> None:
    """Model, optimizer, data order, random generators, callbacks of each kind, and a state that was carried forward."""
    folder, expected = kept
    ranks = run_ranks(run.last_leg, expected["world_size"], folder, expected["parallel"])
    for here, there in zip(ranks, expected["ranks"], strict=True):
        assert here.pop("loaded") == there.pop("loaded")
        assert here == close(there)
    for name, lines in expected["logs"].items():
        assert records((folder / "logs" / name).read_text().splitlines()) == close(records(lines)), name
    assert [leg.last_step for leg in RunFile(folder).load().legs] == [run.LEFT, run.SAVED, run.LAST]


def test_on_another_number_of_ranks(kept: Any) -> None:
    folder, expected = kept
    ((rank), *_) = run_ranks(run.last_leg, 1, folder, "none")
    assert rank["loaded"] == expected["ranks"][0]["loaded"]
    assert rank["words"][: run.LEFT] == [f"step {step}" for step in range(1, run.LEFT + 1)]


def test_what_a_newer_version_of_the_same_format_has_added_is_ignored(kept: Any) -> None:
    folder, expected = kept
    for path in (folder / "run.json", newest_verified(folder).path / "manifest.json"):
        content = json.loads(path.read_bytes()) | {"added": [1]}
        if content.pop("xxh3", None):
            content["xxh3"] = _checksum_of(content)
        else:
            content["legs"][0]["added"] = 1
        path.write_text(json.dumps(content))
    rank, *_ = run_ranks(run.last_leg, 1, folder, "none")
    assert rank["loaded"] == expected["ranks"][0]["loaded"]
    assert len(RunFile(folder).load().legs) == 3


def test_one_of_a_newer_format_is_refused_and_left_alone(kept: Any) -> None:
    folder, _ = kept
    path = newest_verified(folder).path / "manifest.json"
    content = json.loads(path.read_bytes()) | {"format": 99}
    del content["xxh3"]
    path.write_text(json.dumps(content | {"xxh3": _checksum_of(content)}))
    with pytest.raises(
        RankFailed, match=r"StateMismatch: .*manifest\.json: has format 99; this version of dalsegno reads up to"
    ):
        run_ranks(run.last_leg, 1, folder, "none")
    assert [found.status for found in list_checkpoints(folder)] == ["newer"]


def test_it_can_be_looked_at(kept: Any) -> None:
    folder, expected = kept
    checkpoint = newest_verified(folder)
    assert (checkpoint.step, checkpoint.manifest.world_size) == (run.SAVED, expected["world_size"])
    model = read_tensors(checkpoint)["model"]
    assert {name: each.tolist() for name, each in model.items()} == {
        name: each for name, each in expected["ranks"][0]["loaded"].items() if name != "again.weight"
    }
    states = saved_states(checkpoint)
    assert len(states["callbacks.Samples"]) == len(states["callbacks.Leaving"]) == expected["world_size"]


def test_its_logs_can_be_read(kept: Any) -> None:
    folder, _ = kept
    losses = [record["loss"] for record in read_records(folder / "logs/train.jsonl") if "loss" in record]
    assert len(losses) == run.SAVED // 2
    assert [each for each in read_records(folder / "logs/array.json") if "loss" in each][-1]["loss"] == losses[-1]
    assert list(open_log(folder).metric("loss").values) == losses
    assert list(read_records(folder / "logs/rewound/train.jsonl.0001"))
