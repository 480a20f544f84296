"""Digests of what goes into a step: batches, and the states of random generators. Nothing waits for a device."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import xxhash

from dalsegno.data.batch_digest import add_batch
from dalsegno.distributed import accelerator


def batch_digest(batches: Iterable[Any]) -> str:
    """Digest of the contents of ``batches``, 16 hex digits."""
    hashed = xxhash.xxh3_64()
    for batch in batches:
        add_batch(hashed, batch)
    return hashed.hexdigest()


def generator_digests() -> str:
    """Digests of the states of :data:`GENERATORS`, those that this process has, separated by spaces."""
    version, numbers, gauss = random.getstate()
    digests = [
        xxhash.xxh3_64_hexdigest(torch.get_rng_state().numpy().data),
        xxhash.xxh3_64_hexdigest(_numpy_state()),
        f"{hash((version, numbers, gauss or 0.0)) & _WORD:016x}",  # of numbers: equal in every process
    ]
    device = accelerator.generator_state()
    return " ".join(digests if device is None else [*digests, xxhash.xxh3_64_hexdigest(device.numpy().data)])


GENERATORS = ("torch's", "NumPy's", "Python's", "the accelerator's")
"""Whose generators :func:`generator_digests` reads, in this order."""

_WORD = 0xFFFFFFFFFFFFFFFF
_MERSENNE_TWISTER = 625 * 4
"""Bytes of NumPy's struct: 624 numbers and the place among them."""


def _numpy_state() -> bytes:
    """State of NumPy's global generator; reading it where it is takes 1 µs, and ``np.random.get_state`` 35."""
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(bits) is np.random.MT19937:
        return ctypes.string_at(bits.ctypes.state_address, _MERSENNE_TWISTER)
    return repr(bits.state).encode()
