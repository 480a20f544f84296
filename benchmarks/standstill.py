"""What training feels of a save in the background: how long it stands still, and how long its steps take meanwhile.

It stands still for a copy of the state into warm memory, and is held against nothing but that copy: 512 MB, moved
tensor by tensor. The first save of a run has had its memory prepared while training began. The steps are forward,
backward and update of a small network on one thread: alone; while 2 GB go to disk; and while another thread writes as
many bytes that are in memory already, directly, and does nothing else, which bounds it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable
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
from .row import Row, duration
from .timing import in_turns, ratio

TENSORS = 64
STILL_BYTES = 512 << 20
WRITTEN_BYTES = 2 << 30
ROUNDS = 9
TARGET = 1.15
STEP_TARGET = 1.05
QUIET, BUSY, BARE = "quiet", "beside a save", "beside a bare write"
OURS, FIRST, COPY, ASYNC = "ours", "ours, the first of a run", "one warm memcpy", "dcp.async_save"

SMALL = {"still": 1 << 20, "written": 1 << 20, "rounds": 1}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


def run(still: int = STILL_BYTES, written: int = WRITTEN_BYTES, rounds: int = ROUNDS) -> list[Row]:
    """Medians of the rounds; each round measures everybody once."""
    with TemporaryDirectory(dir=Path.cwd(), prefix=".benchmark-") as directory:  # on a disk, where /tmp may be memory
        seconds, first_async = run_ranks(_standing_still, 1, Path(directory), still, rounds, timeout=1200)[0]
        steps = run_ranks(_steps, 1, Path(directory), written, rounds, timeout=1200)[0]
    what = f"training stands still in a background save, {still >> 20} MB"
    step = f"a step of training while {written / 1e9:.1f} GB are written"
    first = f", its first {duration(first_async)}"
    return [
        _row(what, seconds[OURS], COPY, seconds[COPY], target=TARGET),
        _row(f"{what}, the first of a run", seconds[FIRST], COPY, seconds[COPY], target=TARGET),
        _row(what, seconds[OURS], ASYNC, seconds[ASYNC], more=first),
        _row(step, steps[BUSY], "a quiet step", steps[QUIET], target=STEP_TARGET),
        _row(step, steps[BUSY], "beside a bare direct write", steps[BARE]),
    ]


def _row(what: str, ours: list[float], name: str, peer: list[float], *, target: float = 0.0, more: str = "") -> Row:
    """``target``: of the ratio; 0: none. ``more``: about the peer."""
    times = ratio(ours, peer)
    return Row(
        what,
        duration(median(ours)),
        f"{name}: {duration(median(peer))}{more}",
        f"{times:.2f} ×",
        f"≤ {target:.2f} ×" if target else "",
        times <= target if target else None,
        times.spread,
    )


def _model(size: int) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.randn(size // TENSORS // 4)) for _ in range(TENSORS)])


def _standing_still(directory: Path, size: int, rounds: int) -> tuple[dict[str, list[float]], float]:
    model = _model(size)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # without one, dcp saves for itself
    first_async = _async(directory, model)()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measures = {
            OURS: _ours(directory / "ours", model),
            COPY: memcpy(model, disk.memory(size)),
            FIRST: lambda: _first(directory / "first", model),
            ASYNC: _async(directory, model),
        }
        seconds = in_turns(measures, rounds)
    dist.destroy_process_group()
    return seconds, first_async


def _ours(folder: Path, model: nn.Module) -> Callable[[], float]:
    manager, state = CheckpointManager(folder), ModelState(model)
    return lambda: _launch(manager, state, folder)


def _first(folder: Path, model: nn.Module) -> float:
    manager, state = CheckpointManager(folder), ModelState(model)
    manager.prepare([state])
    for thread in threading.enumerate():
        if thread.name == "dalsegno-prepare":
            thread.join()
    return _launch(manager, state, folder)


def _launch(manager: CheckpointManager, state: ModelState, folder: Path) -> float:
    os.sync()
    began = time.perf_counter()
    flight = manager.save_async(1, [state], [])
    seconds = time.perf_counter() - began
    manager.settle()
    assert flight.failure is None, flight.failure
    shutil.rmtree(folder)
    return seconds


def memcpy(model: nn.Module, memory: mmap.mmap) -> Callable[[], float]:
    """What measures a copy of the parameters into ``memory``, whose pages it touches first."""
    target = torch.frombuffer(memory, dtype=torch.uint8)
    target.zero_()
    sources = [(each.data_ptr(), each.numel() * 4) for each in model.parameters()]

    def measure() -> float:
        os.sync()  # as before a save: a processor that has just waited for the disk is slower at first
        began, place = time.perf_counter(), target.data_ptr()
        for source, count in sources:
            ctypes.memmove(place, source, count)
            place += count
        return time.perf_counter() - began

    return measure


def _async(directory: Path, model: nn.Module) -> Callable[[], float]:
    folder = directory / "dcp"

    def measure() -> float:
        os.sync()
        began = time.perf_counter()
        future = dcp.async_save(model.state_dict(), checkpoint_id=folder)
        seconds = time.perf_counter() - began
        future.result()  # type: ignore[union-attr]
        shutil.rmtree(folder)
        return seconds

    return measure


def _steps(directory: Path, size: int, rounds: int) -> dict[str, list[float]]:
    """Medians of a round's steps: quiet ones, those while a save was on its way, those beside a bare direct write."""
    torch.set_num_threads(1)
    folder = directory / "steps"
    manager, state, step = CheckpointManager(folder), ModelState(_model(size)), _training()
    memory = disk.memory(size)
    memory[:] = os.urandom(filesystem.PAGE) * (size // filesystem.PAGE)

    def beside_a_save() -> float:
        flight = manager.save_async(1, [state], [])
        seconds = [step()]
        while not flight.done:
            seconds.append(step())
        manager.settle()
        shutil.rmtree(folder)
        return median(seconds)

    def beside_a_bare_write() -> float:
        folder.mkdir()
        thread = threading.Thread(target=disk.write, args=(folder / "data", memoryview(memory)))
        thread.start()
        seconds = [step()]
        while thread.is_alive():
            seconds.append(step())
        shutil.rmtree(folder)
        return median(seconds)

    measures = {
        QUIET: lambda: median([step() for _ in range(60)]),
        BUSY: beside_a_save,
        BARE: beside_a_bare_write,
    }
    return in_turns(measures, rounds)


def _training() -> Callable[[], float]:
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(256, 512)

    def step() -> float:
        began = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    return step
