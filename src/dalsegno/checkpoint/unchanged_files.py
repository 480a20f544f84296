"""Files that a save does not write again, because the checkpoint before has a file of the same content.

The proof is a digest of the live tensors; for a file that another process has saved, the checksum of the file that they
would make. It is computed while the state is captured and training waits: so a tensor that is changed later can neither
be missed nor be torn. The cost is one read of these tensors, and no memory.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import stat
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from dalsegno.checkpoint import checkpoint_dir
from dalsegno.checkpoint.file_reading import FileRecord, opened, verify_files
from dalsegno.checkpoint.files import Advance, in_file_order
from dalsegno.checkpoint.tensor_files import FileLayout
from dalsegno.errors import DalsegnoError, DamagedCheckpoint, SaveFailed
from dalsegno.system import filesystem
from dalsegno.system.machine import thread_count

logger = logging.getLogger("dalsegno")

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
"""The filesystem has no hard links, or no more of this file."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

_PIECE_BYTES = 8 << 20  # hashed by one call, without the GIL: 0.8 ms
_PIECES = 16  # that wait for a thread; some are copies of small tensors
_ROW = 1 << 16  # integers in a sum; the keys of a row stay in a GPU's cache
_ROWS = 16  # summed by one call: 4 MB, whose products take 16 MB


class LinkableFiles:
    """Files of a published checkpoint, which later ones may share.

    Args:
        directory: of the checkpoint.
        records: of its files.
        unverified: names of those that this process has neither verified nor written. They are verified when they are
            needed.
        digests: by name, of the tensors in those that this process has saved: see :func:`live_digest`.
    """

    def __init__(
        self,
        directory: Path,
        records: Mapping[str, FileRecord],
        *,
        unverified: Collection[str] = (),
        digests: Mapping[str, bytes] | None = None,
    ) -> None:
        self._directory = directory
        self._records = dict(records)
        self._unverified = {*unverified}
        self._digests = digests or {}

    @classmethod
    def of_newest(cls, directory: Path) -> LinkableFiles | None:
        """Files of the newest checkpoint in ``directory`` whose manifest is valid; None if there is none."""
        with contextlib.suppress(DalsegnoError, OSError):
            paths = checkpoint_dir.newest_first(directory)
            found, _ = checkpoint_dir.first_valid(paths, checkpoint_dir.open_checkpoint)
            if found is not None:
                return cls(found.path, found.manifest.files, unverified=found.manifest.files)
        return None

    @property
    def sizes(self) -> set[int]:
        return {record.size for record in self._records.values()}

    def moved_to(self, directory: Path) -> LinkableFiles:
        """The same files, after their directory has been renamed."""
        return LinkableFiles(directory, self._records, unverified=self._unverified, digests=self._digests)

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
        return next((self._directory / name for name in found if self._is_intact(name)), None)

    def are_beside(self, directory: Path) -> bool:
        """Whether ``directory``, or the parent in which it will be created, is on the same filesystem."""
        existing = next(each for each in (directory, *directory.parents) if each.exists())
        return self._directory.exists() and self._directory.stat().st_dev == existing.stat().st_dev

    def forget(self, content: FileRecord) -> None:
        """The files of that content cannot be shared: the next save writes it again."""
        self._records = {name: record for name, record in self._records.items() if record != content}

    def _is_intact(self, name: str) -> bool:
        record = self._records[name]
        if not _is_file(self._directory / name, record.size):
            return False
        if name in self._unverified:
            try:
                verify_files(self._directory, [name], record)
            except OSError as error:
                logger.warning("it is not shared with later checkpoints: %s", error)
                del self._records[name]
                return False
            self._unverified.remove(name)
        return True


@torch.no_grad()
def record_of(layout: FileLayout, tensors: Sequence[torch.Tensor]) -> FileRecord:
    """Record of the file that these tensors make, on any device. Reads all of them, and copies one piece at a time."""
    checksum = xxhash.xxh3_128()
    for raw in in_file_order(layout, tensors):
        for piece in torch.split(raw, filesystem.DIRECT_PIECE):
            checksum.update(piece.cpu().numpy().data)
    return FileRecord(layout.length, checksum.hexdigest())


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
        checksum = xxhash.xxh3_128()
        with opened(self.source) as descriptor:
            while piece := os.read(descriptor, filesystem.DIRECT_PIECE):
                advance(len(piece))
                checksum.update(piece)
                yield piece
        if checksum.hexdigest() != self.record.xxh3:
            raise DamagedCheckpoint(f"{self.source}: has checksum {checksum.hexdigest()}, not {self.record.xxh3}")


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
