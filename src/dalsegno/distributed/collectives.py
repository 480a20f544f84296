"""What the ranks of one job tell each other. Alone, each function is the identity and costs nothing.

Everything here is a collective: all ranks must call it, in the same order. So none of it may be called in a signal
handler, on one rank only, or on the way out of an exception: the other ranks may be gone, and it would wait for ever.
"""

from __future__ import annotations

import datetime
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from dalsegno import errors

from .exchange import exchange

T = TypeVar("T")
R = TypeVar("R")


def initialized() -> bool:
    """Whether this process belongs to a group of more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """This process's number among all ranks, from 0."""
    return dist.get_rank() if initialized() else 0


def world_size() -> int:
    """How many ranks train together."""
    return dist.get_world_size() if initialized() else 1


def local_rank() -> int:
    """This process's number among the ranks of its host, as torchrun sets it."""
    return int(os.environ.get("LOCAL_RANK", rank()))


def communication_device() -> torch.device:
    """Where a tensor must lie for a collective of the default group: the GPU for NCCL, else the CPU."""
    backend = dist.get_backend() if initialized() else ""
    if "nccl" in backend and "gloo" not in backend:  # with both, gloo carries what lies on the CPU, and nothing waits
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def all_reduce_max(values: Sequence[int], purpose: str) -> list[int]:
    """Element-wise maximum over all ranks: with flags, any rank's wish counts. One small collective.

    Args:
        values: as many on each rank.
        purpose: what they are for, in a few words: an error says them if the ranks are not at the same place.

    Raises:
        RanksApart: if another rank is at another place.
    """
    if not initialized():
        return list(values)
    told = exchange(purpose, [*map(int, values)], communication_device())
    return [int(value) for value in told.amax(0).tolist()]


def sum_floats(values: Sequence[float], purpose: str) -> list[float]:
    """Element-wise sum over all ranks, in float64, in rank order; else as :func:`agree_max`."""
    if not initialized():
        return list(values)
    return [float(value) for value in _gathered(values, purpose).sum(0).tolist()]


def gather_floats(values: Sequence[float], purpose: str) -> list[list[float]]:
    """Every rank's ``values``, in rank order; else as :func:`agree_max`."""
    if not initialized():
        return [list(values)]
    return [[float(number) for number in row] for row in _gathered(values, purpose).tolist()]


def _gathered(values: Sequence[float], purpose: str) -> torch.Tensor:
    """Shape (ranks, values), float64."""
    bits = struct.unpack(f"{len(values)}q", struct.pack(f"{len(values)}d", *values))
    return exchange(purpose, bits, communication_device()).contiguous().view(torch.float64)


def _meet(purpose: str) -> None:
    """Make sure that all ranks are here, before a collective that could not tell."""
    exchange(purpose, (), communication_device())


def broadcast_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Give rank 0's values of these (whole, not sharded) tensors to every rank."""
    if initialized():
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=0)
            tensor.detach().copy_(whole)


def gather(value: T, purpose: str) -> list[T]:
    """Every rank's ``value``, in rank order, on every rank. Between live ranks only: the objects are pickled.

    ``purpose``: as for :func:`agree_max`.
    """
    if not initialized():
        return [value]
    _meet(purpose)
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def broadcast(value: T, purpose: str) -> T:
    """Rank 0's ``value`` on every rank. ``purpose``: as for :func:`agree_max`."""
    if not initialized():
        return value
    _meet(purpose)
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[no-any-return]


def run_on_all_ranks(work: Callable[[], T]) -> T:
    """Run ``work`` on every rank. If it fails on one it fails on all, so that none waits for a rank that gave up.

    Raises:
        Exception: on every rank an error of the same kind, so that all of them take the same way out: the error of one
            rank that failed (of several: of one with an error that is none of dalsegno's, a disk's for one, else of
            the first). That rank raises its own; the others the same, naming the rank, if it is one of dalsegno's,
            else :class:`~dalsegno.errors.RankFailed`.
    """
    return _together(work, _name(work))


