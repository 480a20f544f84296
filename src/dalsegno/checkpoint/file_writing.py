"""Writing the files of a save: small ones, copied tensors, live tensors, unchanged ones. Each is hashed meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from dalsegno.checkpoint import checkpoint_dir
from dalsegno.checkpoint.file_reading import FileRecord, opened, verify_files
from dalsegno.checkpoint.manifest import Checkpoint
from dalsegno.checkpoint.staging import SMALL, Buffer, CopyProgress, anonymous
from dalsegno.checkpoint.tensor_files import FileLayout, as_bytes
from dalsegno.errors import DalsegnoError, DamagedCheckpoint, SaveFailed
from dalsegno.system import filesystem
from dalsegno.system.machine import LOWEST, has_memory_for, lower_thread_priority, thread_count

logger = logging.getLogger("dalsegno")

Advance = Callable[[int], object]
"""Called with the number of bytes that are about to be written. An exception interrupts the write."""

_HASHING_LOWERED_BY = 5  # nice: a quarter of training's share; at the lowest priority a save waits seconds for it
_JOINED_BYTES = 1 << 20  # small tensors per call: still in the processor's cache in the next one
_OF_A_THREAD = 136 << 20  # bytes of address space: its stack, and what malloc reserves at its first call
_COPIED_BYTES = 2 << 20  # at once: still in the processor's cache when they are hashed


@dataclass(frozen=True, slots=True)
class InlineFile:
    name: str
    data: bytes

    @property
    def length(self) -> int:
        return len(self.data)

    @contextlib.contextmanager
    def written_to(self, directory: Path, advance: Advance) -> Iterator[FileRecord]:
        """Write the file, whose record this is; it is durable once the context is left."""
        advance(self.length)
        with filesystem.written_durably(directory / self.name, [self.data]):
            yield FileRecord(self.length, xxhash.xxh3_128_hexdigest(self.data))


def write_hashed(path: Path, pieces: Iterable[filesystem.Buffer], advance: Advance) -> FileRecord:
    """Write a file durably from ``pieces``, which are produced meanwhile."""
    checksum, size = xxhash.xxh3_128(), 0

    def hashed() -> Iterator[filesystem.Buffer]:
        nonlocal size
        for piece in pieces:
            advance(len(piece))
            checksum.update(piece)
            size += len(piece)
            yield piece

    filesystem.replace_durably_in_pieces(path, hashed())
    return FileRecord(size, checksum.hexdigest())


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file whose bytes training's thread copies into a buffer. Its write begins meanwhile."""

    name: str
    buffer: Buffer
    progress: CopyProgress

    @property
    def length(self) -> int:
        return self.progress.length

    def write_to(self, directory: Path, advance: Advance) -> FileRecord:
        """Write what is copied on the calling thread, and hash it on another one, which the first one relieves at the
        end. The writing thread takes 35 ms of processor time per GB, and has the priority of training: with the lowest
        one it waits for a turn between any two blocks, for minutes if every processor is busy."""
        memory = self.buffer.memory
        with checksum_beside(self.progress.to_hash(memory), _HASHING_LOWERED_BY) as checksum:
            try:
                blocks = counted(self.progress.to_write(memory), self.length, advance)
                filesystem.write_direct(directory / self.name, blocks, self.length)
            except BaseException as error:
                self.progress.fail(error)  # the other threads wait for it no longer
                raise
            return FileRecord(self.length, checksum.finish())


class MappedFile(StagedFile):
    """One in shared memory, to which the copy goes; what remains is its checksum."""

    __slots__ = ()

    def write_to(self, directory: Path, advance: Advance) -> FileRecord:
        blocks = self.progress.to_hash(self.buffer.memory)
        with checksum_beside(counted(blocks, self.length, advance)) as checksum:
            return FileRecord(self.length, checksum.wait())


