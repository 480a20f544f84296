"""The plan of who writes what: computed by each rank alone, and sharded as torch shards."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as as_torch_cuts
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dalsegno.checkpoint import CheckpointManager
from dalsegno.checkpoint.contract import Captured, cuts_of
from dalsegno.checkpoint.index import Index
from dalsegno.checkpoint.plan import FilePlan, Plan, plan, signature
from dalsegno.checkpoint.sharding import Box, ShardedChunks, Sharding
from dalsegno.checkpoint.tensor_files import part
from dalsegno.checkpoint.tensor_reader import PlannedLoad
from dalsegno.errors import CannotSave
from dalsegno.testing import run_ranks

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def spread(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement]]:
    shape, mesh = draw(SHAPES), draw(MESHES)
    shards = st.integers(0, len(shape) - 1).map(Shard)
    return shape, mesh, [draw(st.just(Replicate()) | shards) for _ in mesh]


def box_at(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: list[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    box = Sharding((), mesh, cuts_of(placements, mesh)).box_at(shape, coordinate)
    return box.offsets, box.shape


@given(spread())
def test_parts_are_where_torch_cuts(case: tuple[tuple[int, ...], tuple[int, ...], list[Placement]]) -> None:
    shape, mesh, placements = case
    boxes = set()
    for coordinate in itertools.product(*map(range, mesh)):
        offsets, sizes = box_at(shape, mesh, coordinate, placements)
        theirs, their_offsets = as_torch_cuts(shape, mesh, list(coordinate), placements)
        assert sizes == tuple(theirs)
        if 0 not in sizes:
            assert offsets == tuple(their_offsets)
            boxes.add((offsets, sizes))
    assert sum(math.prod(sizes) for _, sizes in boxes) == math.prod(shape)  # every element, once


@given(spread(), st.data())
def test_any_box_is_found_in_the_chunks_once(
    case: tuple[tuple[int, ...], tuple[int, ...], list[Placement]], data: st.DataObject
) -> None:
    shape, mesh, placements = case
    sharding = Sharding(tuple(range(math.prod(mesh))), mesh, cuts_of(placements, mesh))
    begins = tuple(data.draw(st.integers(0, size)) for size in shape)
    sizes = tuple(data.draw(st.integers(0, size - begin)) for begin, size in zip(begins, shape, strict=True))
    wanted = Box(begins, sizes)
    count = torch.zeros(shape, dtype=torch.int)
    for chunk in ShardedChunks("model", "weight", shape, sharding, 0, False).overlapping(wanted):
        box = chunk.box.common(wanted)
        assert box is not None
        part(count, box).add_(1)
    expected = torch.zeros(shape, dtype=torch.int)
    part(expected, wanted).fill_(1)
    assert torch.equal(count, expected)


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (3, 2)])
def test_fsdp_over_tensor_parallelism_is_in_one_piece(mesh: tuple[int, int]) -> None:
    placements: list[Placement] = [_StridedShard(0, split_factor=mesh[1]), Shard(0)]
    for coordinate in itertools.product(*map(range, mesh)):
        offsets, sizes = box_at((24, 5), mesh, coordinate, placements)
        assert (sizes, offsets) == as_torch_cuts((24, 5), mesh, list(coordinate), placements)


def test_a_part_in_several_pieces_is_refused() -> None:
    with pytest.raises(CannotSave, match="redistribute it"):
        box_at((8,), (2, 2), (0, 0), [Shard(0), _StridedShard(0, split_factor=2)])


def test_what_is_yet_to_be_summed_up_is_refused() -> None:
    with pytest.raises(CannotSave, match="redistribute it"):
        box_at((4,), (2,), (0,), [Partial()])


class Tensors:
    """A component that is nothing but these."""

    key, class_name, optimizer = "things", "Tensors", None

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def capture(self) -> Captured:
        return Captured(self.tensors, {})


def save_many_kinds(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    whole = {
        "odd": torch.arange(15.0).reshape(5, 3),
        "short": torch.arange(3.0).reshape(1, 3),
        "both": torch.arange(36.0).reshape(6, 6),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7.0),
    }
    how: dict[str, list[Placement]] = {
        "odd": [Replicate(), Shard(0)],
        "short": [Replicate(), Shard(0)],
        "both": [Shard(0), Shard(1)],
        "empty": [Replicate(), Shard(0)],
    }
    tensors: dict[str, torch.Tensor] = {
        name: distribute_tensor(each, mesh, how[name]) if name in how else each for name, each in whole.items()
    }
    CheckpointManager(directory).save(1, [Tensors(tensors)], [])  # type: ignore[list-item]


def test_every_kind_of_spreading_comes_back(tmp_path: Path) -> None:
    run_ranks(save_many_kinds, 4, tmp_path)
    path = tmp_path / "checkpoints/step-00000001"
    index = Index.read(path / "index.json")

    class There:
        def require(self, names: Collection[str]) -> None:
            """All are there."""

        def is_here(self, name: str) -> bool:
            return True

        def file(self, name: str) -> Path:
            return path / name

    loaded = {name: torch.full(each.shape, -1.0) for name, each in index.of("things").items()}
    PlannedLoad({"things": loaded}, There(), index).run()
    assert torch.equal(loaded["odd"], torch.arange(15.0).reshape(5, 3))
    assert torch.equal(loaded["short"], torch.arange(3.0).reshape(1, 3))
    assert torch.equal(loaded["both"], torch.arange(36.0).reshape(6, 6))
    assert loaded["scalar"].item() == 7.0
    assert loaded["empty"].shape == (0, 3)


def plan_of(rank: int, world: int, mesh: tuple[int, ...], placements: list[Placement]) -> Plan:
    """What one of many ranks plans for tensors of the same kind; the others are simulated."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        ranks = init_device_mesh("cpu", mesh)
        state: dict[str, torch.Tensor] = {"buffer": torch.empty(3, device="meta")}
        for number in range(20):
            local = torch.empty((4, 3), device="meta")
            state[f"{number}.weight"] = DTensor.from_local(local, ranks, placements, run_check=False)
        return plan({"model": state}, {}, {})
    finally:
        dist.destroy_process_group()


