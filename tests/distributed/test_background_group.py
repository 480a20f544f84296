"""What the ranks say beside the training."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dalsegno.distributed import collectives
from dalsegno.testing import run_ranks


def total() -> str:
    """What rank 0 makes of all ranks' numbers, as each rank receives it."""
    return collectives.background_group().gather_decide(
        collectives.rank() + 1, lambda numbers: f"{numbers} make {sum(numbers)}"
    )


def threads_of_gloo() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append((task / "comm").read_text().strip())
    return [name for name in names if "gloo" in name]


def until_they_are_gone() -> list[str]:
    """Those that stay all the same. One that has been joined may be seen there for a moment more."""
    deadline = time.monotonic() + 60
    while (left := threads_of_gloo()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def decide_beside_other_collectives() -> tuple[list[str], float]:
    """On a thread, while the training's own group is busy."""
    collectives.background_group()
    heard: list[str] = []
    beside = threading.Thread(target=lambda: heard.extend(total() for _ in range(20)))
    beside.start()
    summed = [collectives.sum_floats([1.0], "beside")[0] for _ in range(200)]
    beside.join()
    return heard, sum(summed)


def destroy_and_begin_again(meeting_place: Path) -> tuple[str, str, list[str]]:
    first = total()
    world_size, rank = collectives.world_size(), collectives.rank()
    dist.destroy_process_group()
    gc.collect()
    left = until_they_are_gone()
    dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=world_size)
    assert threads_of_gloo(), "they would have been seen"
    collectives.broadcast_tensors([torch.zeros(1)])
    return first, total(), left


def short_answers() -> Any:
    group = collectives.background_group()
    collectives._ANSWER_TIMEOUT = timedelta(seconds=1)
    return group


def decide_slowly() -> list[str]:
    """Rank 1 has a lot to write before the second answer, rank 0 before the third."""
    group = short_answers()
    heard = [total()]
    if collectives.rank() == 1:
        time.sleep(2)
    heard.append(total())
    heard.append(group.gather_decide(None, late))
    return heard


def late(_: list[None]) -> str:
    time.sleep(2)
    return "late"


def answer_who_does_not_listen() -> str:
    """Rank 1 does not take the answer, as one that is killed before. What rank 0 raises."""
    group, failure = short_answers(), ""
    if collectives.rank() == 1:
        dist.gather_object(None, dst=0, group=group._live())
    else:
        try:
            group.gather_decide(None, lambda _: "answer")
        except RuntimeError as error:
            failure = str(error)
    dist.barrier()
    return failure


def test_alone_one_decides_at_once() -> None:
    assert total() == "[1] make 1"


def test_rank_zero_decides_for_all_whatever_else_is_said() -> None:
    for heard, summed in run_ranks(decide_beside_other_collectives, 2):
        assert heard == ["[1, 2] make 3"] * 20
        assert summed == 400


def test_a_destroyed_group_is_gone_with_its_threads(tmp_path: Path) -> None:
    """One that still runs when the interpreter ends brings the whole process down. The next one is another."""
    for first, second, left in run_ranks(destroy_and_begin_again, 2, tmp_path / "store"):
        assert first == second == "[1, 2] make 3"
        assert left == []


def test_ranks_wait_long_for_work_and_rank_zero_not_for_one_that_takes_no_answer() -> None:
    for heard in run_ranks(decide_slowly, 2):
        assert heard == ["[1, 2] make 3", "[1, 2] make 3", "late"]
    failure, _ = run_ranks(answer_who_does_not_listen, 2)
    assert "Timed out" in failure
