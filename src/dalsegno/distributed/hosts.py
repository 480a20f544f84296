"""Hosts: which ranks share a memory, for work that one rank of each host does; and files sent between hosts.

Two containers with separate shared memories count as two hosts, wherever they run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, TypeVar, cast

import torch
import xxhash

from dalsegno.distributed import collectives
from dalsegno.distributed.collectives import BackgroundGroup
from dalsegno.system import filesystem
from dalsegno.system.machine import O_NOFOLLOW

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hosts:
    """Number of each rank's host, from 0 in the order of their lowest ranks. Equal on all ranks."""

    of_rank: tuple[int, ...]

    @classmethod
    def sharing(cls, place: object) -> Self:
        """Group the ranks with equal ``place``, which identifies a memory. Collective."""
        numbers: dict[object, int] = {}
        places = collectives.gather(place, "which ranks share memory")
        return cls(tuple(numbers.setdefault(each, len(numbers)) for each in places))

    @property
    def count(self) -> int:
        return max(self.of_rank) + 1

    @property
    def here(self) -> int:
        """Number of this rank's host."""
        return self.of_rank[collectives.rank()]

    @property
    def leads(self) -> bool:
        """Whether this rank is the lowest of its host."""
        return self.position == 0

    @property
    def position(self) -> int:
        """Number of this rank among those of its host, from 0."""
        return self.ranks(self.here).index(collectives.rank())

    def ranks(self, host: int) -> list[int]:
        """In order."""
        return [rank for rank, number in enumerate(self.of_rank) if number == host]

    def run(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on the lowest rank of each host, as :func:`collectives.run_on_all_ranks` does. Returns the
        results by host, on every rank."""
        result = collectives.run_on_all_ranks(lambda: work() if self.leads else cast(T, None))
        of_ranks = collectives.gather(result, "results of all hosts")
        return [of_ranks[self.ranks(host)[0]] for host in range(self.count)]

    def joined(self, of_ranks: Sequence[Iterable[T]]) -> list[set[T]]:
        """By host, what its ranks have, from the sequence of what each rank has."""
        return [{each for rank in self.ranks(host) for each in of_ranks[rank]} for host in range(self.count)]


# --- files from rank to rank: in pieces, over gloo, each verified by its checksum on arrival ------------------------


_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Transfer:
    """A file of ``size`` bytes that rank ``source`` sends to rank ``target``; ``xxh3``: its hexadecimal xxh3-128."""

    name: str
    size: int
    xxh3: str
    source: int
    target: int


def transfer(
    transfers: Sequence[Transfer],
    directory: Path,
    group: BackgroundGroup,
    advance: Callable[[int], object] = lambda count: None,
    queue: Callable[[], object] = lambda: None,
) -> str | None:
    """Send and receive this rank's part of ``transfers``, from and to files in ``directory``. A failure here does not
    keep other ranks waiting: the rest is sent and received anyway. Returns the first failure on this rank.

    Args:
        transfers: the same on all ranks.
        directory: of this rank.
        group: used by no other thread meanwhile.
        advance: called with the number of bytes of each piece that was received or sent. An exception is a failure.
        queue: called before each transfer: this rank then waits until the other one has finished its former transfers,
            which may take minutes in which no byte of this rank moves.
    """
    failures: list[str] = []
    for each in transfers:
        if collectives.rank() == each.source:
            queue()
            failures += _send(each, directory / each.name, group, advance)
        elif collectives.rank() == each.target:
            queue()
            failures += _receive(each, directory / each.name, group, advance)
    return failures[0] if failures else None


def _send(sent: Transfer, path: Path, group: BackgroundGroup, advance: Callable[[int], object]) -> list[str]:
    failures: list[str] = []

    def unless_failed(work: Callable[[], object]) -> None:
        try:
            if not failures:
                work()
        except Exception as error:
            failures.append(f"{path}: {error}")

    try:
        descriptor = os.open(path, os.O_RDONLY | O_NOFOLLOW)
    except OSError as error:
        failures.append(str(error))
        descriptor = -1
    for piece in _pieces(sent.size):
        unless_failed(partial(os.readv, descriptor, [piece.numpy().data]))  # the target compares the checksum
        group.send(piece, sent.target)
        unless_failed(partial(advance, len(piece)))
    if descriptor >= 0:
        os.close(descriptor)
    return failures


def _receive(received: Transfer, path: Path, group: BackgroundGroup, advance: Callable[[int], object]) -> list[str]:
    checksum = xxhash.xxh3_128()

    def arriving() -> Iterator[memoryview]:
        for piece in _pieces(received.size):
            group.receive(piece, received.source)
            yield piece.numpy().data

    def hashed() -> Iterator[memoryview]:
        for piece in incoming:
            advance(len(piece))
            checksum.update(piece)
            yield piece

    incoming = arriving()
    try:
        filesystem.mkdir_nosync(path.parent)
        filesystem.rewrite_in_place(path, hashed(), received.size)
    except Exception as error:
        for _ in incoming:  # nothing more arrives if the connection was lost
            pass
        return [f"{path}: {error}"]
    if checksum.hexdigest() != received.xxh3:
        return [f"{path}: has checksum {checksum.hexdigest()} on arrival from rank {received.source}"]
    return []


def _pieces(size: int) -> Iterator[torch.Tensor]:
    """Pieces of one buffer that add up to ``size`` bytes."""
    buffer = torch.empty(min(size, _PIECE_BYTES), dtype=torch.uint8)
    for begin in range(0, size, _PIECE_BYTES):
        yield buffer[: size - begin]
