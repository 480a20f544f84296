"""A durable save of 512 MB by one rank, beside a plain write and fsync of as many bytes, and what others offer.

Ours is all of it: capture, checksums, files, directories, manifest, rename. The plain write is one file from memory.
"""

from __future__ import annotations

import os
import shutil
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
from .timing import in_turns

BYTES = 512 << 20
TENSORS = 64
ROUNDS = 7
TARGET = 1.0


def run() -> list[Row]:
    """Medians of the rounds; each round measures everybody once."""
    model = nn.ParameterList([nn.Parameter(torch.randn(BYTES // TENSORS // 4)) for _ in range(TENSORS)])
    with TemporaryDirectory(dir=Path.cwd()) as directory:  # on a disk, where /tmp may be memory
        measures = {
            name: _timed(save, Path(directory) / name.replace(" ", "-"))
            for name, save in {
                "ours": _ours(model),
                "plain write + fsync": _plain(BYTES),
                "torch.save, no fsync": lambda path: torch.save(model.state_dict(), path / "model.pt"),
                "DCP default": lambda path: dcp.save(model.state_dict(), checkpoint_id=path, no_dist=True),
                "DCP, HF writer": _hugging_face(model),
            }.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "torch.distributed is disabled": it is, on purpose
            seconds = in_turns(measures, ROUNDS)
    ours = seconds.pop("ours")
    rows = []
    for name, theirs in seconds.items():
        ratio = median(one / other for one, other in zip(ours, theirs, strict=True))
        row = Row(
            what="durable save of 512 MB, one rank",
            ours=_speed(median(ours)),
            peer=f"{name}: {_speed(median(theirs))}",
            ratio=f"{ratio:.2f} × its time",
        )
        is_target = name == "plain write + fsync"
        rows.append(Row(row.what, row.ours, row.peer, row.ratio, "≤ 1.00", ratio <= TARGET) if is_target else row)
    return rows


def _speed(seconds: float) -> str:
    return f"{three_digits(BYTES / seconds / 1e9)} GB/s"


def _timed(save: Callable[[Path], object], folder: Path) -> Callable[[], float]:
    """Seconds of a save into a folder that is new each time, and gone afterwards."""

    def measure() -> float:
        folder.mkdir()
        os.sync()
        began = time.perf_counter()
        save(folder)
        seconds = time.perf_counter() - began
        shutil.rmtree(folder)
        return seconds

    return measure


def _ours(model: nn.Module) -> Callable[[Path], object]:
    state = ModelState(model)
    managers: list[CheckpointManager] = []  # one for all rounds: it keeps its buffers, as in a run

    def save(folder: Path) -> None:
        if not managers:
            managers.append(CheckpointManager(folder))
        managers[0].save(1, [state], [])

    return save


def _plain(size: int) -> Callable[[Path], object]:
    data = memoryview(bytearray(os.urandom(1 << 20) * (size >> 20)))

    def save(folder: Path) -> None:
        with (folder / "data").open("wb", buffering=0) as file:
            left = data
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())

    return save


def _hugging_face(model: nn.Module) -> Callable[[Path], object]:
    def save(folder: Path) -> None:
        writer = dcp.HuggingFaceStorageWriter(str(folder))
        dcp.save(model.state_dict(), storage_writer=writer, no_dist=True)

    return save


if __name__ == "__main__":
    from .row import table

    print(table(run()))
