"""MemorySave: an async save whose files are in shared memory, published on each host by itself.

::

    each rank hashes its files               rank 0: build the manifest, which every rank receives
    each rank sends its files on             to the hosts that keep copies and lack them; these verify them
    each host publishes                      by a rename, once all copies are whole
    each host hides the checkpoint before    once all hosts have published: so a whole one is left at any instant
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.checkpoint import checkpoint_dir
from dalsegno.checkpoint.async_save import AsyncSave, Records, Report, described
from dalsegno.checkpoint.file_reading import FileRecord
from dalsegno.checkpoint.manifest import Manifest
from dalsegno.checkpoint.snapshot import Snapshot
from dalsegno.checkpoint.unchanged_files import LinkableFiles, UnchangedFile
from dalsegno.distributed import collectives
from dalsegno.distributed.hosts import Hosts, Transfer, transfer
from dalsegno.system import filesystem
from dalsegno.system.worker import lower_thread_priority

logger = logging.getLogger("dalsegno")


@dataclass(slots=True)
class MemoryPublication:
    """The destination of a save on one host: the slot ``partial``, which becomes the checkpoint ``path``.

    Attributes:
        superseded: published checkpoints that it supersedes, each with the name under which it is hidden.
        former: directory of a former leg, which it supersedes too; None if there is none.
    """

    partial: Path
    path: Path
    superseded: Sequence[tuple[Path, Path]]
    former: Path | None
    _moves: list[tuple[Path, Path]] = field(default_factory=list)

    def make_room(self, length: int) -> str | None:
        return None  # it is laid out

    def publish(self, manifest: Manifest) -> None:
        """As on disk, after the removal of files that only an earlier checkpoint in this slot had."""
        for path in [path for path in self.partial.rglob("*") if path.is_file()]:
            if path.relative_to(self.partial).as_posix() not in manifest.files:
                filesystem.remove(path)
        # some directories are in another host's memory alone
        checkpoint_dir.publish(manifest, self.partial, self.path, is_whole=False)
        self._moves.append((self.partial, self.path))

    def hide_superseded(self) -> None:
        """Rename the superseded checkpoints; the next save writes to their files."""
        for published, hidden in self.superseded:
            self._moves.append((published, hidden))
            filesystem.rename(published, hidden)

    def undo(self) -> None:
        """Rename everything back: the save is reported as failed, and the next one writes to this slot."""
        while self._moves:
            source, target = self._moves.pop()
            with contextlib.suppress(OSError):  # raised if that did not move, or once it is back
                filesystem.rename(target, source)

    def remove_former(self) -> None:
        """Free the memory of the former leg."""
        if self.former is not None:
            filesystem.remove(self.former)

    def discard(self) -> None: ...  # the next save writes over it


class MemorySave(AsyncSave):
    """A save into the shared memory of each host, and of the ``copies`` hosts after it."""

    def __init__(
        self,
        snapshot: Snapshot,
        publication: MemoryPublication,
        hosts: Hosts,
        *,
        copies: int,
        former: LinkableFiles | None,
        step: int,
        manifest_of: Callable[[Sequence[Records]], Manifest],
    ) -> None:
        """Start the save; arguments as of :class:`AsyncSave`, and ``copies``, less than the number of hosts;
        ``former``: files of the checkpoint before on this host, which need not be sent to it again."""
        self._publication, self._hosts, self._copies, self._former = publication, hosts, copies, former
        self._records_of_all: Records = {}
        super().__init__(snapshot, publication, step=step, is_best=False, manifest_of=manifest_of)

    @property
    def files(self) -> LinkableFiles:
        """Those of all ranks that are on this host, once it is published."""
        return LinkableFiles(self.path, self._records_of_all, digests=self._snapshot.digests)

    def _conclude(self, report: Report) -> str | None:
        decision = self._group.gather_decide(report, self._manifest)
        if isinstance(decision, str):
            return decision
        manifest, files = decision
        publication = self._publication
        reason = self._group.gather_decide(self._send_copies(manifest, files), _joined)
        reason = reason or self._on_each_host(lambda: publication.publish(manifest))
        reason = reason or self._on_each_host(publication.hide_superseded)
        if reason is not None:
            if self._hosts.leads:
                publication.undo()
            return reason
        self._is_published = True
        self._records_of_all = manifest.files
        if self._hosts.leads:
            try:
                publication.remove_former()
            except OSError as error:
                logger.warning("the memory of the leg before is not freed: %s", error)
        return None

    def _manifest(self, reports: Sequence[Report]) -> tuple[Manifest, list[list[str]]] | str:
        """On rank 0: the manifest, and the names of each rank's files; or why the save has failed."""
        if reasons := self._reasons(reports):
            return "; ".join(reasons)
        try:
            return self._manifest_of([records for records, _ in reports]), [sorted(records) for records, _ in reports]
        except Exception as error:
            return described(error)

    def _send_copies(self, manifest: Manifest, files: Sequence[Sequence[str]]) -> str | None:
        """Send this rank's files to the hosts that keep copies, and receive those of others."""
        lower_thread_priority()  # this takes processor time, unlike a write to a disk
        transfers, progress = self._transfers(manifest, files), self._progress
        if not transfers:
            return None
        linked = self._group.gather_decide(self._linked(transfers), lambda of_ranks: set[Transfer]().union(*of_ranks))
        transfers = [each for each in transfers if each not in linked]
        self._bytes_to_move += sum(each.size for each in transfers if collectives.rank() in (each.source, each.target))
        try:
            return transfer(transfers, self._destination.partial, self._group, self._advance, progress.pause)
        finally:
            progress.pause()

    def _transfers(self, manifest: Manifest, files: Sequence[Sequence[str]]) -> list[Transfer]:
        """In an order in which hosts of even number send while the others receive, and the reverse."""
        hosts, transfers = self._hosts, []
        for distance in range(1, self._copies + 1):
            for source in sorted(range(len(files)), key=lambda rank: (hosts.of_rank[rank] % 2, rank)):
                host = hosts.of_rank[source]
                targets = hosts.ranks((host + distance) % hosts.count)
                target = targets[hosts.ranks(host).index(source) % len(targets)]
                for name in files[source]:
                    record = manifest.files[name]
                    transfers.append(Transfer(name, record.size, record.xxh3, source, target))
        return transfers

    def _linked(self, transfers: Sequence[Transfer]) -> set[Transfer]:
        """Those to this rank whose file is in the checkpoint before on its host, and now is in this one: as a link."""
        linked, former, directory = set[Transfer](), self._former, self._destination.partial
        if former is None:
            return linked
        for each in transfers:
            content = FileRecord(each.size, each.xxh3)
            if each.target == collectives.rank() and (source := former.path_of(content)) is not None:
                with contextlib.suppress(Exception):  # it is sent: the other ranks wait for this one
                    filesystem.mkdir_nosync((directory / each.name).parent)
                    UnchangedFile(each.name, content, source, former).write_to(directory, self._advance)
                    linked.add(each)
        return linked

    def _on_each_host(self, act: Callable[[], object]) -> str | None:
        """Run ``act`` on the lowest rank of each host; why it has failed on one."""
        failure = None
        if self._hosts.leads:
            try:
                act()
            except Exception as error:
                failure = described(error)
        return self._group.gather_decide(failure, _joined)


def _joined(failures: Sequence[str | None]) -> str | None:
    found = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure is not None]
    return "; ".join(found) or None