@dataclass(frozen=True, slots=True)
class StreamedFile:
    """A file of live tensors, which training leaves alone until it is written."""

    name: str
    layout: FileLayout
    tensors: Sequence[torch.Tensor]

    @property
    def length(self) -> int:
        return self.layout.length

    def write_to(self, directory: Path, advance: Advance) -> FileRecord:
        """Copy and hash each block on another thread while the one before it is written. Where memory is short, the
        calling thread does all of it in turn, in smaller blocks."""
        checksum = xxhash.xxh3_128()
        is_short = not has_memory_for(2 * filesystem.DIRECT_PIECE + _OF_A_THREAD)
        if is_short:
            blocks = self._copied(checksum, min(_COPIED_BYTES, filesystem.DIRECT_PIECE), count=1)
        else:
            blocks = _one_ahead(self._copied(checksum, filesystem.DIRECT_PIECE, count=2))
        with contextlib.closing(blocks):
            filesystem.write_direct(directory / self.name, counted(blocks, self.length, advance), self.length)
        return FileRecord(self.length, checksum.hexdigest())

    @torch.no_grad()
    def _copied(self, checksum: xxhash.xxh3_128, size: int, count: int) -> Generator[memoryview]:
        """The blocks of the file, for direct writes, each copied and hashed as it is asked for. Memory holds ``count``
        blocks of ``size`` bytes: the next block replaces the oldest one."""
        room = anonymous(min(count * size, filesystem.whole_pages(self.length)))
        memory, places = memoryview(room), torch.frombuffer(room, dtype=torch.uint8)
        end = 0
        for length, copy_to in _parts(self.layout, self.tensors, min(size, _COPIED_BYTES)):
            at = end % len(memory)
            copy_to(places[at : at + length])
            checksum.update(memory[at : at + length])
            end += length
            if end % size == 0 or end == self.length:
                yield memory[at - at % size : filesystem.whole_pages(at + length)]


def _parts(
    layout: FileLayout, tensors: Sequence[torch.Tensor], block: int
) -> Iterator[tuple[int, Callable[[torch.Tensor], object]]]:
    """The parts of the file, each within one block of ``block`` bytes: its length, and what copies it to a place."""
    end = 0
    for group in in_file_order(layout, tensors, block):
        if len(group) > 1 and group[0].is_cpu:
            length = sum(tensor.nbytes for tensor in group)
            yield length, functools.partial(_raw, group)
            end += length
            continue
        raw = _raw(group)
        while len(raw):
            length = min(len(raw), block - end % block)
            yield length, functools.partial(_copy, raw[:length])
            raw, end = raw[length:], end + length


def _copy(raw: torch.Tensor, place: torch.Tensor) -> None:
    """Copy bytes. On the CPU, torch's copy waits for its thread pool, ten times as long on a busy machine."""
    if raw.is_cpu:
        ctypes.memmove(place.data_ptr(), raw.data_ptr(), raw.numel())  # releases the GIL
    else:
        place.copy_(raw)


def _one_ahead(blocks: Generator[memoryview]) -> Generator[memoryview]:
    """The same blocks; a thread makes the next one while one is in use."""
    with ThreadPoolExecutor(1, thread_name_prefix="dalsegno-copy") as beside:
        following = beside.submit(next, blocks, None)
        while (block := following.result()) is not None:
            following = beside.submit(next, blocks, None)
            yield block


def counted(blocks: Iterator[memoryview], length: int, advance: Advance) -> Generator[memoryview]:
    """Report each block as its turn comes. Only the first ``length`` bytes of all of them count."""
    for block in blocks:
        advance(min(len(block), length))
        length -= len(block)
        yield block


def in_file_order(
    layout: FileLayout, tensors: Sequence[torch.Tensor], block: int = _JOINED_BYTES
) -> Iterator[list[torch.Tensor]]:
    """The tensors of the file, after its header. Small ones that are alike come together, as far as they are within one
    block of ``block`` bytes, to be joined by one torch call: the writing thread would otherwise wait between its blocks
    for the thread that copies a thousand of them."""
    yield [torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)]
    group: list[torch.Tensor] = []
    room, end = 0, len(layout.header)
    for tensor in (tensors[number] for number in layout.order):
        if not tensor.numel():
            continue
        is_small = tensor.numel() <= SMALL and not tensor.is_complex()
        is_alike = bool(group) and tensor.dtype == group[0].dtype and tensor.device == group[0].device
        if group and not (is_small and is_alike and tensor.nbytes <= room):
            yield group
            group = []
        if not group:
            room = min(_JOINED_BYTES, block - end % block) if is_small else 0
        group.append(tensor)
        room -= tensor.nbytes
        end += tensor.nbytes
    if group:
        yield group


def _raw(group: Sequence[torch.Tensor], place: torch.Tensor | None = None) -> torch.Tensor:
    """The bytes of a group; of several tensors at ``place``, or in new memory."""
    if len(group) == 1:
        return as_bytes(*group)
    out = None if place is None else place.view(group[0].dtype)
    return torch.cat([tensor.reshape(-1) for tensor in group], out=out).view(torch.uint8)


