"""Collectives among the ranks of one job. In a single process each function is the identity and costs nothing.

All ranks must call these functions, in the same order. So do not call them in a signal handler, on one rank only, or
during exception handling: if other ranks are gone, the call would hang.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dalsegno import errors
from dalsegno.distributed import accelerator
from dalsegno.errors import RanksApart

# --- the exchange: gathers a few numbers per rank and detects ranks at different collectives ------------------------

# A collective pairs with whatever the other ranks call next; neither NCCL nor gloo checks that it is the same one. If a
# collective is skipped on some ranks, or called on some only, the others receive numbers with another meaning. So each
# row contains its exchange's number and purpose, which must be equal in all rows.
#
# Every exchange is a sum over a table with one row per rank, in which each rank fills its own row. All exchanges have
# the same kind and size, so a program's own misplaced ``all_reduce`` pairs with one and is detected. Results computed
# from the rows (e.g. a sum of floats) are equal on all ranks and with any backend.

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


# --- the collectives -----------------------------------------------------------------------------------------------


T = TypeVar("T")
R = TypeVar("R")


_this_thread = threading.local()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, on this thread, this process is a single one: for work of one rank by the code that all ranks share."""
    _this_thread.is_alone = True
    try:
        yield
    finally:
        _this_thread.is_alone = False


def initialized() -> bool:
    """Whether this process is in a process group of more than one rank."""
    is_several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return is_several and not getattr(_this_thread, "is_alone", False)


def rank() -> int:
    """Return this process's rank, from 0."""
    return dist.get_rank() if initialized() else 0


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if initialized() else 1


def local_rank() -> int:
    """Return this process's rank on its host, as set by torchrun."""
    return int(os.environ.get("LOCAL_RANK", rank()))


def communication_device() -> torch.device:
    """Return the device of tensors for collectives of the default group: the CPU, unless a backend such as NCCL that
    has none for CPU tensors is alone."""
    backend = dist.get_backend() if initialized() else ""
    if accelerator.has_own_backend(backend):  # with gloo too, gloo carries CPU tensors without a device sync
        return accelerator.current_device()
    return accelerator.CPU


def all_reduce_max(values: Sequence[int], purpose: str) -> list[int]:
    """Return the element-wise maximum over all ranks; for flags, whether any rank set it. One small collective.

    Raises RanksApart if another rank is at a different collective.

    Args:
        values: of the same length on each rank.
        purpose: a few words for the error if the ranks are at different collectives.
    """
    if not initialized():
        return list(values)
    rows = exchange(purpose, [*map(int, values)], communication_device())
    return [int(value) for value in rows.amax(0).tolist()]


def sum_floats(values: Sequence[float], purpose: str) -> list[float]:
    """Return the element-wise sum over all ranks, in float64, in rank order. Else like :func:`all_reduce_max`."""
    if not initialized():
        return list(values)
    return [float(value) for value in _gathered(values, purpose).sum(0).tolist()]


def gather_floats(values: Sequence[float], purpose: str) -> list[list[float]]:
    """Return every rank's ``values``, in rank order. Else like :func:`all_reduce_max`."""
    if not initialized():
        return [list(values)]
    return [[float(number) for number in row] for row in _gathered(values, purpose).tolist()]


def _gathered(values: Sequence[float], purpose: str) -> torch.Tensor:
    """Return shape (ranks, values), float64."""
    bits = struct.unpack(f"{len(values)}q", struct.pack(f"{len(values)}d", *values))
    return exchange(purpose, bits, communication_device()).contiguous().view(torch.float64)


def _check_all_here(purpose: str) -> None:
    """Check that all ranks are at this collective, before one that cannot detect a mismatch."""
    exchange(purpose, (), communication_device())


def broadcast_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Broadcast rank 0's values of these tensors, which must not be sharded."""
    if initialized():
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=0)
            tensor.detach().copy_(whole)


def gather(value: T, purpose: str) -> list[T]:
    """Return every rank's ``value``, in rank order. Only between live ranks, because the objects are pickled.

    ``purpose``: as for :func:`all_reduce_max`.
    """
    if not initialized():
        return [value]
    _check_all_here(purpose)
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def broadcast(value: T, purpose: str) -> T:
    """Return rank 0's ``value``. ``purpose``: as for :func:`all_reduce_max`."""
    if not initialized():
        return value
    _check_all_here(purpose)
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[no-any-return]


def run_on_all_ranks(work: Callable[[], T]) -> T:
    """Run ``work`` on every rank. If it fails on one rank it raises on all, so that no rank waits for a failed one.
    Raises Exception on every rank, of the same kind, so that all ranks handle it alike. It is the error of one failed
    rank: the first whose error is not dalsegno's (a disk's, for example), else the first. That rank raises its own
    error; the others raise the same error naming the rank if it is one of dalsegno's, else
    :class:`~dalsegno.errors.RankFailed`."""
    return _run_together(work, _name(work))


def _run_together(work: Callable[[], T], purpose: str) -> T:
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    outcomes = gather(None if failure is None else (type(failure).__name__, str(failure)), purpose)
    failed = {number: outcome for number, outcome in enumerate(outcomes) if outcome is not None}
    if not failed:
        return result
    number = min(failed, key=lambda number: _kind(failed[number][0]) is not None)  # min returns the first of equals
    if failure is not None and failed[number] == failed[rank()]:
        raise failure
    raise _of_another_rank(number, *failed[number]) from failure


