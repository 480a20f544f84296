"""A verified load of 512 MB by one rank, every byte hashed before anything changes, beside ``dcp.load`` of its own.

Ours is all of it: finding the checkpoint, the hashes, model and rest. Warm: the files are in the page cache; cold: they
have been dropped from it (``posix_fadvise``, so that the disk has to be read; a disk's own cache stays). What bounds it
is measured beside it: cold, a direct read of the same files, in pieces of 16 MB, past the page cache; warm, one hash
and one copy of as many bytes in memory, by one thread.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn

from dalsegno.checkpoint import CheckpointManager, ModelState
from dalsegno.system import filesystem

from . import disk
from .row import Row, three_digits
from .timing import in_turns, ratio

BYTES = 512 << 20
TENSORS = 64
ROUNDS = 7
OURS, DCP = "ours", "dcp.load, nothing verified"
LIMITS = {"warm": "one hash and one memcpy", "cold": "the disk's direct limit"}
TARGETS = {DCP: 1.0, LIMITS["warm"]: 1.15, LIMITS["cold"]: 1.15}

SMALL = {"size": 1 << 20, "rounds": 1}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


def run(size: int = BYTES, rounds: int = ROUNDS) -> list[Row]:
    """Medians of the rounds; each round measures everybody once."""
    model = nn.ParameterList([nn.Parameter(torch.randn(size // TENSORS // 4)) for _ in range(TENSORS)])
    rows = []
    with (
        TemporaryDirectory(prefix=".benchmark-", dir=Path.cwd()) as directory,
        warnings.catch_warnings(),
    ):  # /tmp may be memory
        warnings.simplefilter("ignore")  # "torch.distributed is disabled": it is, on purpose
        ours, theirs = Path(directory) / "ours", Path(directory) / "dcp"
        CheckpointManager(ours).save(1, [ModelState(model)], [])
        dcp.save(model.state_dict(), checkpoint_id=theirs, no_dist=True)
        bounds = {"warm": _hash_and_copy(size), "cold": _read_directly()}
        for how, before in {"warm": _keep, "cold": _drop}.items():
            loads = {OURS: (ours, _ours(model)), DCP: (theirs, _dcp(model)), LIMITS[how]: (ours, bounds[how])}
            measures = {name: _timed(load, folder, before) for name, (folder, load) in loads.items()}
            seconds = in_turns(measures, rounds)
            rows += [
                _row(f"verified load of {size >> 20} MB, {how}", size, peer, seconds) for peer in [DCP, LIMITS[how]]
            ]
    return rows


def _row(what: str, size: int, peer: str, seconds: dict[str, list[float]]) -> Row:
    times = ratio(seconds[OURS], seconds[peer])
    return Row(
        what=what,
        ours=_speed(size, seconds[OURS]),
        peer=f"{peer}: {_speed(size, seconds[peer])}",
        ratio=f"{times:.2f} × its time",
        target=f"≤ {TARGETS[peer]:.2f}",
        met=times <= TARGETS[peer],
        spread=times.spread,
    )


def _speed(size: int, seconds: list[float]) -> str:
    return f"{three_digits(size / median(seconds) / 1e9)} GB/s"


def _timed(load: Callable[[Path], object], folder: Path, before: Callable[[Path], object]) -> Callable[[], float]:
    def measure() -> float:
        for path in folder.rglob("*"):
            if path.is_file():
                before(path)
        began = time.perf_counter()
        load(folder)
        return time.perf_counter() - began

    return measure


def _ours(model: nn.Module) -> Callable[[Path], object]:
    def load(folder: Path) -> None:
        manager = CheckpointManager(folder)
        checkpoint = manager.find()
        assert checkpoint is not None
        manager.load(checkpoint, [ModelState(model)], [])

    return load


def _dcp(model: nn.Module) -> Callable[[Path], object]:
    return lambda folder: dcp.load(model.state_dict(), checkpoint_id=folder, no_dist=True)


def _read_directly() -> Callable[[Path], object]:
    memory = disk.memory(filesystem.DIRECT_PIECE)

    def read(folder: Path) -> None:
        for path in folder.rglob("*.safetensors"):
            disk.read(path, memory)

    return read


def _hash_and_copy(size: int) -> Callable[[Path], object]:
    source, target = (mmap.mmap(-1, size) for _ in range(2))  # ordinary pages, as a model's parameters have
    source[:] = target[:] = os.urandom(filesystem.PAGE) * (size // filesystem.PAGE)
    copy = partial(ctypes.memmove, *((ctypes.c_char * size).from_buffer(each) for each in (target, source)), size)

    def hash_and_copy(folder: Path) -> None:
        xxhash.xxh3_128_digest(source)
        copy()

    return hash_and_copy


def _keep(path: Path) -> None:
    path.read_bytes()


def _drop(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())  # only what is on the disk can be dropped
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
