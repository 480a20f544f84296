"""What a memory checkpoint costs: how long training stands still for it, beside a copy of as many bytes.

The state is copied into warm pages of shared memory, once both slots have been used, and held against nothing but that
copy: 512 MB, moved tensor by tensor into a mapping of the same kind. A thread hashes it during the next steps. Then 16
MB beside 1 GB of frozen parameters, which are not copied again, but read: held against a copy of what is trained and a
hash of the rest, by one thread; and the memory that both slots take, against twice what is trained and once the rest.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import xxhash
from torch import nn

from dalsegno.checkpoint import MemoryCheckpoints, ModelState, memory_dir
from dalsegno.distributed.layout import Layout
from dalsegno.system import filesystem
from dalsegno.system.progress import format_bytes
from dalsegno.testing import run_ranks

from .row import Row, duration
from .standstill import memcpy
from .timing import in_turns, ratio

TENSORS = 64
BYTES = 512 << 20
TRAINED_BYTES, FROZEN_BYTES = 16 << 20, 1 << 30
ROUNDS = 15
TARGET = 1.15
OURS, COPY = "ours", "one warm memcpy into shared memory"
COPY_AND_HASH = "one warm memcpy of what is trained, one hash of the rest"

SMALL = {"size": 1 << 20, "frozen": 1 << 20, "rounds": 1}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


def run(size: int = BYTES, frozen: int = FROZEN_BYTES, rounds: int = ROUNDS) -> list[Row]:
    """Medians of the rounds; each round measures both once."""
    trained = min(size, TRAINED_BYTES)
    with TemporaryDirectory() as directory:
        whole, _ = run_ranks(_standing_still, 1, Path(directory), size, 0, rounds, timeout=1200)[0]
        seconds, taken = run_ranks(_standing_still, 1, Path(directory), trained, frozen, rounds, timeout=1200)[0]
    beside, least = f"{trained >> 20} MB beside {frozen >> 20} MB of frozen ones", 2 * trained + frozen
    return [
        _row(f"training stands still for a memory checkpoint, {size >> 20} MB", whole, COPY),
        _row(f"training stands still for a memory checkpoint, {beside}", seconds, COPY_AND_HASH),
        Row(
            what=f"memory for checkpoints in memory, {beside}",
            ours=format_bytes(taken),
            peer=f"twice what is trained, once the rest: {format_bytes(least)}",
            ratio=f"{taken / least:.2f} ×",
        ),
    ]


def _row(what: str, seconds: dict[str, list[float]], peer: str) -> Row:
    times = ratio(seconds[OURS], seconds[peer])
    return Row(
        what=what,
        ours=duration(median(seconds[OURS])),
        peer=f"{peer}: {duration(median(seconds[peer]))}",
        ratio=f"{times:.2f} ×",
        target=f"≤ {TARGET} ×",
        met=times <= TARGET,
        spread=times.spread,
    )


def _standing_still(directory: Path, size: int, frozen: int, rounds: int) -> tuple[dict[str, list[float]], int]:
    """Seconds for which training stands still, and those of its peer; and the memory that is taken in the end."""
    trained, base = _parameters(size), _parameters(frozen).requires_grad_(False)
    state, checkpoints = ModelState(nn.ModuleList([trained, base])), MemoryCheckpoints(directory, Layout.flat())
    checkpoints.begin_leg([state], saving=True)
    step = 0

    def save() -> float:
        nonlocal step
        step += 1
        os.sync()  # as before the copy
        began = time.perf_counter()
        checkpoints.capture(step, [state], [], {}, metrics={}, is_finite=True)
        checkpoints.publish()
        seconds = time.perf_counter() - began
        checkpoints.settle()
        return seconds

    try:
        save()  # each slot once; in_turns() begins with the other
        copy = memcpy(trained, _shared(memory_dir.root() / f"copy-{step}", size))
        peer = (COPY_AND_HASH, _then_hash(copy, base)) if frozen else (COPY, copy)
        return in_turns({OURS: save, peer[0]: peer[1]}, rounds), memory_dir.size_of(memory_dir.find_all())
    finally:
        checkpoints.close(remove=True)


def _parameters(size: int) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.randn(size // TENSORS // 4)) for _ in range(TENSORS)])


def _then_hash(copy: Callable[[], float], base: nn.ParameterList) -> Callable[[], float]:
    """Measures a copy, and then a hash of ``base``."""

    def measure() -> float:
        seconds, began, checksum = copy(), time.perf_counter(), xxhash.xxh3_128()
        for each in base:
            checksum.update(each.detach().numpy().data)
        return seconds + time.perf_counter() - began

    return measure


def _shared(path: Path, size: int) -> mmap.mmap:
    memory = filesystem.map_new(path, size)
    path.unlink()
    return memory
