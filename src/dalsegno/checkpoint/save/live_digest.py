"""Digests of live tensors, by which a process finds that they have not changed; as fast as their memory can be read.

Version counters are not a proof: they miss a write to ``.data``, and one by another library's kernel. So every byte is
read, where it is: on the CPU by several threads, on an accelerator by itself, without a way over the bus.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import xxhash

from dalsegno.checkpoint.tensor_files import FileLayout
from dalsegno.system.machine import thread_count

from .file_order import in_file_order

_PIECE_BYTES = 8 << 20  # hashed by one call, without the GIL: 0.8 ms
_PIECES = 16  # that wait for a thread; some are copies of small tensors

_ROW = 1 << 16  # integers in a sum; the keys of a row stay in a GPU's cache
_ROWS = 16  # summed by one call: 4 MB, whose products take 16 MB


@torch.no_grad()
def live_digest(layout: FileLayout, tensors: Sequence[torch.Tensor]) -> bytes:
    """A digest of the file that these tensors make, to be compared with others of this process.

    Two files that differ have the same one with a probability of less than 2**-60.
    """
    of_all = xxhash.xxh3_128()
    sums: dict[torch.device, list[torch.Tensor]] = {}
    pending: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(thread_count(), thread_name_prefix="dalsegno-hash") as threads:
        for raw in in_file_order(layout, tensors):
            if not raw.is_cpu:
                sums.setdefault(raw.device, []).extend(_sums(raw))
                continue
            for piece in torch.split(raw, _PIECE_BYTES):
                pending.append(threads.submit(_checksum, piece))
                if len(pending) > _PIECES:
                    of_all.update(pending.popleft().result())
        for each in pending:
            of_all.update(each.result())
    for of_device in sums.values():
        of_all.update(torch.cat(of_device, 1).cpu().numpy().tobytes())
    return of_all.digest()


def _checksum(piece: torch.Tensor) -> bytes:
    return xxhash.xxh3_128_digest(piece.numpy().data)


def _sums(raw: torch.Tensor) -> list[torch.Tensor]:
    """Of each row of integers in these bytes, the sums of its products with two rows of random keys, modulo 2**64.

    Whatever two rows contain, if they differ, either sum is the same for one in 2**33 keys at most.
    """
    numbers, keys = _whole(raw).view(torch.int32), _keys(raw.device)
    in_rows = len(numbers) - len(numbers) % _ROW
    rest = numbers[in_rows:]
    return [
        *((rows * keys).sum(-1) for rows in torch.split(numbers[:in_rows].view(-1, _ROW), _ROWS)),
        (rest * keys[..., : len(rest)]).sum(-1),
    ]


def _whole(raw: torch.Tensor) -> torch.Tensor:
    """Bytes that can be viewed as integers: aligned, and a whole number of them."""
    missing = -len(raw) % 4
    return torch.cat([raw, raw.new_zeros(missing)]) if missing or raw.data_ptr() % 4 else raw


@functools.cache
def _keys(device: torch.device) -> torch.Tensor:
    """Two rows of numbers, drawn once in a process; not by torch's generators, which training uses."""
    drawn = torch.frombuffer(bytearray(os.urandom(2 * 8 * _ROW)), dtype=torch.int64).view(2, 1, _ROW)
    return drawn.to(device)
