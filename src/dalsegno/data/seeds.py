"""Seeds: every one that the data room hands out is a pure function of where it is used.

So nothing has to be saved for them, and nothing that happened before, in this process or another, can shift them.
"""

from __future__ import annotations

import random

import numpy as np
import torch

WORD = 2**64 - 1

# What a seed is for. Part of the numbers it is mixed from, so that no two uses ever share one.
ORDER, SAMPLE, WORKER, LOADER = 1, 2, 3, 4


def mix(*numbers: int) -> int:
    """One number in [0, 2**63) from several (each taken modulo 2**64), the same on every machine."""
    mixed = 0
    for number in numbers:
        mixed = ((mixed ^ (number & WORD)) + 0x9E3779B97F4A7C15) & WORD
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & WORD
        mixed ^= mixed >> 31
    return mixed >> 1


def reseed(seed: int) -> None:
    """Seed this process's Python, NumPy and torch CPU generators. For worker processes only."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # Not torch.manual_seed: that one also queues work for every accelerator, which a worker must not touch.
    torch.default_generator.manual_seed(seed)
