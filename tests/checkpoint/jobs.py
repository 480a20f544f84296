"""Functions that the ranks of these tests run. In a module that the fork server can import."""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import os
import pickle
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from checkpoint.parts import FixedRankNotes, Notes, RankNotes, Saved
from dalsegno.checkpoint import CheckpointManager, ModelState, OptimizerState, plan
from dalsegno.checkpoint.staging import anonymous
from dalsegno.distributed import collectives
from dalsegno.errors import DalsegnoError
from dalsegno.stateful.component import Component
from dalsegno.system import filesystem


def save_and_die(directory: Path, position: int) -> None:
    """Save steps 1 and 2, and exit at one operation of the second save."""
    manager, saved = CheckpointManager(directory), Saved()
    saved.save(manager, 1)
    calls = itertools.count()

    def die(what: str, path: Path) -> None:
        if next(calls) == position:
            os._exit(9)

    filesystem.watcher = die
    saved.save(manager, 2)


FORBIDDEN = ("pickle.find_class", "exec", "compile", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn")


def die_if_code_runs() -> None:
    """Exit with status 66 if from now on anything is unpickled, compiled, executed or started."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in FORBIDDEN:
            os._exit(66)

    sys.addaudithook(hook)


def unpickle_with_audit_hook(path: Path) -> None:
    die_if_code_runs()
    pickle.loads(path.read_bytes())


def load_with_audit_hook(directory: Path) -> str:
    """The error for the hostile checkpoint of step 1."""
    saved, warm = Saved(), CheckpointManager(directory / "warm")
    saved.save(warm, 1)  # imports and compiles on first use, before the hook is set
    warm.load(warm.find(warm.path_of(1)), saved.sharded, saved.components)  # type: ignore[arg-type]
    die_if_code_runs()
    return _what_loading_says(saved, directory)


def load_in_little_memory(directory: Path, spare: int) -> str:
    """The error for the hostile checkpoint of step 1, with at most ``spare`` further bytes of memory."""
    saved = Saved()
    saved.save(CheckpointManager(directory / "warm"), 1)
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + spare, has + spare))
    return _what_loading_says(saved, directory)


def _what_loading_says(saved: Saved, directory: Path) -> str:
    manager = CheckpointManager(directory)
    try:
        checkpoint = manager.find(manager.path_of(1))
        assert checkpoint is not None
        manager.load(checkpoint, saved.sharded, saved.components)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


# --- training on some ranks -------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Odd sizes, so that two ranks have uneven shards; a tied weight; a parameter smaller than the world size."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.middle = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.middle(self.embed(tokens)))) * self.scale
        return out


def wrapped(model: nn.Module, way: str) -> nn.Module:
    if way == "ddp":
        return DistributedDataParallel(model)
    return fully_shard(model) if way == "fsdp" else model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(8).reshape(4, 2) % 7
    loss = model(tokens).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(value: Any) -> Any:
    """The tree with DTensors gathered, tensors as arrays, which a pipe can carry, and keys sorted."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().numpy()
    if isinstance(value, torch.Tensor):
        return value.detach().clone().numpy()
    if isinstance(value, dict):
        return {key: whole(value[key]) for key in sorted(value, key=str)}
    return [whole(each) for each in value] if isinstance(value, list) else value


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return whole({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


def save_after_training(directory: Path, way: str, kind: str) -> Any:
    model = wrapped(Net(seed=0), way)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for _ in range(2):
        step(model, optimizer)
    CheckpointManager(directory).save(2, [ModelState(model), OptimizerState(model, optimizer)], [])
    return everything(model, optimizer)


def load_into_another(directory: Path, way: str, kind: str) -> Any:
    """The loaded state; whether a tied weight is still one tensor; and the state after one more step."""
    model = wrapped(Net(seed=1), way)
    optimizer = OPTIMIZERS[kind](model.parameters())
    manager = CheckpointManager(directory)
    checkpoint = manager.find()
    assert checkpoint is not None
    manager.load(checkpoint, [ModelState(model), OptimizerState(model, optimizer)], [])
    loaded = everything(model, optimizer)
    step(model, optimizer)
    net: Any = model.module if way == "ddp" else model
    return loaded, net.head.weight is net.embed.weight, everything(model, optimizer)


# --- states on some ranks ---------------------------------------------------------------------------------------------


def save_states(directory: Path, odd_rank: int | None = None) -> list[str]:
    """Save a replicated state, which differs on ``odd_rank``, and two per-rank ones; returns the warnings."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dalsegno").addHandler(handler)
    here = collectives.rank()
    components = [
        Component("callbacks.Shared", Notes({"x": torch.ones(3) + (here == odd_rank)})),
        Component("callbacks.Same", Notes([float("nan"), torch.ones(2)])),
        Component("callbacks.Mine", RankNotes(f"rank {here}")),
        Component("callbacks.Gone", FixedRankNotes((here, torch.full((2,), float(here))))),
    ]
    CheckpointManager(directory).save(1, [], components)
    return lines


def load_states(directory: Path, save_as: int) -> Any:
    """Load the states of :func:`save_states` without ``Gone``, and save them as another step."""
    manager = CheckpointManager(directory)
    checkpoint = manager.find()
    assert checkpoint is not None
    notes, mine = Notes(), RankNotes()
    components = [Component("callbacks.Shared", notes), Component("callbacks.Mine", mine)]
    report = manager.load(checkpoint, [], components)
    manager.save(save_as, [], components)
    return notes.state["x"].tolist(), mine.state, report


def load_gone(directory: Path) -> Any:
    manager = CheckpointManager(directory)
    checkpoint = manager.find()
    assert checkpoint is not None
    gone = FixedRankNotes()
    manager.load(checkpoint, [], [Component("callbacks.Gone", gone)])
    number, tensor = gone.state
    return number, tensor.tolist()


def fail_to_save(directory: Path, bad_rank: int, bad_state: Any) -> Any:
    """Save; save with an invalid state on one rank; save again. Returns the error and the files left by the failure."""
    manager, mine = CheckpointManager(directory), RankNotes(1)
    components = [Component("callbacks.Mine", mine)]
    manager.save(1, [], components)
    if collectives.rank() == bad_rank:
        mine.state = bad_state
    try:
        manager.save(2, [], components)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    left = sorted(path.name for path in manager.directory.iterdir())
    mine.state = 3
    manager.save(3, [], components)
    return failure, left


def fail_to_write(directory: Path, bad_rank: int) -> Any:
    """The disk is full for one rank."""

    def full(what: str, path: Path) -> None:
        if what == "write" and path.name.startswith(f"rank-{bad_rank:05d}") and "00000002" in str(path):
            raise OSError(28, "No space left on device")

    filesystem.watcher = full
    return fail_to_save(directory, -1, None)


def find_only(directory: Path) -> tuple[int, int]:
    """The step that find() returns, and the number of files that this rank read."""
    opened = []
    original = os.preadv

    def counted(descriptor: int, buffers: Any, begin: int) -> int:
        opened.append(descriptor)
        return original(descriptor, buffers, begin)

    os.preadv = counted
    checkpoint = CheckpointManager(directory).find()
    assert checkpoint is not None
    return checkpoint.step, len(opened)


def find_while_ranks_fail_differently(directory: Path) -> str:
    """Rank 0 finds a wrong checksum, rank 1 a disk error."""
    original = os.preadv

    def failing(descriptor: int, buffers: Any, begin: int) -> int:
        if collectives.rank() == 1:
            raise OSError(5, "Input/output error")
        count = original(descriptor, buffers, begin)
        if count:
            buffers[0][0] ^= 1
        return count

    os.preadv = failing
    try:
        CheckpointManager(directory).find()
    except Exception as error:
        os.preadv = original
        CheckpointManager(directory).find()  # a collective: the ranks are in step again
        return f"{type(error).__name__}: {error}"
    return "found"


def save_notes_of(directory: Path, size: int) -> str:
    """Save a state of the given number of bytes on each rank."""
    notes = RankNotes(torch.zeros(size, dtype=torch.uint8))
    try:
        CheckpointManager(directory).save(1, [], [Component("callbacks.Mine", notes)])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def save_where_one_rank_begins_anew(directory: Path) -> list[int]:
    """How often this rank planned after each of three saves, the last one with a new manager on rank 1."""
    original, asked, counts = plan.plan, itertools.count(1), []
    plan.plan = lambda *them: (next(asked), original(*them))[1]
    saved, manager = Saved(), CheckpointManager(directory)
    for step in (1, 2, 3):
        if step == 3 and collectives.rank() == 1:
            manager = CheckpointManager(directory)
        saved.save(manager, step)
        counts.append(next(asked) - 1)
        asked = itertools.count(counts[-1] + 1)
    return counts


def free_a_buffer_in_a_fork(size: int) -> int:
    """How a process ends that has memory of its own when it frees a buffer of the one that it was forked from."""
    buffers = [anonymous(size)]
    child = os.fork()
    if child == 0:
        own = [mmap.mmap(-1, size // 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(64)]
        buffers.clear()
        for each in own:
            each[0] = 1
        os._exit(0)
    return os.waitpid(child, 0)[1]


def page_faults_of_a_save_after_a_fork(directory: Path, size: int) -> int:
    """Of the second one, while a process that was forked after the first one still lives."""
    model = nn.Module()
    model.register_buffer("it", torch.zeros(size, dtype=torch.uint8))
    manager, state = CheckpointManager(directory), ModelState(model)
    manager.save_async(1, [state], []).join()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        os._exit(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    manager.save_async(2, [state], []).join()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    os.write(writer, b"x")
    os.waitpid(child, 0)
    return faults


def load_while_a_file_fails(directory: Path, what: str) -> str:
    """Load a model of two tensors, whose file is changed between them; returns the error."""
    model = nn.Linear(1000, 1000)
    manager, sharded = CheckpointManager(directory), [ModelState(model)]
    manager.save(1, sharded, [])
    checkpoint = manager.find()
    assert checkpoint is not None
    read, calls = os.preadv, itertools.count()

    def fail_after_the_first(descriptor: int, buffers: Any, begin: int) -> int:
        if next(calls):
            if what != "cut":
                number = errno.EIO if what == "no disk" else errno.ESTALE
                raise OSError(number, os.strerror(number))
            os.truncate(checkpoint.file("model/shard-00000.safetensors"), 5000)
        return read(descriptor, buffers, begin)

    os.preadv = fail_after_the_first
    try:
        manager.load(checkpoint, sharded, [])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.preadv = read
    return "loaded"


def load_and_empty_the_files(directory: Path) -> list[float]:
    """The tensor in a callback's state, read after the checkpoint's files were deleted."""
    manager, saved = CheckpointManager(directory), Saved(seed=1)
    checkpoint = manager.find()
    assert checkpoint is not None
    manager.load(checkpoint, saved.sharded, saved.components)
    for path in checkpoint.path.rglob("*.safetensors"):
        os.truncate(path, 0)
    state: list[float] = saved.notes.state["tensor"].tolist()
    return state


def bytes_read(directory: Path) -> tuple[int, int, int]:
    """Save a model of 16 MB sharded over the ranks; then the bytes of its files, and what this rank reads of them to
    find and verify the checkpoint, and to load it."""
    model = nn.ParameterList([nn.Parameter(torch.randn(1 << 19)) for _ in range(8)])
    fully_shard(model)
    manager, state = CheckpointManager(directory), ModelState(model)
    manager.save(1, [state], [])
    checkpoint = manager.find()
    assert checkpoint is not None
    manager.load(checkpoint, [state], [])  # imports on first use
    begun = _read_so_far()
    checkpoint = manager.find()
    verified = _read_so_far()
    assert checkpoint is not None
    manager.load(checkpoint, [state], [])
    return sum(each.size for each in checkpoint.manifest.files.values()), verified - begun, _read_so_far() - verified


def _read_so_far() -> int:
    """Bytes that this process has read from files so far, from the page cache or not."""
    return int(Path("/proc/self/io").read_text().split()[1])


def sharded_as(*sizes: int) -> nn.Module:
    """A parameter of which rank n holds as many elements as the nth of ``sizes``, all of value n."""
    mesh, rank = init_device_mesh("cpu", (collectives.world_size(),)), collectives.rank()
    held = torch.full((sizes[rank],), float(rank))
    whole = DTensor.from_local(held, mesh, [Shard(0)], shape=(sum(sizes),), stride=(1,))
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(whole, requires_grad=False))
    return model


def save_in_shards(directory: Path, is_left_out: bool, *sizes: int) -> None:
    manager, state = CheckpointManager(directory), ModelState(sharded_as(*sizes))
    if is_left_out:
        manager.leave_out_base([state])
    manager.save(1, [state], [])


def load_into_shards(directory: Path, *sizes: int) -> tuple[str, list[float]]:
    """The error, and what the parameter then contains on this rank."""
    manager, model = CheckpointManager(directory), sharded_as(*sizes)
    checkpoint = manager.find()
    assert checkpoint is not None
    try:
        manager.load(checkpoint, [ModelState(model)], [])
    except DalsegnoError as error:
        return f"{type(error).__name__}: {error}", model.w.to_local().tolist()
    return "", model.w.to_local().tolist()
