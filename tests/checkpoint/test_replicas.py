"""Ranks of several hosts hold equal tensors: one rank reads each of them, and broadcasts it to the others."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from checkpoint import jobs
from checkpoint.parts import Notes
from checkpoint.sameness import assert_same
from dalsegno.checkpoint import CheckpointManager, ModelState, OptimizerState, load_parts, restore
from dalsegno.checkpoint.tensor_files import as_bytes
from dalsegno.distributed import collectives
from dalsegno.errors import DamagedCheckpoint
from dalsegno.stateful.component import Component
from dalsegno.testing import run_ranks
from dalsegno.testing.processes import start_ranks
from support.exchanges import Exchanges

NAME = "0.weight"
LARGE = 1 << 20  # numbers of the large tensors


class Odd(nn.Module):
    """Many dtypes, a buffer, a tied weight, an empty tensor and a scalar; large ones, and small ones in between."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Parameter(torch.randn(LARGE))
        self.last = nn.Parameter(torch.randn(1024, LARGE // 1024).t())  # not contiguous
        self.net = jobs.Net(seed)
        for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn)):
            self.register_buffer(f"b{number}", torch.randn(5).to(dtype))
        self.register_buffer("mask", torch.randn(7) > 0)
        self.register_buffer("counts", torch.randint(9, (2, 2), dtype=torch.int16))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(float("nan") if seed else 2.0))


def spread(model: nn.Module, way: str) -> nn.Module:
    if way == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    return DistributedDataParallel(model) if way == "ddp" else jobs.wrapped(model, way)


def pretend_hosts(hosts: str) -> None:
    """Each rank is on the host with the letter at its number."""
    restore.boot_id = lambda: hosts[collectives.rank()]  # type: ignore[assignment]


def trained(seed: int, way: str, net: type[nn.Module] = jobs.Net) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = spread(net(seed), way)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def save(directory: Path, way: str) -> Any:
    model, optimizer = trained(0, way)
    for _ in range(2):
        jobs.step(model, optimizer)
    CheckpointManager(directory).save(2, [ModelState(model), OptimizerState(model, optimizer)], [])
    return jobs.everything(model, optimizer)


def load(directory: Path, way: str, hosts: str) -> tuple[Any, bool, Any, int]:
    """The loaded state, whether the tied weight is one tensor, the state after another step, and the broadcasts."""
    pretend_hosts(hosts)
    model, optimizer = trained(1, way)
    manager = CheckpointManager(directory)
    checkpoint = manager.find()
    assert checkpoint is not None
    with Exchanges() as exchanges:
        manager.load(checkpoint, [ModelState(model), OptimizerState(model, optimizer)], [])
    loaded = jobs.everything(model, optimizer)
    jobs.step(model, optimizer)
    net: Any = model.module if way == "ddp" else model
    return loaded, net.head.weight is net.embed.weight, jobs.everything(model, optimizer), exchanges.counts["broadcast"]


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "hosts", "broadcasts"),
    [
        ("ddp 2", "ddp 2", "ab", True),
        ("ddp 2", "ddp 2", "aa", False),
        ("fsdp 2", "ddp 2", "ab", True),
        ("none 1", "ddp 2", "ab", True),
        ("fsdp 2", "fsdp 2", "ab", True),  # its buffer
        ("fsdp 2", "hsdp 4", "aabb", True),
        ("hsdp 4", "hsdp 4", "abab", True),
        ("hsdp 4", "hsdp 4", "aaaa", False),
        ("hsdp 4", "none 1", "a", False),
    ],
)
def test_every_rank_has_what_was_saved(
    tmp_path: Path, saved_by: str, loaded_by: str, hosts: str, broadcasts: bool
) -> None:
    (saved_way, saved_ranks), (loaded_way, loaded_ranks) = saved_by.split(), loaded_by.split()
    saved = run_ranks(save, int(saved_ranks), tmp_path, saved_way)
    loaded = run_ranks(load, int(loaded_ranks), tmp_path, loaded_way, hosts)
    for state, is_tied, after, count in loaded:
        assert is_tied
        assert_same(state, saved[0])
        assert_same(after, loaded[0][2])
        assert (count > 0) == broadcasts


def read_and_received(directory: Path, hosts: str) -> tuple[list[str], int, int]:
    """Of a model with all kinds of tensors, those that are not loaded as they were saved; the bytes of the files, and
    those that this rank reads to load them."""
    pretend_hosts(hosts)
    saved, loaded = Odd(seed=0), Odd(seed=1)
    manager = CheckpointManager(directory)
    manager.save(1, [ModelState(saved)], [])
    checkpoint = manager.find()
    assert checkpoint is not None
    before = jobs._read_so_far()
    load_parts(checkpoint, [ModelState(loaded)])
    read = jobs._read_so_far() - before
    size = sum(each.size for each in checkpoint.manifest.files.values())
    return [name for name, each in saved.state_dict().items() if not same_bits(each, loaded, name)], size, read


def same_bits(saved: torch.Tensor, model: nn.Module, name: str) -> bool:
    return torch.equal(as_bytes(saved), as_bytes(model.state_dict()[name]))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts what a process reads")
