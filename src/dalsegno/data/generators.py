"""The random generators of this process, as one state: taken, put back, and kept from changing for a while."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


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
