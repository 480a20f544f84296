"""Exchange: a collective that gathers a few numbers per rank and detects ranks at different collectives.

A collective pairs with whatever the other ranks call next; neither NCCL nor gloo checks that it is the same one. If a
collective is skipped on some ranks, or called on some only, the others receive numbers with another meaning. So each
row contains its exchange's number and purpose, which must be equal in all rows.

Every exchange is a sum over a table with one row per rank, in which each rank fills its own row. All exchanges have the
same kind and size, so a program's own misplaced ``all_reduce`` pairs with one and is detected. Results computed from
the rows (e.g. a sum of floats) are equal on all ranks and with any backend.
"""

from __future__ import annotations

import functools
import struct
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dalsegno.errors import RanksApart

WIDTH = 16
"""int64 words in a row. The rest of a longer exchange follows in a second sum, after the first one was checked."""
_NAME = 4  # words, of 8 bytes each
_HEADER = 1 + _NAME
_LENGTHS = 2**24  # exclusive maximum of words per rank

_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Number of the last exchange, by process group."""


def exchange(purpose: str, own: Sequence[int], device: torch.device) -> Tensor:
    """Gather every rank's ``own``, one row each. Collective, over the default group.

    Raises RanksApart if another rank is at a different collective; its numbers are then not used.

    Args:
        purpose: at most 32 ASCII characters, for the error.
        own: n 64-bit numbers; n must be equal on all ranks.
        device: device for tensors of the collective.

    Returns:
        Shape (ranks, n), int64, on the CPU.
    """
    group = dist.group.WORLD
    number = _numbers[group] = _numbers.get(group, 0) + 1
    header = (number * _LENGTHS + len(own), *_words(purpose))
    begin, rest = own[: WIDTH - _HEADER], own[WIDTH - _HEADER :]
    rows = _table([*header, *begin, *[0] * (WIDTH - _HEADER - len(begin))], device)
    expected = torch.tensor(header)
    if not bool((rows[:, :_HEADER] == expected).all()):
        raise RanksApart(_mismatch_message(expected, rows[:, :_HEADER]))
    values = rows[:, _HEADER : _HEADER + len(begin)]
    return torch.cat([values, _table(rest, device)], 1) if rest else values


def _table(own: Sequence[int], device: torch.device) -> Tensor:
    table = torch.zeros(dist.get_world_size(), len(own), dtype=torch.int64)
    table[dist.get_rank()] = torch.tensor(own)
    table = table.to(device)
    dist.all_reduce(table)
    return table.cpu()


@functools.cache
def _words(purpose: str) -> tuple[int, ...]:
    return struct.unpack(f"{_NAME}q", purpose.encode("ascii", "replace")[: 8 * _NAME].ljust(8 * _NAME))


def _mismatch_message(own: Tensor, headers: Tensor) -> str:
    here = dist.get_rank()
    others = {rank: _described(header) for rank, header in enumerate(headers) if rank != here}
    strangers = [rank for rank, described in others.items() if described is None]
    if strangers or not torch.equal(headers[here], own):
        came = "received a collective that is not dalsegno's, with other numbers"
    else:
        rank = next(rank for rank in others if not torch.equal(headers[rank], own))
        came = f"rank {rank} called {others[rank]}"
    return (
        f"the ranks are not at the same collective: rank {here} called {_described(own)}, but {came}. Some collective "
        "is called on some ranks only: check callbacks, model and loss for one behind an early return or a condition "
        "that depends on the rank or its data"
    )


def _described(header: Tensor) -> str | None:
    """Describe the exchange of a header; None if it is not a header."""
    number, length = divmod(int(header[0]), _LENGTHS)
    name = header[1:].contiguous().numpy().tobytes()
    if number < 1 or not name.isascii() or not (purpose := name.decode("ascii").rstrip()).isprintable():
        return None
    return f"{purpose!r} (exchange {number}, {length} numbers)"
