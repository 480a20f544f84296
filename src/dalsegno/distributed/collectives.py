"""Collectives among the ranks of one job. In a single process each function is the identity and costs nothing.

All ranks must call these functions, in the same order. So do not call them in a signal handler, on one rank only, or
during exception handling: if other ranks are gone, the call would hang.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import pickle
import struct
import threading
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from dalsegno import errors
from dalsegno.distributed import accelerator
from dalsegno.errors import RanksApart

# --- the exchange: a maximum over all ranks, which detects ranks at different collectives ----------------------------

# A collective pairs with whatever the other ranks call next; neither NCCL nor gloo checks that it is the same one. If a
# collective is skipped on some ranks, or called on some only, the others receive numbers with another meaning. So each
# exchange begins with a header, its number and purpose, and its highest and lowest value over the ranks must be equal.
#
# Every exchange begins with a block of the same kind and size at any number of ranks, so that two of them pair, and a
# program's own misplaced ``all_reduce`` of as many bytes is detected. What differs by rank travels in a maximum, too:
# each rank fills its own place, and the others' with the lowest number. Results computed from it (e.g. a sum of floats)
# are equal on all ranks and with any backend.

WIDTH = 64
"""int64 words in a block. The rest of a longer exchange follows in a second maximum, after the first was checked."""
_NAME = 4  # words, of 8 bytes each
_HEADER = 2 + _NAME
_ROOM = WIDTH - 2 * _HEADER
_LENGTHS = 2**24  # exclusive maximum of words per rank
_RANKS = 2**24  # exclusive maximum of ranks
_NOTHING = -(2**63)  # as a float, -0.0

_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Number of the last exchange, by process group."""


def _exchange(purpose: str, length: int, own: Tensor) -> Tensor:
    """Return the element-wise maximum of every rank's ``own``, int64, on the CPU. Collective, over the default group.
    Raises RanksApart if another rank is at a different collective; its numbers are then not used.

    Args:
        purpose: at most 32 ASCII characters, for the error.
        length: numbers that a rank has to say, for the error; must be equal on all ranks.
    """
    _deliver()
    group = dist.group.WORLD
    number = _numbers[group] = _numbers.get(group, 0) + 1
    words = (number * _LENGTHS + length, *_words(purpose))
    header = (*words, _tag(words) * _RANKS + dist.get_rank())
    begin, rest = own[:_ROOM], own[_ROOM:]
    block = torch.tensor([*header, *(~word for word in header), *begin.tolist(), *[_NOTHING] * (_ROOM - len(begin))])
    block = _maximum(block)
    highest, lowest = block[:_HEADER].tolist(), (~block[_HEADER : 2 * _HEADER]).tolist()
    if not highest[:-1] == lowest[:-1] == [*words]:
        raise RanksApart(_mismatch_message(header, highest, lowest))
    values = block[2 * _HEADER :][: len(begin)]
    return torch.cat([values, _maximum(rest)]) if len(rest) else values


def _maximum(own: Tensor) -> Tensor:
    tensor = own.to(communication_device())
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.cpu()


@functools.cache
def _words(purpose: str) -> tuple[int, ...]:
    return struct.unpack(f"{_NAME}q", purpose.encode("ascii", "replace")[: 8 * _NAME].ljust(8 * _NAME))


def _tag(words: Sequence[int]) -> int:
    return zlib.crc32(struct.pack(f"{len(words)}q", *words))