def test_hosts_read_the_model_once_together(tmp_path: Path) -> None:
    for hosts, least, most in (("ab", 0.4, 0.6), ("aa", 0.9, 1.1)):
        for other, size, read in run_ranks(read_and_received, 2, tmp_path / hosts, hosts):
            assert other == []
            assert least * size < read < most * size


def load_while_a_reader_fails(directory: Path, how: str) -> str:
    """Rank 1 cannot read; the error that this rank raises, and whether the ranks can still agree."""
    pretend_hosts("ab")
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    manager, sharded = CheckpointManager(directory), [ModelState(model)]
    manager.save(1, sharded, [])
    checkpoint = manager.find()
    assert checkpoint is not None
    read = os.preadv

    def fail(descriptor: int, buffers: Any, begin: int) -> int:
        if collectives.rank() == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, buffers, begin)

    os.preadv = fail
    try:
        manager.load(checkpoint, sharded, [Component("notes", Notes())])
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        os.preadv = read
    return text if how == "killed" else f"{text} {collectives.gather(collectives.rank(), 'after it')}"


def test_a_reader_that_fails_fails_all(tmp_path: Path) -> None:
    of_zero, of_one = run_ranks(load_while_a_reader_fails, 2, tmp_path, "fails")
    assert "RankFailed: rank 1: OSError" in of_zero and "Input/output error" in of_zero and of_zero.endswith("[0, 1]")
    assert of_one.startswith("OSError") and of_one.endswith("[0, 1]")


def test_a_reader_that_is_killed_leaves_no_rank_waiting(tmp_path: Path) -> None:
    of_zero, of_one = start_ranks(load_while_a_reader_fails, 2, tmp_path, "killed").wait(60)
    assert of_one.exit_code == -signal.SIGKILL
    assert of_zero.exit_code == 0 and "RuntimeError" in str(of_zero.value)


def load_unlike_tensors(directory: Path, is_damaged: bool) -> Any:
    """Rank 1 loads fewer tensors than rank 0; ``is_damaged``: and those that rank 0 would have read are damaged."""
    pretend_hosts("ab")
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    state = ModelState(model)
    manager = CheckpointManager(directory)
    manager.save(1, [state], [])
    checkpoint = manager.find()
    assert checkpoint is not None
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[0].weight)
    prepare = state.prepare

    def prepare_less(*arguments: Any) -> Any:
        target = prepare(*arguments)
        if collectives.rank() == 1:
            del target.tensors[NAME]
        return target

    def refuse(load: restore.ShardedLoad) -> None:
        raise DamagedCheckpoint("its header")

    refuse.__qualname__ = restore.ShardedLoad.read_all.__qualname__  # which the ranks compare
    state.prepare = prepare_less  # type: ignore[method-assign]
    if is_damaged and collectives.rank() == 1:
        restore.ShardedLoad.read_all = refuse  # type: ignore[method-assign]
    try:
        manager.load(checkpoint, [state], [])
    except DamagedCheckpoint as error:
        return f"{error} {collectives.gather(collectives.rank(), 'after it')}"
    return [float(each.weight.abs().sum()) for each in model]


def test_ranks_that_load_other_tensors_read_on_their_own(tmp_path: Path) -> None:
    (first, second), (without, also) = run_ranks(load_unlike_tensors, 2, tmp_path, False)
    assert first > 0 and without == 0
    assert second == also > 0


def test_what_a_rank_then_finds_damaged_fails_all(tmp_path: Path) -> None:
    of_zero, of_one = run_ranks(load_unlike_tensors, 2, tmp_path, True)
    assert (of_zero, of_one) == ("rank 1: its header [0, 1]", "its header [0, 1]")


def load_on_a_mesh(directory: Path) -> bool:
    """A tensor with copies along both dimensions of a mesh, one that is not on a mesh, and one on a part of the
    ranks."""
    pretend_hosts("aabb")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    copied = distribute_tensor(torch.arange(6.0), mesh, [Replicate(), Replicate()])
    model = nn.Module()
    model.register_parameter("copied", nn.Parameter(copied))
    model.register_parameter("plain", nn.Parameter(torch.arange(3.0)))
    model.register_parameter("inner", nn.Parameter(distribute_tensor(torch.arange(4.0), mesh["inner"], [Replicate()])))
    manager = CheckpointManager(directory)
    manager.save(1, [ModelState(model)], [])
    for parameter in model.parameters():
        nn.init.constant_(parameter, -1.0)
    checkpoint = manager.find()
    assert checkpoint is not None
    manager.load(checkpoint, [ModelState(model)], [])
    expected = {"copied": torch.arange(6.0), "plain": torch.arange(3.0), "inner": torch.arange(4.0)}
    return all(torch.equal(local_of(each), expected[name]) for name, each in model.named_parameters())


def local_of(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def test_copies_along_any_dimension_of_a_mesh(tmp_path: Path) -> None:
    assert run_ranks(load_on_a_mesh, 4, tmp_path) == [True] * 4
