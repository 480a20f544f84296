"""Random numbers: seeds that are pure functions of where they are used, and the generators of this process as a state.

A derived seed needs no saving, and nothing that happened before, in this process or another, can shift it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from . import ranks

WORD = 2**64 - 1

# What a seed is for. Part of the numbers it is mixed from, so that no two uses ever share one.
ORDER, SAMPLE, WORKER, LOADER, RANK, TEXT = 1, 2, 3, 4, 5, 6


def mix(*numbers: int) -> int:
    """One number in [0, 2**63) from several (each taken modulo 2**64), the same on every machine."""
    mixed = 0
    for number in numbers:
        mixed = ((mixed ^ (number & WORD)) + 0x9E3779B97F4A7C15) & WORD
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & WORD
        mixed ^= mixed >> 31
    return mixed >> 1


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generator. No accelerator is touched, so a worker process may call it."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would queue work for every accelerator


def capture_generators() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's CPU generator."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def restore_generators(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


@contextlib.contextmanager
def preserved_generators() -> Iterator[None]:
    """Whatever is drawn inside, the generators are as before afterwards."""
    before = capture_generators()
    try:
        yield
    finally:
        restore_generators(before)


@contextlib.contextmanager
def seeded_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside follows from ``seed``, on ``device`` too; afterwards the generators are as before."""
    devices = [device] if device.type == "cuda" else []
    with preserved_generators(), torch.random.fork_rng(devices):
        seed_generators(seed)
        for each in devices:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield


class RandomState:
    """Every generator of this rank, those of all CUDA devices too, as one component of a checkpoint.

    Each rank has its own: at the start of a run they are seeded with (seed, rank, 0). After a change of world size no
    saved state fits, and each rank is seeded with (seed, rank, step) of the checkpoint.
    """

    state_scope = "per_rank"
    reshard_note = "each rank is seeded from (seed, rank, step)"

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        """The finished steps, so that a state knows when it was taken."""

    def start(self) -> None:
        """Seed this rank's generators for the start of a run."""
        self._seed(mix(RANK, self.seed, ranks.rank(), 0))

    def state_dict(self) -> dict[str, Any]:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {"seed": self.seed, "step": self.step, **capture_generators(), "cuda": cuda}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        if "derived" in state:
            self._seed(state["derived"])
            return
        restore_generators(state)
        if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
        else:
            torch.cuda.manual_seed_all(mix(RANK, self.seed, ranks.rank(), self.step))  # other devices than were saved

    @classmethod
    def reshard(cls, states: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
        seed, step = states[0]["seed"], states[0]["step"]
        return [{"step": step, "derived": mix(RANK, seed, rank, step)} for rank in range(world_size)]

    def _seed(self, seed: int) -> None:
        seed_generators(seed)
        torch.cuda.manual_seed_all(seed)  # nothing happens where there is no CUDA