def _mismatch_message(own: Sequence[int], highest: Sequence[int], lowest: Sequence[int]) -> str:
    """Of two headers, each word is the highest or the lowest; which rank has the other one, its tag tells."""
    there = [high if high != here else low for here, high, low in zip(own, highest, lowest, strict=True)][:-1]
    ends = [divmod(end, _RANKS) for end in (highest[-1], lowest[-1])]
    tag, rank = ends[ends[0][0] == own[-1] // _RANKS]
    came = "received a collective that is not dalsegno's, with other numbers, or several different ones"
    if tag == _tag(there):
        came = f"rank {rank} called {_described(there)}"
    return (
        f"the ranks are not at the same collective: rank {dist.get_rank()} called {_described(own[:-1])}, but {came}. "
        "Some collective is called on some ranks only: check callbacks, model and loss for one behind an early return "
        "or a condition that depends on the rank or its data"
    )


def _described(words: Sequence[int]) -> str:
    number, length = divmod(words[0], _LENGTHS)
    name = struct.pack(f"{_NAME}q", *words[1:]).decode("ascii", "replace").rstrip()
    return f"{name!r} (exchange {number}, {length} numbers)"


def _share(purpose: str, data: bytes | None, source: int = 0) -> bytes:
    """Return the bytes of the rank ``source``; one exchange, and a broadcast of those that do not fit into it."""
    own: list[int] = [_NOTHING] * _ROOM
    if data is not None:
        begin = data[: 8 * (_ROOM - 1)].ljust(8 * (_ROOM - 1))
        own = [len(data), *struct.unpack(f"{_ROOM - 1}q", begin)]
    length, *words = _exchange(purpose, 0, torch.tensor(own)).tolist()
    begin = struct.pack(f"{_ROOM - 1}q", *words)[:length]
    if length == len(begin):
        return begin
    rest = bytearray(length - len(begin) if data is None else data[len(begin) :])
    tensor = torch.frombuffer(rest, dtype=torch.uint8).to(communication_device())
    dist.broadcast(tensor, src=source)
    return begin + tensor.cpu().numpy().tobytes()


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
    return dist.get_rank() if initialized() else 0


def world_size() -> int:
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
    """Return the element-wise maximum over all ranks; for flags, whether any rank set it. One small collective. Raises
    RanksApart if another rank is at a different collective; ``purpose`` is a few words for that error."""
    if not initialized():
        return list(values)
    own = torch.tensor([*map(int, values)], dtype=torch.int64)
    return [int(value) for value in _exchange(purpose, len(own), own).tolist()]


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
    rows = torch.full((world_size(), len(values)), _NOTHING)
    rows[rank()] = torch.tensor(values, dtype=torch.float64).view(torch.int64)
    return _exchange(purpose, len(values), rows.view(-1)).view(torch.float64).view(rows.shape)


_SMALL = 1 << 20  # bytes; smaller tensors are broadcast together
_TOGETHER = 16 << 20  # bytes at most


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], source: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Broadcast the values that these tensors, which must not be sharded, have on the rank ``source``, to all ranks or
    to those of a ``group``."""
    if not initialized():
        return
    _deliver()
    for alike in _batches(tensors):
        whole = torch.cat([each.reshape(-1) for each in alike]) if len(alike) > 1 else alike[0].contiguous()
        flat = whole.as_strided((whole.numel(),), (1,))  # a single element may have any stride, which view() refuses
        if len(flat):
            dist.broadcast(flat.view(torch.uint8), src=source, group=group)  # as bytes: of any dtype
        if rank() != source and whole is not alike[0]:  # else it has been received in its place
            for each, part in zip(alike, torch.split(flat, [each.numel() for each in alike]), strict=True):
                each.copy_(part.view(each.shape))


def _batches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Those to be broadcast together: small ones of a device and dtype, as many as make a copy of bounded size."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    sizes: Counter[tuple[torch.device, torch.dtype]] = Counter()
    for each in tensors:
        if each.nbytes >= _SMALL:
            yield [each]
            continue
        kind = each.device, each.dtype
        alike.setdefault(kind, []).append(each)
        sizes[kind] += each.nbytes
        if sizes[kind] >= _TOGETHER:
            del sizes[kind]
            yield alike.pop(kind)
    yield from alike.values()


def gather(value: T, purpose: str) -> list[T]:
    """Return every rank's ``value``, in rank order. Only between live ranks, because the objects are pickled."""
    if not initialized():
        return [value]
    own = pickle.dumps(value)
    (longest,) = all_reduce_max([len(own)], purpose)
    here = torch.frombuffer(bytearray(own.ljust(longest)), dtype=torch.uint8).to(communication_device())
    everywhere = [torch.empty_like(here) for _ in range(world_size())]
    dist.all_gather(everywhere, here)
    return [pickle.loads(each.cpu().numpy().tobytes()) for each in everywhere]


def broadcast(value: T, purpose: str) -> T:
    """Return rank 0's ``value``."""
    if not initialized():
        return value
    return cast(T, pickle.loads(_share(purpose, pickle.dumps(value) if rank() == 0 else None)))


def run_on_all_ranks(work: Callable[[], T]) -> T:
    """Run ``work`` on every rank. If it fails on one rank it raises on all, so that no rank waits for a failed one.
    Raises Exception on every rank, of the same kind, so that all ranks handle it alike. It is the error of one failed
    rank: the first whose error is not dalsegno's (a disk's, for example), else the first. That rank raises its own
    error; the others raise the same error naming the rank if it is one of dalsegno's, else
    :class:`~dalsegno.errors.RankFailed`."""
    return run_and_compare(work, lambda result: None)[0]


def run_and_compare(work: Callable[[], T], key: Callable[[T], object]) -> tuple[T, bool]:
    """Run ``work`` as :func:`run_on_all_ranks` does. Also returns whether the ``key`` of the result, a value that its
    ``repr`` describes in full, is equal on all ranks. One small exchange for both."""
    if not initialized():
        return work(), True
    failure, digest = None, 0
    try:
        result = work()
        digest = xxhash.xxh3_64_intdigest(repr(key(result)).encode("utf-8", "surrogatepass")) >> 1
    except Exception as error:
        failure = error
    own = 0 if failure is None else (2 - (_kind(type(failure).__name__) is not None)) * _RANKS - rank()
    worst, highest, lowest = all_reduce_max([own, digest, -digest], purpose := _name(work))
    if not worst:
        return result, highest == -lowest
    number = -worst % _RANKS
    told = None if failure is None else _told(failure)
    of_number = _share(purpose, pickle.dumps(told) if number == rank() else None, number)
    if failure is not None and pickle.loads(of_number) == told:
        raise failure
    raise _of_another_rank(number, *pickle.loads(of_number)) from failure


