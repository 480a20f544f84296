"""What a memory checkpoint costs: how long training stands still for it, beside a copy of as many bytes.

The state is copied into warm pages of shared memory, once both slots have been used, and held against nothing but that
copy: 512 MB, moved tensor by tensor into a mapping of the same kind. A thread hashes it during the next steps.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import nn

from dalsegno.checkpoint import MemoryCheckpoints, ModelState
from dalsegno.checkpoint.format import memory_dir
from dalsegno.distributed.layout import Layout
from dalsegno.system import filesystem
from dalsegno.testing import run_ranks

from .row import Row, duration
from .standstill import memcpy
from .timing import in_turns, ratio

TENSORS = 64
BYTES = 512 << 20
ROUNDS = 15
TARGET = 1.15
OURS, COPY = "ours", "one warm memcpy into shared memory"

SMALL = {"size": 1 << 20, "rounds": 1}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


def run(size: int = BYTES, rounds: int = ROUNDS) -> list[Row]:
    """Medians of the rounds; each round measures both once."""
    with TemporaryDirectory() as directory:
        seconds = run_ranks(_standing_still, 1, Path(directory), size, rounds, timeout=1200)[0]
    times = ratio(seconds[OURS], seconds[COPY])
    return [
        Row(
            what=f"training stands still for a memory checkpoint, {size >> 20} MB",
            ours=duration(median(seconds[OURS])),
            peer=f"{COPY}: {duration(median(seconds[COPY]))}",
            ratio=f"{times:.2f} ×",
            target=f"≤ {TARGET} ×",
            met=times <= TARGET,
            spread=times.spread,
        )
    ]


def _standing_still(directory: Path, size: int, rounds: int) -> dict[str, list[float]]:
    model = nn.ParameterList([nn.Parameter(torch.randn(size // TENSORS // 4)) for _ in range(TENSORS)])
    state, checkpoints = ModelState(model), MemoryCheckpoints(directory, Layout.flat())
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
        return in_turns({OURS: save, COPY: memcpy(model, _shared(memory_dir.root() / f"copy-{step}", size))}, rounds)
    finally:
        checkpoints.close(remove=True)


def _shared(path: Path, size: int) -> mmap.mmap:
    memory = filesystem.map_new(path, size)
    path.unlink()
    return memory
