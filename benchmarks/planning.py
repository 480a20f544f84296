"""Planning who writes what, and finding it again, for 1,024 ranks that are simulated by torch's fake process group, and
10,000 tensors.

Ours needs no word from another rank. With DCP each rank plans its part, pickles it to rank 0, and rank 0 makes one plan
of all, whose metadata every rank unpickles before it loads. What would take minutes with DCP is measured on a part, and
scaled up by the number of pieces: it goes piece by piece. A plan is kept from save to save; before each save it is only
looked whether it still fits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dalsegno.checkpoint import names, plan
from dalsegno.checkpoint.contract import TensorsByComponent
from dalsegno.checkpoint.index import Index
from dalsegno.checkpoint.plan import ShardLayout
from dalsegno.checkpoint.tensor_reader import ChunkReader, planned_reads
from dalsegno.testing import run_ranks

from .row import Row, duration
from .timing import Figure, figure

T = TypeVar("T")

WORLD = 1024
TENSORS = 10_000
PART = 500
"""Tensors of which DCP plans the whole, where it goes rank by rank."""
PLANS = 8
"""Of DCP's local plans that are made into one."""
ROUNDS = 5
SHAPES = ((4096, 8), (1024, 4), (50_000, 2), (4096,))

SMALL = {"world": 8, "tensors": 40, "part": 20, "rounds": 1}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


def run(world: int = WORLD, tensors: int = TENSORS, part: int = PART, rounds: int = ROUNDS) -> list[Row]:
    """Medians of the rounds."""
    ours: dict[str, Figure] = run_ranks(_ours, 1, world, tensors, rounds, timeout=1500)[0]
    dcp: dict[str, float] = run_ranks(_dcp, 1, world, tensors, part, rounds, timeout=1500)[0]
    what = f"planning a save, {world:,} ranks and {tensors:,} tensors"
    find = f"finding its chunks before a load, {world:,} ranks and {tensors:,} tensors: each rank"
    sent = f"DCP: {duration(dcp['rank'])}, and {dcp['sent'] / 1e6:.0f} MB to rank 0"
    return [
        Row(
            f"{what}: each rank",
            duration(ours["rank"]),
            sent,
            f"{ours['rank'] / dcp['rank']:.2f} ×",
            spread=ours["rank"].spread,
        ),
        Row(
            f"{what}: rank 0",
            duration(ours["rank 0"]),
            f"DCP (scaled up): {duration(dcp['rank 0'])}, and {dcp['sent'] * world / 1e9:.1f} GB received",
            f"{ours['rank 0'] / dcp['rank 0']:.3f} ×",
            spread=ours["rank 0"].spread,
        ),
        Row(
            find,
            f"{duration(ours['find'])}, of {ours['read'] / 1e6:.1f} MB",
            f"DCP (scaled up): {duration(dcp['find'])}, of {dcp['read'] / 1e9:.1f} GB",
            f"{ours['find'] / dcp['find']:.3f} ×",
            spread=ours["find"].spread,
        ),
        Row(
            f"{what}: does the kept plan still fit?",
            duration(ours["kept"]),
            f"planning: {duration(ours['rank'])}",
            spread=ours["kept"].spread,
        ),
    ]


def _ours(world: int, tensors: int, rounds: int) -> dict[str, Figure]:
    """Seconds; ``read``: bytes that a rank reads before it loads."""
    of_one, of_zero = _as_rank(5, world, tensors), _as_rank(0, world, tensors)
    before = plan.signature(of_one(dict), {})
    with tempfile.TemporaryDirectory() as directory:
        files = _Files(Path(directory), of_zero(_planned), of_one(_planned))
        return {
            "rank": of_one(lambda state: _median(lambda: _planned(state), rounds)),
            "rank 0": of_zero(lambda state: _median(lambda: _planned(state), rounds)),
            "kept": of_one(lambda state: _median(lambda: plan.signature(state, {}) == before, rounds)),
            "find": of_one(lambda state: _median(lambda: files.find(state), rounds)),
            "read": figure([files.read]),
        }


def _planned(state: TensorsByComponent) -> plan.Plan:
    ShardLayout.of.cache_clear()
    return plan.plan(state, {}, {})


class _Files:
    """The index, and a rank's file of tensors, without their bytes."""

    def __init__(self, directory: Path, of_zero: plan.Plan, of_rank: plan.Plan) -> None:
        assert of_zero.index is not None
        (own,) = of_rank.files
        self._directory = directory
        self._index = directory / names.INDEX
        self._index.write_bytes(of_zero.index)
        self.file(own.name).parent.mkdir()
        self.file(own.name).write_bytes(own.layout.header)
        os.truncate(self.file(own.name), own.layout.length)
        self.read = len(of_zero.index) + len(own.layout.header)

    def file(self, name: str) -> Path:
        return self._directory / name

    def find(self, state: TensorsByComponent) -> None:
        """As before a load with the same layout."""
        index, reader = Index.read(self._index), ChunkReader(self)
        for component, its in state.items():
            stored = index.of(component)
            for name, tensor in its.items():
                for read in planned_reads(tensor, stored[name], name):
                    reader.span(read.chunk, read.dtype)


def _dcp(world: int, tensors: int, part: int, rounds: int) -> dict[str, float]:
    """Seconds and bytes; those of all ranks' plans are scaled up."""

    def planned(state: TensorsByComponent) -> SavePlan:
        planner = DefaultSavePlanner(flatten_sharded_tensors=False)
        planner.set_up_planner(state, is_coordinator=False)
        return planner.create_local_plan()

    of_one, of_part = _as_rank(5, world, tensors), _as_rank(5, world, part)
    plans = [_as_rank(rank, world, part)(planned) for rank in range(PLANS)]
    more = (world / PLANS) * (tensors / part)

    def together() -> None:
        planner = DefaultSavePlanner(flatten_sharded_tensors=False)
        planner.set_up_planner({}, is_coordinator=True)
        with contextlib.suppress(ValueError):  # when it is done it notices that not all ranks' plans are there
            planner.create_global_plan(list(plans))

    logging.getLogger(default_planner.__name__).setLevel(logging.ERROR)
    metadata = pickle.dumps(default_planner.create_default_global_save_plan(list(plans))[1])

    def found(state: TensorsByComponent) -> None:
        planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
        planner.set_up_planner(state, pickle.loads(metadata), is_coordinator=False)
        planner.create_local_plan()

    return {
        "rank": of_one(lambda state: _median(lambda: planned(state), rounds)),
        "sent": len(pickle.dumps(of_one(planned))),
        "rank 0": _median(together, rounds) * more,
        "find": of_part(lambda state: _median(lambda: found(state), rounds)) * more,
        "read": len(metadata) * more,
    }


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