_answers: deque[tuple[str, bytes]] = deque()
"""Of :func:`from_rank_zero`, each with its purpose. On rank 0: not yet sent. On others: not yet asked for."""
_is_ahead = False


def from_rank_zero(work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 only; every rank returns its result or raises its error."""
    if not initialized():
        return work()
    purpose = _name(work)
    if rank() == 0:
        try:
            result = work()
            _answers.append((purpose, pickle.dumps((result, None))))
        except Exception as error:
            _answers.append((purpose, pickle.dumps((None, _told(error)))))
            _deliver()
            raise
        if not _is_ahead:
            _deliver()
        return result
    if not _answers:
        _answers.extend(pickle.loads(_share(purpose, None)))
    answered, answer = _answers.popleft()
    if answered != purpose:
        raise RanksApart(f"rank 0 answered {answered!r}, where rank {rank()} asked for {purpose!r}")
    result, failure = pickle.loads(answer)
    if failure is not None:
        raise _of_another_rank(0, *failure)
    return cast(T, result)


@contextlib.contextmanager
def rank_zero_ahead() -> Iterator[None]:
    """Inside, rank 0 does not wait for the others at :func:`from_rank_zero`: it sends its results together, in one
    exchange, when it comes to another collective of this module or leaves."""
    global _is_ahead
    was_ahead, _is_ahead = _is_ahead, True
    try:
        yield
    except Exception:
        if not was_ahead and rank() == 0:
            _deliver()  # with these answers the others come to the same error, or to the next collective
        raise
    else:
        if not was_ahead:
            _deliver()
    finally:
        _is_ahead = was_ahead
        if not was_ahead:
            _answers.clear()


def _deliver() -> None:
    """On rank 0, send the answers that the others wait for."""
    if not _answers:
        return
    if rank() != 0:
        raise RanksApart(f"rank 0 answered {_answers[0][0]!r}, which rank {rank()} did not ask for")
    answers = [*_answers]
    _answers.clear()
    _share(answers[0][0], pickle.dumps(answers))


def _told(failure: Exception) -> tuple[str, str]:
    return type(failure).__name__, str(failure)


class BackgroundGroup:
    """A second process group, for a background thread, whose collectives never pair with those of training.

    It uses gloo, so that no GPU waits. If another rank is gone, its methods raise.
    """

    def __init__(self) -> None:
        # Only torch's registry holds the group: once destroyed, it must be freed together with its threads. A thread
        # that is still running when the interpreter exits crashes the process.
        _deliver()
        group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if initialized() else None
        self._group = None if group is None else weakref.ref(group)

    def gather_decide(self, value: T, judge: Callable[[list[T]], R]) -> R:
        """Gather every rank's ``value`` on rank 0, in rank order, and broadcast the result of ``judge``, which runs on
        rank 0 and must not raise: the other ranks would hang."""
        if self._group is None:
            return judge([value])
        group = self._live()
        gathered: list[Any] | None = [None] * world_size() if rank() == 0 else None
        dist.gather_object(value, gathered, dst=0, group=group)
        answer = b"" if gathered is None else pickle.dumps(judge(gathered))
        length = torch.tensor([len(answer)])
        self._answer(length)
        data = torch.frombuffer(bytearray(answer.ljust(int(length))), dtype=torch.uint8)
        self._answer(data)
        return pickle.loads(data.numpy().tobytes())  # type: ignore[no-any-return]

    def _answer(self, tensor: torch.Tensor) -> None:
        """Broadcast rank 0's values."""
        options = dist.BroadcastOptions()
        options.timeout = _ANSWER_TIMEOUT if rank() == 0 else _TIMEOUT
        self._live().broadcast([tensor], options).wait()

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
_ANSWER_TIMEOUT = datetime.timedelta(minutes=1)
"""For rank 0 to send an answer, which each live rank is already waiting for. Of the sends to a rank that was just
killed, gloo lets one in some hundreds wait to the end of its time, and the process cannot end before."""
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
    """Numbers that each rank measures by ``measure``, as many as the others, and all ranks need.

    :func:`gather_together` fetches those of several at once. One that has not been fetched when it is read gathers its
    own. The ranks measure when the numbers are fetched.
    """

    def __init__(self, measure: Callable[[], Sequence[float]], purpose: str) -> None:
        self.measure = measure
        self.purpose = purpose
        self.fetched: list[list[float]] | None = None
        """Every rank's numbers, until they are read."""

    def by_rank(self) -> list[list[float]]:
        """Return every rank's numbers, in rank order, once. Collective, unless they have been fetched."""
        fetched, self.fetched = self.fetched, None
        return gather_floats(self.measure(), self.purpose) if fetched is None else fetched

    def forget(self) -> None:
        """Drop what has been fetched and is not going to be read."""
        self.fetched = None


def gather_together(first: Gathered, *others: Gathered) -> None:
    """Fetch the numbers of all of these, in one exchange with the purpose of the first. Collective."""
    measured = [(each, each.measure()) for each in (first, *others)]
    rows = gather_floats([number for _, numbers in measured for number in numbers], first.purpose)
    begin = 0
    for each, numbers in measured:
        end = begin + len(numbers)
        each.fetched = [row[begin:end] for row in rows]
        begin = end
