"""The random generators of a process: Python's, NumPy's, torch's on the CPU and on every CUDA device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from . import ranks


def derive_seed(*parts: int) -> int:
    """A seed of 32 bits that is a pure function of the numbers given (xxh3 of them)."""
    return xxhash.xxh3_64_intdigest(",".join(map(str, parts)).encode()) & 0xFFFFFFFF


def seed_everything(seed: int) -> None:
    """Seed every generator of this process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # CUDA's too


class RandomState:
    """Every generator of this rank, as one component of a checkpoint.

    Each rank has its own: at the start of a run they are seeded with (seed, rank, 0). After a change of world size no
    saved state fits, and each rank is seeded with (seed, rank, step) of the checkpoint.
    """

    state_scope = "per_rank"

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0  # the finished steps, so that a state knows when it was taken

    def start(self) -> None:
        """Seed this rank's generators for the start of a run."""
        seed_everything(derive_seed(self.seed, ranks.rank(), 0))

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "step": self.step,
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        if "derived" in state:
            seed_everything(state["derived"])
            return
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])

    @classmethod
    def reshard(cls, states: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
        seed, step = states[0]["seed"], states[0]["step"]
        return [{"seed": seed, "step": step, "derived": derive_seed(seed, rank, step)} for rank in range(world_size)]
