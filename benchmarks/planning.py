"""Planning who writes what, for 1,024 ranks that are simulated by torch's fake process group, and 10,000 tensors.

Ours needs no word from another rank. With DCP each rank plans its part, pickles it to rank 0, and rank 0 makes one plan
of all. What would take minutes is measured on a part, and scaled up by the number of pieces: both go piece by piece.
A plan is kept from save to save; before each save it is only looked whether it still fits.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dalsegno.checkpoint.save import planning
from dalsegno.checkpoint.state.contract import TensorsByComponent
from dalsegno.testing import run_ranks

from .row import Row, duration
from .timing import Figure, figure

T = TypeVar("T")

WORLD = 1024
TENSORS = 10_000
PART = 500
"""Tensors that are measured on rank 0, where it goes rank by rank."""
PLANS = 8
"""Of DCP's local plans that are made into one."""
ROUNDS = 5
SHAPES = ((4096, 8), (1024, 4), (50_000, 2), (4096,))

SMALL = {"world": 8, "tensors": 40, "part": 20, "rounds": 1}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


def run(world: int = WORLD, tensors: int = TENSORS, part: int = PART, rounds: int = ROUNDS) -> list[Row]:
    """Medians of the rounds."""
    ours: dict[str, Figure] = run_ranks(_ours, 1, world, tensors, part, rounds, timeout=1500)[0]
    local, size, whole = run_ranks(_dcp, 1, world, tensors, part, rounds, timeout=1500)[0]
    scaled = ours["rank 0"] * tensors / part
    what = f"planning a save, {world:,} ranks and {tensors:,} tensors"
    sent = f"DCP: {duration(local)}, and {size / 1e6:.0f} MB to rank 0"
    return [
        Row(
            f"{what}: each rank",
            duration(ours["rank"]),
            sent,
            f"{ours['rank'] / local:.2f} ×",
            spread=ours["rank"].spread,
        ),
        Row(
            f"{what}: rank 0 (scaled up)",
            duration(scaled),
            f"DCP: {duration(whole)}, and {size * world / 1e9:.1f} GB received",
            f"{scaled / whole:.2f} ×",
            spread=ours["rank 0"].spread,
        ),
        Row(
            f"{what}: does the kept plan still fit?",
            duration(ours["kept"]),
            f"planning: {duration(ours['rank'])}",
            spread=ours["kept"].spread,
        ),
    ]


def _ours(world: int, tensors: int, part: int, rounds: int) -> dict[str, Figure]:
    """Seconds; rank 0's for a part of the tensors."""
    all_of_them, some = _as_rank(5, world, tensors), _as_rank(0, world, part)
    before = planning.signature(all_of_them(dict), {})
    return {
        "rank": all_of_them(lambda state: _median(lambda: planning.plan(state, {}, {}), rounds)),
        "rank 0": some(lambda state: _median(lambda: planning.plan(state, {}, {}), rounds)),
        "kept": all_of_them(lambda state: _median(lambda: planning.signature(state, {}) == before, rounds)),
    }


def _dcp(world: int, tensors: int, part: int, rounds: int) -> tuple[float, int, float]:
    """Seconds of a rank's plan; its bytes; seconds for the whole of all ranks' plans."""

    def planned(state: TensorsByComponent) -> SavePlan:
        planner = DefaultSavePlanner(flatten_sharded_tensors=False)
        planner.set_up_planner(state, is_coordinator=False)
        return planner.create_local_plan()

    of_one = _as_rank(5, world, tensors)
    local = of_one(lambda state: _median(lambda: planned(state), rounds))
    size = len(pickle.dumps(of_one(planned)))
    plans = [_as_rank(rank, world, part)(planned) for rank in range(PLANS)]

    def together() -> None:
        planner = DefaultSavePlanner(flatten_sharded_tensors=False)
        planner.set_up_planner({}, is_coordinator=True)
        with contextlib.suppress(ValueError):  # when it is done it notices that not all ranks' plans are there
            planner.create_global_plan(list(plans))

    logging.getLogger(default_planner.__name__).setLevel(logging.ERROR)
    return local, size, _median(together, rounds) * (world / PLANS) * (tensors / part)


def _median(work: Callable[[], object], rounds: int) -> Figure:
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return figure(seconds)


def _as_rank(rank: int, world: int, count: int) -> Callable[[Callable[[TensorsByComponent], T]], T]:
    """Does something with ``count`` tensors, sharded by rows, as that rank of that many."""

    def do(work: Callable[[TensorsByComponent], T]) -> T:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            mesh = init_device_mesh("cpu", (world,))
            state: dict[str, torch.Tensor] = {}
            for number in range(count):
                whole = torch.empty(SHAPES[number % len(SHAPES)], device="meta")
                length = -(-whole.shape[0] // world)
                held = max(0, min(length, whole.shape[0] - rank * length))
                local = torch.empty((held, *whole.shape[1:]), device="meta")
                state[f"layers.{number}.weight"] = DTensor.from_local(
                    local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
                )
            return work({"model": state})  # type: ignore[dict-item]
        finally:
            dist.destroy_process_group()

    return do
