"""A verified load of 512 MB by one rank, every byte hashed before anything changes, beside ``dcp.load`` of its own.

Ours is all of it: finding the checkpoint, the hashes, model and rest. Warm: the files are in the page cache; cold: they
have been dropped from it (``posix_fadvise``, so that the disk has to be read; a disk's own cache stays).
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dalsegno.checkpoint import CheckpointManager, ModelState

from .row import Row, three_digits
from .timing import in_turns, ratio

BYTES = 512 << 20
TENSORS = 64
ROUNDS = 7
TARGET = 1.0

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
        loads = {"ours": (ours, _ours(model)), "dcp.load": (theirs, _dcp(model))}
        for how, before in {"warm": _keep, "cold": _drop}.items():
            measures = {name: _timed(load, folder, before) for name, (folder, load) in loads.items()}
            seconds = in_turns(measures, rounds)
            times = ratio(seconds["ours"], seconds["dcp.load"])
            rows.append(
                Row(
                    what=f"verified load of {size >> 20} MB, {how}",
                    ours=_speed(size, seconds["ours"]),
                    peer=f"dcp.load, nothing verified: {_speed(size, seconds['dcp.load'])}",
                    ratio=f"{times:.2f} × its time",
                    target="≤ 1.00",
                    met=times <= TARGET,
                    spread=times.spread,
                )
            )
    return rows


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


def _keep(path: Path) -> None:
    path.read_bytes()


def _drop(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())  # only what is on the disk can be dropped
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