class BackgroundGroup:
    """A second process group, for a background thread, whose collectives never pair with those of training.

    It uses gloo, so that no GPU waits. If another rank is gone, its methods raise. Created by
    :func:`background_group`.
    """

    def __init__(self) -> None:
        # Only torch's registry holds the group: once destroyed, it must be freed together with its threads. A thread
        # that is still running when the interpreter exits crashes the process.
        group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if initialized() else None
        self._group = None if group is None else weakref.ref(group)

    def gather_decide(self, value: T, judge: Callable[[list[T]], R]) -> R:
        """Gather every rank's ``value`` on rank 0, in rank order, and broadcast the result of ``judge``.

        ``judge`` runs on rank 0 and must not raise: the other ranks would hang.
        """
        if self._group is None:
            return judge([value])
        group = self._live()
        gathered: list[Any] | None = [None] * world_size() if rank() == 0 else None
        dist.gather_object(value, gathered, dst=0, group=group)
        box: list[Any] = [judge(gathered) if gathered is not None else None]
        dist.broadcast_object_list(box, src=0, group=group)
        return box[0]  # type: ignore[no-any-return]

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Send a CPU tensor to the rank ``target``, which must call :meth:`receive` for it."""
        dist.send(tensor, target, group=self._live())

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a CPU tensor with the one of that size that the rank ``source`` sends."""
        dist.recv(tensor, source, group=self._live())

    def _live(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup | None = None if self._group is None else self._group()
        if group is None:
            raise errors.RankFailed("the process group has been destroyed")
        return group


_TIMEOUT = datetime.timedelta(minutes=60)  # for a live rank that still has a lot to write
_background_groups: weakref.WeakKeyDictionary[Any, BackgroundGroup] = weakref.WeakKeyDictionary()


def background_group() -> BackgroundGroup:
    """Return this process's :class:`BackgroundGroup`. The first call is a collective."""
    if not initialized():
        return BackgroundGroup()
    world = dist.group.WORLD
    if world not in _background_groups:
        _background_groups[world] = BackgroundGroup()
    return _background_groups[world]


def _of_another_rank(number: int, name: str, text: str) -> errors.DalsegnoError:
    kind = _kind(name)
    return errors.RankFailed(f"rank {number}: {name}: {text}") if kind is None else kind(f"rank {number}: {text}")


def _name(work: Callable[[], object]) -> str:
    """Return the qualified name of ``work``; for a lambda, that of the enclosing function."""
    return str(getattr(work, "__qualname__", type(work).__name__)).partition(".<locals>")[0]


def _kind(name: str) -> type[errors.DalsegnoError] | None:
    """Return dalsegno's error class of that name, if it can be built from a message alone."""
    kind = getattr(errors, name, None)
    is_ours = isinstance(kind, type) and issubclass(kind, errors.DalsegnoError) and kind is not errors.UnknownName
    return kind if is_ours else None


def from_rank_zero(work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 only; every rank returns its result or raises its error."""
    purpose = _name(work)
    return broadcast(_run_together(lambda: work() if rank() == 0 else cast(T, None), purpose), purpose)


def from_rank_zero_in_time(work: Callable[[], T]) -> T:
    """Like :func:`from_rank_zero`, for work longer than the collective timeout: rank 0 reports that it is alive."""
    if not initialized():
        return work()
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(work) if rank() == 0 else None
        while all_reduce_max([running is not None and not wait([running], timeout=1.0).done], "is rank 0 done")[0]:
            pass
        return from_rank_zero(lambda: cast(Future[T], running).result())


# --- numbers of every rank, which may travel with those of others in one exchange -----------------------------------


class Gathered:
    """Numbers that each rank measures, and all ranks need.

    :func:`gather_together` fetches those of several at once. One that has not been fetched when it is read gathers its
    own. The ranks measure when the numbers are fetched.

    Args:
        measure: returns this rank's numbers, as many as on the other ranks.
        purpose: a few words for the error if the ranks are at different collectives.
    """

    def __init__(self, measure: Callable[[], Sequence[float]], purpose: str) -> None:
        self.measure = measure
        self.purpose = purpose
        self._fetched: list[list[float]] | None = None

    def by_rank(self) -> list[list[float]]:
        """Return every rank's numbers, in rank order, once. Collective, unless they have been fetched. Raises
        RanksApart if another rank is at a different collective."""
        fetched, self._fetched = self._fetched, None
        return gather_floats(self.measure(), self.purpose) if fetched is None else fetched

    def fetched(self, by_rank: list[list[float]]) -> None:
        """Keep every rank's numbers until they are read."""
        self._fetched = by_rank

    def forget(self) -> None:
        """Drop what has been fetched and is not going to be read."""
        self._fetched = None


def gather_together(first: Gathered, *others: Gathered) -> None:
    """Fetch the numbers of all of these, in one exchange with the purpose of the first. Collective. Raises RanksApart
    if another rank is at a different collective."""
    measured = [(each, each.measure()) for each in (first, *others)]
    rows = gather_floats([number for _, numbers in measured for number in numbers], first.purpose)
    begin = 0
    for each, numbers in measured:
        end = begin + len(numbers)
        each.fetched([row[begin:end] for row in rows])
        begin = end
