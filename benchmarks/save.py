"""Durable saves by one rank and by two, beside what the disk gives and what others offer.

Ours is all of it, from the capture to the rename: copies, checksums, files, directories, manifest, all fsynced. What it
is held against writes as many bytes from memory, each rank its share in one file: directly, in pieces of 16 MB, past
the page cache, which is the most that the disk gives; the same after one copy of these bytes by one thread, which is
what a save in the background can hardly avoid; and plainly, with an fsync at the end. Ours in the background is timed
from the call until the checkpoint is published.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from dalsegno.checkpoint import CheckpointManager, ModelState
from dalsegno.system import filesystem
from dalsegno.testing import run_ranks

from . import disk
from .row import Row, three_digits
from .timing import in_turns, ratio

ROUNDS = 5
BACKGROUND, FOREGROUND = OURS = ("in the background", "in the foreground")
LIMIT, BOUND, PLAIN = "the disk's direct limit", "memcpy + direct write", "plain write + fsync"


@dataclass(frozen=True)
class Case:
    """A model of ``tensors`` float32 tensors of ``tensor_bytes`` each."""

    what: str
    tensors: int
    tensor_bytes: int
    background: float
    """Target of a save in the background, as a share of the time of the disk's direct limit."""

    @property
    def targets(self) -> dict[str, dict[str, float]]:
        """As shares of others' times."""
        return {BACKGROUND: {LIMIT: self.background, PLAIN: 1.0}, FOREGROUND: {LIMIT: 1 / 0.9, PLAIN: 1 / 1.5}}

    @property
    def bytes(self) -> int:
        return self.tensors * self.tensor_bytes


CASES = (Case("2 GB in 8 MB tensors", 256, 8 << 20, 1.25), Case("500 MB in 20,000 tensors", 20_000, 25_000, 1.5))

SMALL = {"cases": (Case("1 MB in 64 tensors", 64, 16 << 10, 1.25),), "rounds": 1}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


def run(cases: tuple[Case, ...] = CASES, rounds: int = ROUNDS) -> list[Row]:
    """Medians of the rounds; each round measures everybody once."""
    rows = []
    for case in cases:
        for world_size in (1, 2):
            with TemporaryDirectory(
                prefix=".benchmark-", dir=Path.cwd()
            ) as directory:  # on a disk, where /tmp may be memory
                seconds = run_ranks(_measured, world_size, Path(directory), case, rounds, timeout=3000)[0]
            rows += _rows(case, world_size, seconds)
    return rows


def _rows(case: Case, world_size: int, seconds: dict[str, list[float]]) -> list[Row]:
    def speed(name: str) -> str:
        return f"{three_digits(case.bytes / median(seconds[name]) / 1e9)} GB/s"

    who = "one rank" if world_size == 1 else f"{world_size} ranks"
    rows = []
    targets = case.targets
    for ours, others in (
        (BACKGROUND, [name for name in seconds if name not in OURS]),
        (FOREGROUND, [LIMIT, PLAIN]),
    ):
        for name in others:
            times = ratio(seconds[ours], seconds[name])
            target = targets[ours].get(name)
            rows.append(
                Row(
                    what=f"durable save {ours}, {case.what}, {who}",
                    ours=speed(ours),
                    peer=f"{name}: {speed(name)}",
                    ratio=f"{times:.2f} × its time",
                    target="" if target is None else f"≤ {target:.2f}",
                    met=None if target is None else times <= target,
                    spread=times.spread,
                )
            )
    return rows


def _measured(directory: Path, case: Case, rounds: int) -> dict[str, list[float]]:
    """On each rank."""
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(case.tensor_bytes // 4)) for _ in range(case.tensors)])
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    memory = disk.memory(filesystem.whole_pages(-(-case.bytes // world_size)))
    memory[:] = os.urandom(filesystem.PAGE) * (len(memory) // filesystem.PAGE)
    saves: dict[str, Callable[[Path], object]] = {
        BACKGROUND: _ours(model, background=True),
        FOREGROUND: _ours(model, background=False),
        LIMIT: partial(_write, data=memoryview(memory)),
        BOUND: partial(_copy_and_write, [*model][dist.get_rank() if world_size > 1 else 0 :: world_size], memory),
        PLAIN: partial(_write, data=memoryview(memory), flags=0),
    }
    if world_size == 1:
        saves["DCP default"] = lambda path: dcp.save(model.state_dict(), checkpoint_id=path, no_dist=True)
    if world_size == 1 and case.tensors < 1_000:  # with thousands of tensors these take minutes
        saves["torch.save, no fsync"] = lambda path: torch.save(model.state_dict(), path / "model.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "torch.distributed is disabled": it is, on purpose
        return in_turns(
            {name: _timed(save, directory / name.replace(" ", "-")) for name, save in saves.items()}, rounds
        )


def _timed(save: Callable[[Path], object], folder: Path) -> Callable[[], float]:
    """Seconds until all ranks have saved into a folder that is new each time, and gone afterwards."""

    def measure() -> float:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)  # it is there after the first save of a run
        os.sync()
        _meet()
        began = time.perf_counter()
        save(folder)
        _meet()
        seconds = time.perf_counter() - began
        shutil.rmtree(folder, ignore_errors=True)
        _meet()
        return seconds

    return measure


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def _ours(model: nn.Module, *, background: bool) -> Callable[[Path], object]:
    state = ModelState(model)
    managers: list[CheckpointManager] = []  # one for all rounds: it keeps its buffers, as in a run

    def save(folder: Path) -> None:
        if not managers:
            managers.append(CheckpointManager(folder))
        flight = managers[0].save_async(1, [state], [], background=background)
        flight.wait()
        if flight.failure is not None:
            raise flight.failure

    return save


def _write(folder: Path, data: memoryview, flags: int = os.O_DIRECT) -> None:
    disk.write(folder / f"data-{dist.get_rank() if dist.is_initialized() else 0}", data, flags)


def _copy_and_write(tensors: Sequence[torch.Tensor], memory: mmap.mmap, folder: Path) -> None:
    """What a save in the background does, by the simplest means: this rank's tensors, copied one after the other."""
    place = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    for tensor in tensors:
        ctypes.memmove(place, tensor.data_ptr(), tensor.nbytes)
        place += tensor.nbytes
    _write(folder, memoryview(memory))
