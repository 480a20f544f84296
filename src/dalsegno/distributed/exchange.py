"""Exchange: a few numbers of each rank, on every rank, in a collective that tells what it is for.

A collective pairs with whatever the other ranks call next, and neither NCCL nor gloo looks at what that is: one that
is left out on some rank, or called on some only, gives the others numbers that mean something else. So each row
carries its exchange's number and purpose, and all rows must carry the same.

Every exchange is a sum over a table with a row for each rank, of which each fills its own. So they are all of one kind
and size, and meet a program's own ``all_reduce`` where they should have met each other; and what is combined of the
rows (a sum of floats, say) comes out the same on all ranks and with any backend.
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
"""Words (int64) of a row. Those of an exchange that says more follow in a second sum, once the first has been checked.
"""
_NAME = 4  # words, of 8 bytes each
_HEADER = 1 + _NAME
_LENGTHS = 2**24  # above the greatest number of words that one rank says

_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Of the last exchange, by process group."""


def exchange(purpose: str, own: Sequence[int], device: torch.device) -> Tensor:
    """Every rank's ``own``, one row each. Collective, over the default group.

    Args:
        purpose: what for, in at most 32 characters of ASCII: what an error calls it.
        own: n numbers of 64 bits; n is the same on all ranks.
        device: where a tensor must lie for a collective.

    Returns:
        Shape (ranks, n), int64, on the CPU.

    Raises:
        RanksApart: if another rank is somewhere else; then what it says is not looked at.
    """
    group = dist.group.WORLD
    number = _numbers[group] = _numbers.get(group, 0) + 1
    header = (number * _LENGTHS + len(own), *_words(purpose))
    begin, rest = own[: WIDTH - _HEADER], own[WIDTH - _HEADER :]
    rows = _table([*header, *begin, *[0] * (WIDTH - _HEADER - len(begin))], device)
    expected = torch.tensor(header)
    if not bool((rows[:, :_HEADER] == expected).all()):
        raise RanksApart(_complaint(expected, rows[:, :_HEADER]))
    said = rows[:, _HEADER : _HEADER + len(begin)]
    return torch.cat([said, _table(rest, device)], 1) if rest else said


def _table(own: Sequence[int], device: torch.device) -> Tensor:
    table = torch.zeros(dist.get_world_size(), len(own), dtype=torch.int64)
    table[dist.get_rank()] = torch.tensor(own)
    table = table.to(device)
    dist.all_reduce(table)
    return table.cpu()


@functools.cache
def _words(purpose: str) -> tuple[int, ...]:
    return struct.unpack(f"{_NAME}q", purpose.encode("ascii", "replace")[: 8 * _NAME].ljust(8 * _NAME))


def _complaint(own: Tensor, headers: Tensor) -> str:
    here = dist.get_rank()
    others = {rank: _told(header) for rank, header in enumerate(headers) if rank != here}
    strangers = [rank for rank, told in others.items() if told is None]
    if strangers or not torch.equal(headers[here], own):
        came = "came a collective that is none of dalsegno's, with numbers of its own"
    else:
        rank = next(rank for rank in others if not torch.equal(headers[rank], own))
        came = f"rank {rank} came to {others[rank]}"
    return (
        f"the ranks are not at the same collective: rank {here} came to {_told(own)}, but {came}. Some collective is "
        "called on some ranks only: look in callbacks, model and loss for one behind an early return or a condition "
        "that depends on the rank or its data"
    )


def _told(header: Tensor) -> str | None:
    """What a header says; None if it is none."""
    number, length = divmod(int(header[0]), _LENGTHS)
    name = header[1:].contiguous().numpy().tobytes()
    if number < 1 or not name.isascii() or not (purpose := name.decode("ascii").rstrip()).isprintable():
        return None
    return f"{purpose!r} (exchange {number}, {length} numbers)"
