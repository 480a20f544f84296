"""Saves and loads on two ranks: sharded, replicated and per-rank states; a failure on one rank fails on all."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint import jobs
from checkpoint.sameness import assert_same
from dalsegno.checkpoint.json_view import readable_states, readable_tensors
from dalsegno.checkpoint.manifest import Checkpoint
from dalsegno.errors import RankFailed
from dalsegno.testing import run_ranks


@pytest.mark.parametrize("kind", jobs.OPTIMIZERS)
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [(("fsdp", 2), ("fsdp", 2)), (("fsdp", 2), ("none", 1)), (("none", 1), ("fsdp", 2)), (("ddp", 2), ("fsdp", 2))],
)
def test_what_one_world_saves_another_loads(
    tmp_path: Path, saved_by: tuple[str, int], loaded_by: tuple[str, int], kind: str
) -> None:
    saved = run_ranks(jobs.save_after_training, saved_by[1], tmp_path, saved_by[0], kind)
    loaded = run_ranks(jobs.load_into_another, loaded_by[1], tmp_path, loaded_by[0], kind)
    for state, tied, _ in loaded:
        assert tied
        assert_same(state, saved[0])
    for _, _, after in loaded[1:]:
        assert_same(after, loaded[0][2])


def test_what_is_replicated_is_saved_once(tmp_path: Path) -> None:
    run_ranks(jobs.save_after_training, 2, tmp_path, "ddp", "adamw")
    tensors = readable_tensors(Checkpoint.open(tmp_path / "checkpoints/step-00000002"))
    pieces = [piece for tensor in tensors.values() for piece in tensor["pieces"]]
    assert len(pieces) == len(tensors)
    assert {piece["file"][-17:-12] for piece in pieces} == {"00000", "00001"}  # and by the rank that had less to do


def test_each_rank_has_its_own_shard(tmp_path: Path) -> None:
    run_ranks(jobs.save_after_training, 2, tmp_path, "fsdp", "adamw")
    weight = readable_tensors(Checkpoint.open(tmp_path / "checkpoints/step-00000002"))["model.embed.weight"]
    assert [(piece["file"], piece["offsets"], piece["shape"]) for piece in weight["pieces"]] == [
        ("model/shard-00000.safetensors", [0, 0], [4, 5]),
        ("model/shard-00001.safetensors", [4, 0], [3, 5]),
    ]


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts what a process reads")
def test_each_rank_reads_only_its_pieces(tmp_path: Path) -> None:
    """To verify, half of the files; to load, its shards."""
    for size, verified, loaded in run_ranks(jobs.bytes_read, 2, tmp_path):
        assert size > 16 << 20
        assert 0.4 * size < verified < 0.6 * size
        assert 0.4 * size < loaded < 0.6 * size


def test_states_that_are_the_same_and_states_of_ones_own(tmp_path: Path) -> None:
    assert run_ranks(jobs.save_states, 2, tmp_path) == [[], []]
    (shared_0, mine_0, report), (shared_1, mine_1, _) = run_ranks(jobs.load_states, 2, tmp_path, 2)
    assert shared_0 == shared_1 == [1.0, 1.0, 1.0]
    assert (mine_0, mine_1) == ("rank 0", "rank 1")
    assert report.carried == ["callbacks.Same", "callbacks.Gone"] and not report.notes
    for rank, state in enumerate(run_ranks(jobs.load_gone, 2, tmp_path)):
        assert state == (rank, [rank, rank])

    (tmp_path / "checkpoints/step-00000002/rank-00001.json").unlink()
    shown = readable_states(Checkpoint.open(tmp_path / "checkpoints/step-00000002"), problems := [])
    assert shown["callbacks.Mine"] == ["rank 0", None] and len(problems) == 1
    assert [number for number, _ in shown["callbacks.Gone"]] == [0, 1]


def test_a_replicated_state_that_differs_is_logged(tmp_path: Path) -> None:
    warnings, silent = run_ranks(jobs.save_states, 2, tmp_path, 1)
    assert len(warnings) == 1 and warnings[0].startswith(
        "callbacks.Shared: its state is replicated, yet it differs from rank 0's on rank 1"
    )
    assert silent == []


def test_another_number_of_ranks(tmp_path: Path) -> None:
    """2 to 1 to 2; states that no component claims in between are restored unchanged."""
    run_ranks(jobs.save_states, 2, tmp_path)
    ((_, mine, report),) = run_ranks(jobs.load_states, 1, tmp_path, 2)
    assert mine == ["rank 0", "rank 1"]
    assert report.notes == ["callbacks.Mine: resharded from 2 to 1 states"]
    with pytest.raises(
        RankFailed,
        match=r"StateMismatch: callbacks\.Gone: its state is per rank and was saved by 2 ranks",
    ):
        run_ranks(jobs.load_gone, 1, tmp_path)
    (_, mine_0, _), (_, mine_1, _) = run_ranks(jobs.load_states, 2, tmp_path, 3)
    assert (mine_0, mine_1) == ([["rank 0", "rank 1"]], [])
    for rank, state in enumerate(run_ranks(jobs.load_gone, 2, tmp_path)):
        assert state == (rank, [rank, rank])


def test_a_state_on_one_rank_that_cannot_be_saved(tmp_path: Path) -> None:
    (first, left), (second, _) = run_ranks(jobs.fail_to_save, 2, tmp_path, 1, {1, 2})
    assert second.startswith("CannotSave: callbacks.Mine: cannot save a set")
    assert first == second.replace("CannotSave: ", "CannotSave: rank 1: ")
    assert left == ["step-00000001"]
    assert run_ranks(jobs.find_only, 1, tmp_path)[0][0] == 3


def test_a_disk_that_is_full_for_one_rank(tmp_path: Path) -> None:
    (first, left), (second, _) = run_ranks(jobs.fail_to_write, 2, tmp_path, 1)
    assert first == second == "SaveFailed: step-00000002 was not saved: rank 1: [Errno 28] No space left on device"
    assert left == ["step-00000001"]


def test_the_ranks_share_the_reading_and_agree(tmp_path: Path) -> None:
    run_ranks(jobs.save_after_training, 2, tmp_path, "fsdp", "adamw")
    (_, alone) = run_ranks(jobs.find_only, 1, tmp_path)[0]
    both = run_ranks(jobs.find_only, 2, tmp_path)
    assert [step for step, _ in both] == [2, 2]
    assert all(0 < count < alone for _, count in both) and sum(count for _, count in both) == alone
    run_ranks(jobs.save_states, 1, tmp_path)
    newest = tmp_path / "checkpoints/step-00000002/model/shard-00001.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert [step for step, _ in run_ranks(jobs.find_only, 2, tmp_path)] == [1, 1]


def test_ranks_that_fail_differently_take_the_same_way_out(tmp_path: Path) -> None:
    """A disk error on one rank is not damage, even if another rank finds some: nothing is renamed."""
    run_ranks(jobs.save_after_training, 2, tmp_path, "ddp", "adamw")
    first, second = run_ranks(jobs.find_while_ranks_fail_differently, 2, tmp_path)
    assert second.startswith("OSError: [Errno 5] Input/output error: '")
    assert first == f"RankFailed: rank 1: {second}"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_uneven_shards_are_refused_on_all_ranks(tmp_path: Path) -> None:
    """A save would copy the larger one over its neighbours in the file; a load would read other rows into it."""
    with pytest.raises(RankFailed, match=r"cannot save model\.w: of its shape \[4\], rank 0 holds \[3\].* \[2\] here"):
        run_ranks(jobs.save_in_shards, 2, tmp_path, False, 3, 1)
    assert not list((tmp_path / "checkpoints").glob("step-*"))
    for folder, is_left_out in ((tmp_path / "saved", False), (tmp_path / "left-out", True)):
        run_ranks(jobs.save_in_shards, 2, folder, is_left_out, 2, 2)
        for number, (error, content) in enumerate(run_ranks(jobs.load_into_shards, 2, folder, 1, 3)):
            assert "cannot load model.w: of its shape [4], rank" in error and "torch's even shards" in error
            assert content == [float(number)] * (1 + 2 * number)
