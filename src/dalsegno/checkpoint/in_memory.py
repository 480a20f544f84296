"""MemoryCheckpoints: the newest state of a run in shared memory, which outlives its processes.

Each is a checkpoint as on disk: the same files, verified before use. Every host has the files of its own ranks and, if
copies are kept, those of its neighbours, so that the run can also resume from memory after a host is lost.

There are two slots. A save copies the state into the one that is not published, hashes it on a thread, sends the
copies, publishes it by a rename, and hides the other. So processes that are killed at any instant leave one whole
checkpoint, and the pages of both are used again. No page of a former leg is written to: one of its processes may still
live.

A file of frozen parameters that are proved to be unchanged is one file in both slots, a hard link, and is not sent
again. Such a file is not written to either: what has changed goes into a new one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dalsegno.checkpoint import memory_dir, names
from dalsegno.checkpoint.async_save import BufferPrefault
from dalsegno.checkpoint.capture import FrozenChecksums
from dalsegno.checkpoint.contract import ShardedState
from dalsegno.checkpoint.free_space import available_memory, free_disk
from dalsegno.checkpoint.manifest import Checkpoint
from dalsegno.checkpoint.memory_dir import MemoryDir
from dalsegno.checkpoint.memory_save import MemoryPublication, MemorySave
from dalsegno.checkpoint.multi_host import Candidates, MultiHostCheckpoint, newest_in_memory
from dalsegno.checkpoint.names import MODEL
from dalsegno.checkpoint.optimizer_state import tensors_per_parameter
from dalsegno.checkpoint.sidecar import SavedState
from dalsegno.checkpoint.snapshot import Snapshotter
from dalsegno.checkpoint.staging import NoRoom, SharedFiles
from dalsegno.checkpoint.unchanged_files import LinkableFiles
from dalsegno.distributed import collectives
from dalsegno.distributed.hosts import Hosts
from dalsegno.distributed.layout import Layout
from dalsegno.errors import ConfigurationError
from dalsegno.stateful.component import Component
from dalsegno.system import filesystem
from dalsegno.system.progress import format_bytes

logger = logging.getLogger("dalsegno")


@dataclass(slots=True)
class _Slot:
    """Files that a memory checkpoint is written to; hidden in ``hidden`` unless ``published`` is set."""

    hidden: Path
    snapshotter: Snapshotter
    published: Path | None = None


class MemoryCheckpoints:
    """Memory checkpoints of the run in ``output_dir``. All ranks call every method but :meth:`close`.

    Args:
        output_dir: the run's directory.
        layout: which ranks read the same data.
    """

    def __init__(self, output_dir: Path, layout: Layout) -> None:
        self._output_dir = output_dir
        self._layout = layout
        self._hosts: Hosts | None = None
        self._copies = 0
        self._directory: MemoryDir | None = None  # of this leg, on this host
        self._former: MultiHostCheckpoint | None = None  # of a former leg, from which this one resumed
        self._shareable: LinkableFiles | None = None  # of the newest checkpoint on this host
        self._slots: list[_Slot] = []
        self._captured: tuple[_Slot, Callable[[], MemorySave]] | None = None  # and not yet started
        self._in_progress: tuple[_Slot, MemorySave] | None = None
        self._prefault: BufferPrefault | None = None
        self._has_saved = False
        self.room: str | None = None
        """In words: size and place of this leg's checkpoints on this host, and the memory free there; None without."""

    @property
    def name(self) -> str | None:
        """Name of the leg's directory in the shared memory of each host; None if it has none."""
        return None if self._directory is None else self._directory.name

    def path_of(self, step: int) -> Path:
        """Path of that step's checkpoint in shared memory, published or not; the leg saves there."""
        assert self._directory is not None, "the leg saves in memory"
        return names.checkpoint_path(self._directory.checkpoints, step)

    # -- find -------------------------------------------------------------------------------------------------------

    def find(self, candidates: Candidates, *, after: int) -> Checkpoint | None:
        """The newest valid checkpoint of a step greater than ``after`` in the directories ``candidates``, of which each
        file is on some host; None if there is none. One that is damaged, or not whole, is skipped with a warning."""
        self._leave()
        if not candidates:
            return None
        self._former = newest_in_memory(self._output_dir, candidates, after=after, hosts=self._known_hosts())
        return self._former

    def owns(self, path: Path) -> bool:
        """Whether ``path`` is a memory checkpoint of the run."""
        directory = memory_dir.of_checkpoint(path, self._output_dir)
        return directory is not None and path.resolve().parent == directory.checkpoints.resolve()

    def discard(self) -> None:
        """Give up all memory checkpoints, of former legs too: the run goes back, or begins elsewhere."""
        self.settle()
        self._captured = self._former = None
        published = [(slot.published, slot.hidden) for slot in self._slots if slot.published is not None]
        self._slots.sort(key=lambda slot: slot.published is not None)  # files to be shared are not written over first
        for slot in self._slots:
            if slot.published is not None and self._shareable is not None:
                self._shareable = self._shareable.moved_to(slot.hidden)
            slot.published = None

        def hide() -> None:
            for path, hidden in published:
                filesystem.rename(path, hidden)
            memory_dir.remove_others(self._output_dir, keep=self._own_directories())

        self._known_hosts().run(hide)

    def _known_hosts(self) -> Hosts:
        if self._hosts is None:
            self._hosts = Hosts.sharing(memory_dir.place())
        return self._hosts

    def _own_directories(self) -> list[MemoryDir]:
        """On this host, those of this leg, and of the checkpoint that it resumed from."""
        former = None if self._former is None else memory_dir.of_checkpoint(self._former.path, self._output_dir)
        return [each for each in (self._directory, former) if each is not None]

    # -- a leg ------------------------------------------------------------------------------------------------------

    def begin_leg(
        self, sharded: Sequence[ShardedState], *, saving: bool, copies: int = 0, base: FrozenChecksums | None = None
    ) -> None:
        """Remove what no leg resumes from any more; if ``saving``, create the slots. Raises ConfigurationError on all
        ranks if the checkpoints do not fit into the memory of a host.

        Args:
            sharded: model and optimizer.
            saving: whether this leg saves in memory.
            copies: number of other hosts that keep each host's files.
            base: frozen parameters of which only checksums are saved.
        """
        self._slots, self._captured, self._directory, self._has_saved, self.room = [], None, None, False, None
        former, hosts = self._former, self._known_hosts()
        self._shareable = None if former is None else LinkableFiles(former.path, former.here)
        name = collectives.broadcast(memory_dir.new_name(), "name of memory checkpoints")

        def tidy() -> None:
            kept = self._own_directories()
            memory_dir.remove_others(self._output_dir, keep=kept)
            if former is not None:
                for path in [path for path in former.path.parent.iterdir() if path != former.path]:
                    filesystem.remove(path)
            if saving:
                memory_dir.create(self._output_dir, name)

        hosts.run(tidy)
        if not saving:
            return
        self._copies = min(copies, hosts.count - 1)
        if self._copies < copies and collectives.rank() == 0:
            logger.warning(
                "save_in_memory=: copies=%d, and the ranks are on %s: %s copied",
                copies,
                "one host" if hosts.count == 1 else f"{hosts.count} hosts",
                "nothing is" if hosts.count == 1 else f"only {self._copies} are",
            )
        try:
            self._directory = collectives.run_on_all_ranks(lambda: self._seen(name))
            self._create_slots(self._directory, hosts, base)
            self._slots[0].snapshotter.check_serializable(sharded, ())
            self.room = self._check_room(sharded, self._directory)
            if collectives.rank() == 0:
                logger.info("memory checkpoints: %s", self.room)
        except BaseException:
            self._slots = []
            if self._directory is not None and hosts.leads:
                memory_dir.remove(self._directory)
            self._directory = None
            raise

    def _seen(self, name: str) -> MemoryDir:
        directory = memory_dir.find(name, self._output_dir)
        if directory is None:
            raise ConfigurationError(
                f"save_in_memory=: rank {collectives.rank()} does not see {memory_dir.root() / name}, which the lowest "
                "rank of its host has created; run all ranks of a host as the same user"
            )
        return directory

    def _create_slots(self, directory: MemoryDir, hosts: Hosts, base: FrozenChecksums | None) -> None:
        token = collectives.broadcast(os.urandom(2).hex(), "names of memory slots")
        hidden = [directory.checkpoints / f"slot-{token}-{number}" for number in range(2)]

        def create() -> None:
            for path in hidden:
                filesystem.mkdir_nosync(path)

        hosts.run(create)
        for path in hidden:
            snapshotter = Snapshotter(self._layout, shared=SharedFiles(path))
            if base is not None:
                snapshotter.leave_out(base)
            self._slots.append(_Slot(path, snapshotter))

    def _check_room(self, sharded: Sequence[ShardedState], directory: MemoryDir) -> str:
        freed = memory_dir.size_of(self._own_directories())
        snapshotter, hosts = self._slots[0].snapshotter, self._known_hosts()
        return _check_room(snapshotter, sharded, directory.path, hosts, copies=self._copies, freed=freed)

    def prepare(self, sharded: Sequence[ShardedState]) -> None:
        """Reserve the memory and map it in the background. To be called once the optimizer has its state. Raises
        ConfigurationError on all ranks if the checkpoints do not fit into memory."""
        if self._directory is None or self._has_saved or self._prefault is not None:
            return
        first, second = (slot.snapshotter for slot in self._slots)
        try:
            steps = [first.prepare(sharded, () if self._shareable is None else self._shareable.sizes)]
            if self._former is None:  # otherwise once that is not needed any more
                steps.append(second.prepare(sharded, {file.layout.length for file in first.planned}))
        except NoRoom as error:
            raise self._does_not_fit(error) from error
        self._check_room(sharded, self._directory)
        self._prefault = BufferPrefault(turn for each in steps for turn in each)

    def capture(
        self,
        step: int,
        sharded: Sequence[ShardedState],
        components: Sequence[Component],
        carried: Mapping[str, SavedState],
        *,
        metrics: Mapping[str, float],
        is_finite: bool,
    ) -> None:
        """Copy every state into shared memory, in place of what was captured before and not published; arguments as of
        :meth:`CheckpointManager.save_async`.

        Skipped if the weights contain NaN or infinity, and with a warning if there is no room.

        Raises:
            CannotSave: on every rank, if a state cannot be saved.
            SaveFailed: if the save before is stuck.
            ConfigurationError: on every rank, if the first one does not fit into memory, and the leg resumed from none.
        """
        self.settle()
        self._captured = None
        if not self._slots or collectives.all_reduce_max([not is_finite], "whether weights are finite")[0]:
            return
        slot = next(slot for slot in self._slots if slot.published is None)
        try:
            snapshot = slot.snapshotter.capture(sharded, components, carried, copy=True, former=self._shareable)
        except NoRoom as error:
            if not self._has_saved and self._former is None:
                raise self._does_not_fit(error) from error
            if collectives.rank() == 0:
                logger.warning("step %d: there is no room for a memory checkpoint: %s", step, error)
            return
        if snapshot.copying is not None:
            snapshot.copying.run()
        superseded = [
            (each.published, each.hidden) for each in self._slots if each is not slot and each.published is not None
        ]
        former = None if self._former is None else self._former.path.parent.parent
        publication = MemoryPublication(slot.hidden, self.path_of(step), superseded, former)

        def start() -> MemorySave:
            return MemorySave(
                replace(snapshot, durables=()),  # what a process wrote outlives it without fsync
                publication,
                self._known_hosts(),
                copies=self._copies,
                former=self._shareable,
                step=step,
                manifest_of=lambda records: snapshot.manifest(step, metrics, False, True, records),
            )

        self._captured = slot, start

    def publish(self) -> None:
        """Start to publish what was captured, if anything, in the background. A failure is logged."""
        if self._captured is not None:
            (slot, start), self._captured = self._captured, None
            self._in_progress = slot, start()

    def drop(self) -> None:
        """Forget what was captured and not published."""
        self._captured = None

    def settle(self) -> None:
        """Wait for the save in progress, before the next one. Raises SaveFailed if it is stuck, and cancels it."""
        if self._in_progress is not None:
            self._in_progress[1].wait()
        self._conclude()

    def _conclude(self) -> None:
        if self._prefault is not None:
            self._prefault.stop()
        if self._in_progress is None:
            return
        (saved_in, save), self._in_progress = self._in_progress, None
        save.join()
        if not save.done or save.failure is not None:
            if collectives.rank() == 0:
                logger.warning("memory checkpoint: %s", save.failure or f"{save.path.name} was not saved")
            return
        self._has_saved, self._former, self._shareable = True, None, save.files
        for slot in self._slots:
            slot.published = save.path if slot is saved_in else None

    def close(self, *, remove: bool) -> None:
        """At the end of a leg. Not collective: the other ranks may be gone.

        Args:
            remove: free the memory: the newest checkpoint on disk has all that these have.
        """
        self._conclude()
        directories = self._own_directories()
        leads = self._hosts is not None and self._hosts.leads
        self._leave()
        if remove and leads:
            for directory in directories:
                memory_dir.remove(directory)

    def _leave(self) -> None:
        self._directory = self._former = self._shareable = self._prefault = self._captured = None
        self._slots = []

    def _does_not_fit(self, error: Exception) -> ConfigurationError:
        place = memory_dir.root().parent
        return ConfigurationError(
            f"save_in_memory=: the memory checkpoints do not fit into {place}: {error}; leave save_in_memory out, or "
            f"give {place} more room"
        )


