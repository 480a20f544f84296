"""Ranks that agree, step by step, on what one of them has seen."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dalsegno.distributed import collectives
from dalsegno.distributed.collectives import Gathered
from dalsegno.errors import RanksApart
from dalsegno.state import NO_REQUESTS, ControlRequests, TrainerControl
from dalsegno.training import control_sync
from dalsegno.training.control_sync import ControlSync


def agree_on_what_rank_one_sees(each_step: bool) -> tuple[int, ControlRequests, str | None, bool]:
    """From its 50th step on, rank 1 sees a reason to stop. At which step each rank learns of it, and what."""
    control = TrainerControl()
    step = 0

    def look() -> ControlRequests:
        if collectives.rank() == 1 and step >= 50:
            control.stop("seen by rank 1", by="a clock")
            return ControlRequests(stop=True, save_done=True)
        return NO_REQUESTS

    agreement = ControlSync(control, [look, lambda: NO_REQUESTS], each_step=each_step, each_record=False)
    while True:
        step += 1
        requests = agreement.poll()
        if requests.stop:
            agreement.broadcast_reason()
            return step, requests, control.stop_reason, control.should_training_stop


def exchanges_of_twenty_steps(seconds: float) -> int:
    """How often the ranks exchange anything in steps of so many seconds, every second of which has a record."""
    now, exchanged = 0.0, 0
    gather_floats = collectives.gather_floats

    def counted(*arguments: Any) -> list[list[float]]:
        nonlocal exchanged
        exchanged += 1
        return gather_floats(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(control_sync, "time", SimpleNamespace(monotonic=lambda: now))
        patched.setattr(collectives, "gather_floats", counted)
        agreement = ControlSync(TrainerControl(), each_step=False, each_record=False)
        sums = Gathered(lambda: [1.0], "the loss of a record")
        for step in range(1, 21):
            now += seconds
            agreement.poll([] if step % 2 else [sums])
    return exchanged


def agree_on_a_step() -> object:
    return ControlSync(TrainerControl(), each_step=True, each_record=False).poll()


def all_reduce_of_a_programs_own() -> object:
    """As many bytes as an agreement sends."""
    mine = torch.full((collectives.WIDTH,), 0.5, dtype=torch.float64)
    dist.all_reduce(mine)
    return mine


PLACES: dict[str, Callable[[], object]] = {
    "step": agree_on_a_step,
    "record": lambda: collectives.sum_floats([1.0, 2.0], "the loss of a record"),
    "longer": lambda: collectives.sum_floats([1.0, 2.0, 3.0], "the loss of a record"),
    "gather": lambda: collectives.gather({"router": [1, 2]}, "ExpertLoadBalance"),
    "foreign": all_reduce_of_a_programs_own,
}


def come_to_different_places(*places: str) -> str | None:
    """Each rank calls another collective; the error that it gets."""
    agree_on_a_step()
    try:
        PLACES[places[collectives.rank()]]()
    except RanksApart as error:
        return str(error)
    return None


def say_many_numbers(length: int) -> tuple[list[list[float]], list[float], list[int]]:
    """What every rank receives of that many numbers of each, some of them no ordinary ones."""
    numbers = [float(collectives.rank()), -0.0, float("inf"), 5e-324, *range(length)][:length]
    wholes = [(-1) ** collectives.rank() * 2**62, *range(length)][:length]
    return (
        collectives.gather_floats(numbers, "numbers"),
        collectives.sum_floats(numbers, "sums"),
        collectives.all_reduce_max(wholes, "maxima"),
    )