def _together(work: Callable[[], T], purpose: str) -> T:
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    outcomes = gather(None if failure is None else (type(failure).__name__, str(failure)), purpose)
    failed = {number: outcome for number, outcome in enumerate(outcomes) if outcome is not None}
    if not failed:
        return result
    number = min(failed, key=lambda number: _kind(failed[number][0]) is not None)  # of equals, min takes the first
    if failure is not None and failed[number] == failed[rank()]:
        raise failure
    raise _of_another_rank(number, *failed[number]) from failure


class BackgroundGroup:
    """The ranks once more, for a thread beside the training: what it says there never meets what the training says.

    It goes over gloo, so that no GPU is kept waiting. When another rank is gone, its methods raise. To be had from
    :func:`side_group`.
    """

    def __init__(self) -> None:
        # Only torch's registry keeps the group: it must be gone, and its threads with it, once it has been destroyed.
        # One that still runs when the interpreter ends brings the whole process down.
        group = dist.new_group(backend="gloo", timeout=_PATIENCE) if initialized() else None
        self._group = None if group is None else weakref.ref(group)

    def gather_decide(self, value: T, judge: Callable[[list[T]], R]) -> R:
        """Rank 0 is given every rank's ``value``, in rank order, and every rank is told what ``judge`` makes of it.

        ``judge`` runs on rank 0 and must not raise: the others would wait.
        """
        if self._group is None:
            return judge([value])
        group = self._group()
        if group is None:
            raise errors.RankFailed("the process group has been destroyed")
        gathered: list[Any] | None = [None] * world_size() if rank() == 0 else None
        dist.gather_object(value, gathered, dst=0, group=group)
        box: list[Any] = [judge(gathered) if gathered is not None else None]
        dist.broadcast_object_list(box, src=0, group=group)
        return box[0]  # type: ignore[no-any-return]


_PATIENCE = datetime.timedelta(minutes=60)  # for a rank that is alive, and still has a lot to write
_side_groups: weakref.WeakKeyDictionary[Any, BackgroundGroup] = weakref.WeakKeyDictionary()


def background_group() -> BackgroundGroup:
    """This process's :class:`SideGroup`. Collective the first time."""
    if not initialized():
        return BackgroundGroup()
    world = dist.group.WORLD
    if world not in _side_groups:
        _side_groups[world] = BackgroundGroup()
    return _side_groups[world]


def _of_another_rank(number: int, name: str, text: str) -> errors.DalsegnoError:
    kind = _kind(name)
    return errors.RankFailed(f"rank {number}: {name}: {text}") if kind is None else kind(f"rank {number}: {text}")


def _name(work: Callable[[], object]) -> str:
    """What it is called in the source, a lambda like the function that it stands in."""
    return str(getattr(work, "__qualname__", type(work).__name__)).partition(".<locals>")[0]


def _kind(name: str) -> type[errors.DalsegnoError] | None:
    """The error of dalsegno's with that name, if it is made of a text alone."""
    kind = getattr(errors, name, None)
    is_ours = isinstance(kind, type) and issubclass(kind, errors.DalsegnoError) and kind is not errors.UnknownName
    return kind if is_ours else None


def from_rank_zero(work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 only and give its result, or its error, to every rank."""
    purpose = _name(work)
    return broadcast(_together(lambda: work() if rank() == 0 else cast(T, None), purpose), purpose)


def from_rank_zero_in_time(work: Callable[[], T]) -> T:
    """As :func:`from_rank_zero`, for work that takes longer than a collective may wait: the others hear of rank 0."""
    if not initialized():
        return work()
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(work) if rank() == 0 else None
        while all_reduce_max([running is not None and not wait([running], timeout=1.0).done], "is rank 0 done")[0]:
            pass
        return from_rank_zero(lambda: cast(Future[T], running).result())