class Checksum:
    """The hexadecimal xxh3-128 of blocks, computed on a thread of lower priority: training needs the processor more."""

    def __init__(self, blocks: Generator[memoryview], lowered_by: int) -> None:
        self._lowered_by = lowered_by
        self._blocks = blocks
        self._checksum = xxhash.xxh3_128()
        self._one_block = threading.Lock()
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dalsegno-hash", daemon=True)
        self._thread.start()

    def wait(self) -> str:
        self._thread.join()
        return self._result()

    def finish(self) -> str:
        """As :meth:`wait`, but compute the rest on the calling thread: other processes may keep the processors busy."""
        self._is_stopping = True
        while self._hash_block():
            pass
        return self._result()

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join()

    def _run(self) -> None:
        lower_thread_priority(self._lowered_by)
        while not self._is_stopping and self._hash_block():
            pass

    def _hash_block(self) -> bool:
        """Hash the next block, on either thread. Returns whether there was one; not after a failure, which is kept."""
        with self._one_block:
            try:
                block = next(self._blocks, None)
                if block is not None:
                    self._checksum.update(block)
                return block is not None
            except BaseException as error:
                self._failure = error
                return False

    def _result(self) -> str:
        if self._failure is not None:
            raise self._failure
        return self._checksum.hexdigest()


@contextlib.contextmanager
def checksum_beside(blocks: Generator[memoryview], lowered_by: int = LOWEST) -> Iterator[Checksum]:
    """Compute the checksum of ``blocks`` within the context, on a thread of priority ``lowered_by``. An exception ends
    it."""
    checksum = Checksum(blocks, lowered_by)
    try:
        yield checksum
    finally:
        checksum.stop()


