"""Rows of a witness: what they contain of a step, and where they are.

A row is a JSON line for a step that was recorded. Its digests are of what goes into the step, and of its gradients;
computing them waits for no device. One more row has what a leg began with.

::

    witness/step-00000400.rank-00000.jsonl      rank 0's steps after step 400, up to the next checkpoint

A new file begins at each checkpoint, and the files before the last checkpoint but one are removed. Nothing is flushed
to disk: what a crash of the host loses is not proven.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from dalsegno.data.digests import add_batch
from dalsegno.distributed import accelerator
from dalsegno.distributed.sharded_tensors import local_part
from dalsegno.logs.values import Record, decode, encode
from dalsegno.system import filesystem

WITNESS = "witness"
"""Name of the directory, in that of the run."""

SETTINGS, BEGUN, CHANGED = "settings", "begun", "changed"
"""Keys of the row of the leg that wrote the rows after it: its settings; of what no checkpoint contains, digests as the
leg began, and names of what it has changed."""

_NAME = re.compile(r"step-(\d{8,})\.rank-(\d{5,})\.jsonl")


class WitnessRows:
    """The rows of one rank of the run in ``output_dir``."""

    def __init__(self, output_dir: Path, rank: int) -> None:
        self._directory = output_dir / WITNESS
        self._rank = rank
        self._descriptor: int | None = None
        self._path: Path | None = None

    def read(self, after: int) -> tuple[dict[int, Record], list[Record]]:
        """Read the rows of steps after ``after``, by step, and those of the legs that wrote them."""
        rows: dict[int, Record] = {}
        legs: list[Record] = []
        leg: Record | None = None
        for _, path in self._files():
            for row in _lines(path):
                if "global_step" not in row:
                    leg = row
                elif row["global_step"] > after:
                    rows[row["global_step"]] = row
                    if leg is not None and leg not in legs:
                        legs.append(leg)
        return rows, legs

    def begin(self, step: int) -> None:
        """Write the rows that follow to the file of the steps after ``step``."""
        self.close()
        self._path = self._directory / f"step-{step:08d}.rank-{self._rank:05d}.jsonl"

    def append(self, row: Mapping[str, Any]) -> None:
        """Raises OSError, e.g. if the disk is full."""
        assert self._path is not None, "begin() comes first"
        line = encode(row) + b"\n"
        if self._descriptor is None:
            filesystem.mkdir_nosync(self._directory)
            self._descriptor = filesystem.open_own(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            line = b"\n" + line  # a leg that was killed may have left a part of a line
        filesystem.write_all(self._descriptor, line, self._path)

    def cut(self, step: int) -> None:
        """Remove the rows of ``step`` and later ones."""
        self.close()
        for begin, path in self._files():
            if begin >= step:
                filesystem.remove(path)
                continue
            rows = list(_lines(path))
            kept = [row for row in rows if row.get("global_step", -1) < step]
            if len(kept) < len(rows):
                filesystem.replace_durably(path, b"".join(encode(row) + b"\n" for row in kept))

    def remove_before(self, step: int) -> None:
        """Remove the files of steps before the checkpoint of ``step``."""
        for begin, path in self._files():
            if begin < step and path != self._path:
                filesystem.remove(path)

    def remove_other_ranks(self, world_size: int) -> None:
        """Remove the files of ranks that no longer exist."""
        for _, rank, path in self._all_files():
            if rank >= world_size:
                filesystem.remove(path)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _files(self) -> list[tuple[int, Path]]:
        return sorted((step, path) for step, rank, path in self._all_files() if rank == self._rank)

    def _all_files(self) -> list[tuple[int, int, Path]]:
        paths = [*self._directory.iterdir()] if self._directory.is_dir() else []
        named = [(_NAME.fullmatch(path.name), path) for path in paths]
        return [(int(match[1]), int(match[2]), path) for match, path in named if match is not None]


def _lines(path: Path) -> Iterator[Record]:
    """The rows, without lines of which a leg wrote only a part before it was killed."""
    for line in path.read_bytes().splitlines():
        try:
            row = decode(line)
        except ValueError:
            continue
        if isinstance(row, dict) and (isinstance(row.get(SETTINGS), dict) or isinstance(row.get("global_step"), int)):
            yield row


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
    rows = [_first_row(local_part(each)) for each in gradients]
    norms = [torch.linalg.vector_norm(row.float()) for row in rows if row is not None]
    return torch.stack([norm.to(norms[0].device) for norm in norms]).sum() if norms else None


def _first_row(gradient: torch.Tensor) -> torch.Tensor | None:
    if gradient.layout != torch.strided or not gradient.numel():
        return None
    return gradient.detach()[0] if gradient.dim() > 1 else gradient.detach().reshape(-1)[:ELEMENTS]