def planned(world: int, mesh: tuple[int, ...], placements: list[Placement]) -> list[Plan]:
    return [plan_of(rank, world, mesh, placements) for rank in range(world)]


MANY: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "fsdp": ((-1,), [Shard(0)]),
    "hsdp": ((2, -1), [Replicate(), Shard(0)]),
    "ddp": ((-1,), [Replicate()]),
}


@pytest.mark.parametrize("layout", MANY)
def test_the_index_does_not_grow_with_the_ranks(layout: str) -> None:
    """But by their numbers; and each chunk is written by one rank."""
    mesh, placements = MANY[layout]
    sizes = {}
    for world in (8, 32):
        dimensions = tuple(
            world // 2 if size == -1 and len(mesh) > 1 else world if size == -1 else size for size in mesh
        )
        (plans,) = run_ranks(planned, 1, world, dimensions, placements)
        assert plans[0].index is not None and all(each.index is None for each in plans[1:])
        sizes[world] = len(plans[0].index)
        written = [(chunk.name, chunk.offsets) for each in plans for file in each.files for chunk in file.layout.chunks]
        assert len(written) == len(set(written))
        index = Index.parse(json.loads(plans[0].index), Path("index.json"))
        chunks = [chunk for its in index.tensors.values() for each in its.values() for chunk in each.chunks]
        stored = {(chunk.name, chunk.box.offsets): chunk.file for chunk in chunks}
        assert stored == {
            (chunk.name, chunk.offsets): file.name
            for each in plans
            for file in each.files
            for chunk in file.layout.chunks
        }
    assert sizes[32] - sizes[8] < 24 * 4 * 3 + 20 * 20


def signatures_of_either_sharded() -> list[object]:
    """Of two tensors of one shape, the one or the other is sharded."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh, whole = init_device_mesh("cpu", (2,)), torch.empty(4, 3)
        sharded = DTensor.from_local(torch.empty(2, 3), mesh, [Shard(0)], run_check=False)
        return [
            signature({"model": {"first": first, "second": second}}, {})
            for first, second in ((sharded, whole), (whole, sharded))
        ]
    finally:
        dist.destroy_process_group()


def sharding_of_another_tensor_is_another_plan() -> bool:
    one, other = signatures_of_either_sharded()
    return one != other


def test_a_plan_does_not_fit_if_another_tensor_is_sharded() -> None:
    assert run_ranks(sharding_of_another_tensor_is_another_plan, 1) == [True]


def frozen_files(rank: int, world: int, optimizer: dict[str, torch.Tensor]) -> list[FilePlan]:
    """Files of the frozen tensors that one of many ranks writes; the others are simulated."""
    model = {f"{number}.weight": torch.empty(1000 + 64 * (number % 3), device="meta") for number in range(100)}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        planned = plan({"model": model, "optimizer": optimizer}, {"model": list(model)}, {})
        return [each for each in planned.files if each.is_frozen]
    finally:
        dist.destroy_process_group()


def frozen_files_before_and_after() -> list[bool]:
    state = {"exp_avg": torch.empty(1_000_000, device="meta")}
    return [frozen_files(rank, 4, {}) == frozen_files(rank, 4, state) for rank in range(4)]


def test_frozen_tensors_stay_in_their_files_when_others_come() -> None:
    """Or the whole frozen base would be written again when an optimizer gets its state."""
    assert run_ranks(frozen_files_before_and_after, 1) == [[True] * 4]


def save_what_differs(directory: Path) -> str:
    shape = (2, 3) if dist.get_rank() == 0 else (2, 4)
    try:
        CheckpointManager(directory).save(1, [Tensors({"same": torch.ones(1), "expert": torch.ones(shape)})], [])  # type: ignore[list-item]
    except CannotSave as error:
        return str(error)
    return "saved"


def test_different_tensors_on_the_ranks_are_refused(tmp_path: Path) -> None:
    errors = run_ranks(save_what_differs, 2, tmp_path)
    assert errors[0] == errors[1]
    assert "rank 0 has things.expert [2, 3] torch.float32, where rank 1 has things.expert [2, 4]" in errors[0]
    assert not list((tmp_path / "checkpoints").glob("step-*"))