# --- files that a save does not write again, since the checkpoint before has one of the same content -----------------
# The proof is a digest of the live tensors; for a file that another process has saved, the checksum of the file that
# they would make. It is computed while the state is captured and training waits: so a tensor that is changed later can
# neither be missed nor be torn. The cost is one read of these tensors, and no memory.

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
"""The filesystem has no hard links, or no more of this file."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

_DIGESTED_BYTES = 8 << 20  # hashed by one call, without the GIL: 0.8 ms
_PIECES = 16  # that wait for a thread; some are copies of small tensors
_ROW = 1 << 16  # integers in a sum; the keys of a row stay in a GPU's cache
_ROWS = 16  # summed by one call: 4 MB, whose products take 16 MB


class LinkableFiles:
    """Files of a published checkpoint in ``directory``, which later ones may share. ``unverified``: those that this
    process has neither verified nor written, and verifies when they are needed. ``digests``: of the tensors in those
    that this process has saved: see :func:`live_digest`."""

    def __init__(
        self,
        directory: Path,
        records: Mapping[str, FileRecord],
        *,
        unverified: Collection[str] = (),
        digests: Mapping[str, bytes] | None = None,
    ) -> None:
        self.directory = directory
        self._records = dict(records)
        self._unverified = {*unverified}
        self._digests = digests or {}

    @classmethod
    def of_newest(cls, directory: Path) -> LinkableFiles | None:
        """Files of the newest checkpoint in ``directory`` whose manifest is valid; None if there is none."""
        with contextlib.suppress(DalsegnoError, OSError):
            paths = checkpoint_dir.published(directory).values()
            found, _ = checkpoint_dir.first_valid(paths, Checkpoint.open)
            if found is not None:
                return cls(found.path, found.manifest.files, unverified=found.manifest.files)
        return None

    @property
    def sizes(self) -> set[int]:
        return {record.size for record in self._records.values()}

    def find(
        self, name: str, layout: FileLayout, tensors: Sequence[torch.Tensor], digest: bytes
    ) -> UnchangedFile | None:
        """The file ``name`` that these tensors make, if one of the same content is here. ``digest``: of the tensors.
        Without that of the file ``name``, which another process may have saved, they are hashed."""
        if name not in self._digests:
            record = record_of(layout, tensors) if layout.length in self.sizes else None
        else:
            record = self._records.get(name) if digest == self._digests[name] else None
        path = None if record is None else self.path_of(record)
        return None if record is None or path is None else UnchangedFile(name, record, path, self)

    def path_of(self, content: FileRecord) -> Path | None:
        """Path of a file of that content; None if there is none, or it has been removed or damaged."""
        found = [name for name, record in self._records.items() if record == content]
        return next((self.directory / name for name in found if self._is_intact(name)), None)

    def are_beside(self, directory: Path) -> bool:
        """Whether ``directory``, or the parent in which it will be created, is on the same filesystem."""
        existing = next(each for each in (directory, *directory.parents) if each.exists())
        return self.directory.exists() and self.directory.stat().st_dev == existing.stat().st_dev

    def forget(self, content: FileRecord) -> None:
        """The files of that content cannot be shared: the next save writes it again."""
        self._records = {name: record for name, record in self._records.items() if record != content}

    def _is_intact(self, name: str) -> bool:
        record = self._records[name]
        if not _is_file(self.directory / name, record.size):
            return False
        if name in self._unverified:
            try:
                verify_files(self.directory, [name], record)
            except OSError as error:
                logger.warning("it is not shared with later checkpoints: %s", error)
                del self._records[name]
                return False
            self._unverified.remove(name)
        return True


@torch.no_grad()
def record_of(layout: FileLayout, tensors: Sequence[torch.Tensor]) -> FileRecord:
    """Record of the file that these tensors make, on any device. Reads all of them."""
    return FileRecord(layout.length, checksum_of_bytes(map(_raw, in_file_order(layout, tensors))))


def checksum_of_bytes(raws: Iterable[torch.Tensor]) -> str:
    """Hexadecimal xxh3-128 of bytes on any device, of which one piece is copied at a time."""
    checksum = xxhash.xxh3_128()
    for raw in raws:
        for piece in torch.split(raw, filesystem.DIRECT_PIECE):
            checksum.update(piece.cpu().numpy().data)
    return checksum.hexdigest()


@dataclass(frozen=True, slots=True)
class UnchangedFile:
    """A file that becomes a hard link to ``source``, one of the ``former`` files, which has the same content; a copy
    where links are refused."""

    name: str
    record: FileRecord
    source: Path
    former: LinkableFiles
    length: int = 0

    def write_to(self, directory: Path, advance: Advance) -> FileRecord:
        """If that fails, and not for lack of space, the next save does not try it again. A copy is compared with
        ``record``."""
        try:
            self._link_or_copy(directory / self.name, advance)
        except SaveFailed:  # it was cancelled
            raise
        except OSError as error:
            if error.errno not in _NO_SPACE:
                self.former.forget(self.record)
            raise
        return self.record

    def _link_or_copy(self, path: Path, advance: Advance) -> None:
        with contextlib.suppress(FileNotFoundError):
            if path.samefile(self.source):  # in a slot of memory checkpoints, which an earlier save has linked
                return
        try:
            filesystem.remove(path)
            filesystem.link(self.source, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            filesystem.replace_durably_in_pieces(path, self._pieces(advance))

    def _pieces(self, advance: Advance) -> Iterator[bytes]:
        """Raises after the last one if they are not what ``record`` says: then no copy appears."""
        checksum = xxhash.xxh3_128()
        with opened(self.source) as descriptor:
            while piece := os.read(descriptor, filesystem.DIRECT_PIECE):
                advance(len(piece))
                checksum.update(piece)
                yield piece
        if checksum.hexdigest() != self.record.xxh3:
            raise DamagedCheckpoint(f"{self.source}: has checksum {checksum.hexdigest()}, not {self.record.xxh3}")


PendingFile = StagedFile | StreamedFile | UnchangedFile
"""What writes a file durably, and returns its size and checksum."""


def _is_file(path: Path, size: int) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == size


@torch.no_grad()
def live_digest(layout: FileLayout, tensors: Sequence[torch.Tensor]) -> bytes:
    """A digest of the file that these live tensors make, to be compared with others of this process.

    Every byte is read, since version counters miss a write to ``.data`` and one by another library's kernel: on the CPU
    by several threads, on an accelerator by itself, without a way over the bus. Two files that differ have the same
    digest with a probability of less than 2**-60.
    """
    of_all = xxhash.xxh3_128()
    sums: dict[torch.device, list[torch.Tensor]] = {}
    pending: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(thread_count(), thread_name_prefix="dalsegno-hash") as threads:
        for raw in map(_raw, in_file_order(layout, tensors)):
            if not raw.is_cpu:
                sums.setdefault(raw.device, []).extend(_sums(raw))
                continue
            for piece in torch.split(raw, _DIGESTED_BYTES):
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
    """Of each row of integers in these bytes, the sums of its products with two rows of random keys, modulo 2**64. If
    two rows differ, whatever they contain, either sum is the same for one in 2**33 keys at most."""
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