def _check_room(
    snapshotter: Snapshotter,
    sharded: Sequence[ShardedState],
    directory: Path,
    hosts: Hosts,
    *,
    copies: int,
    freed: int,
) -> str:
    """Compare two slots, which share files of frozen parameters, with the memory that is free; also before the first
    step has created the optimizer's state. Returns both in words; raises ConfigurationError on all ranks if the slots
    do not fit into the memory of a host.

    Args:
        snapshotter: of one slot; has planned the files.
        directory: of this run in shared memory.
        copies: number of other hosts that keep each host's files.
        freed: bytes on this host that the first save frees.
    """
    size = frozen = trained = 0
    for file in snapshotter.planned:
        if file.is_frozen:
            frozen += file.layout.length
        else:
            size += file.layout.length
            trained += file.layout.length if file.component == MODEL else 0
    is_exact = True
    for each in sharded:
        if each.optimizer is not None and not each.optimizer.state:
            per_parameter = tensors_per_parameter(each.optimizer)
            is_exact = is_exact and per_parameter is not None
            size += trained * (per_parameter or 0)
    sizes = collectives.gather((size, frozen), "size of memory checkpoints")
    own, slots = _by_host([size for size, _ in sizes], hosts, copies)
    own_shared, shared = _by_host([frozen for _, frozen in sizes], hosts, copies)
    totals = [2 * of_slot + once for of_slot, once in zip(slots, shared, strict=True)]
    needed, ranks_here = totals[hosts.here], len(hosts.ranks(hosts.here))
    free, room = free_disk(directory) + freed, available_memory()
    left = free - needed if room is None else min(free - needed, ranks_here * room + freed - needed)
    is_disk = left == free - needed
    of_ranks = collectives.gather((left, is_disk), "room for memory checkpoints")
    about = "" if is_exact else ", and what the optimizer adds in the first step"
    shortest, is_disk = min(of_ranks)
    host = hosts.of_rank[of_ranks.index((shortest, is_disk))] if shortest < 0 else hosts.here
    text = f"{format_bytes(shared[host])} of frozen parameters, and " if shared[host] else ""
    text += f"two slots of {format_bytes(slots[host])}{about}"
    if copies:
        of_its_own = 2 * own[host] + own_shared[host]
        text += f" ({format_bytes(of_its_own)} of its own, the rest copies of other hosts' parts)"
    if shortest < 0:
        place = directory.parent.parent if is_disk else "memory"
        where = f" of the host of rank {hosts.ranks(host)[0]}" if hosts.count > 1 else ""
        raise ConfigurationError(
            f"save_in_memory=: memory checkpoints take {text}, and {format_bytes(max(0, totals[host] + shortest))} "
            f"are free in {place}{where}; leave save_in_memory out, or train on a host with more memory"
        )
    return f"{text} in {directory}, where {format_bytes(free)} are free"


def _by_host(sizes: Sequence[int], hosts: Hosts, copies: int) -> tuple[list[int], list[int]]:
    """Bytes of its own ranks' files that each host keeps, and of these with the copies; ``sizes``: by rank."""
    own = [sum(sizes[rank] for rank in hosts.ranks(host)) for host in range(hosts.count)]
    return own, [sum(own[host - distance] for distance in range(copies + 1)) for host in range(hosts.count)]
