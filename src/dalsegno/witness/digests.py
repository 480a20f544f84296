"""Digests of what goes into a step, and of its gradients. Nothing waits for a device."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from dalsegno.data.digests import add_batch
from dalsegno.distributed import accelerator

ELEMENTS = 65_536
"""Elements of a tensor on a device that are read."""

PARAMETERS = 16
"""Parameters of whose gradients something is read, spread evenly over all."""

_MODULUS = 16_777_213
"""Prime, and exact as a float32."""


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


class BatchDigest:
    """Of the batches of a step."""

    def __init__(self) -> None:
        self._hashed = xxhash.xxh3_64()
        self.on_device: torch.Tensor | None = None
        """Checksum of the contents of tensors on a device, computed there, 0-dim; None if there are none."""

    def add(self, batch: Any) -> None:
        tensors: list[torch.Tensor] = []
        add_batch(self._hashed, batch, on_device=tensors)
        for each in tensors:
            added = _checksum(each.detach())
            before = self.on_device
            self.on_device = added if before is None else (before.to(added.device) * 3 + added) % _MODULUS

    def __str__(self) -> str:
        """Digest of what is on the host, and of shapes, 16 hex digits."""
        return self._hashed.hexdigest()


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Number that depends on the bits of the elements and on their order."""
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    content = flat[:: -(-len(flat) // ELEMENTS)].contiguous().view(torch.uint8)
    return (content * torch.arange(1, len(content) + 1, device=tensor.device)).sum() % _MODULUS


def gradient_sum(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """Number that depends on the gradients of ``optimizer``'s parameters on this rank; None if they have none."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    gradients = [each.grad for each in parameters[:: -(-len(parameters) // PARAMETERS)] if each.grad is not None]
    rows = [_first_row(each.to_local() if isinstance(each, DTensor) else each) for each in gradients]
    norms = [torch.linalg.vector_norm(row.float()) for row in rows if row is not None]
    return torch.stack([norm.to(norms[0].device) for norm in norms]).sum() if norms else None


def _first_row(gradient: torch.Tensor) -> torch.Tensor | None:
    if gradient.layout != torch.strided or not gradient.numel():
        return None
    return gradient.detach()[0] if gradient.dim() > 1 else gradient.detach().reshape(-1)[:ELEMENTS]
