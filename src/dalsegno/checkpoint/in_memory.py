"""MemoryCheckpoints: the newest state of a run in shared memory, which outlives its processes.

Each is a checkpoint as on disk: the same files, verified before use. Every host has the files of its own ranks and, if
copies are kept, those of its neighbours, so that the run can also resume from memory after a host is lost.

There are two slots. A save copies the state into the one that is not published. Then, on a thread of each rank::

    each rank hashes its files               rank 0: build the manifest, which every rank receives
    each host sends its files on             to the hosts that keep copies and lack them; these verify them
    each host publishes the slot             by a rename, once all copies are whole
    each host hides the other slot           once all hosts have published

So processes that are killed at any instant leave one whole checkpoint, and the pages of both slots are used again. No
page of a former leg is written to: one of its processes may still live. A file of frozen parameters that are proved to
be unchanged is one file in both slots, a hard link, and is not sent again. Such a file is not written to either: what
has changed goes into a new one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dalsegno.checkpoint import checkpoint_dir, memory_dir, names
from dalsegno.checkpoint.async_save import AsyncSave, BufferPrefault, NewDirectory, Records, Report, described
from dalsegno.checkpoint.contract import ShardedState
from dalsegno.checkpoint.file_reading import share_of_rank, verify_files
from dalsegno.checkpoint.file_writing import Advance, LinkableFiles, UnchangedFile
from dalsegno.checkpoint.frozen_checksums import FrozenChecksums
from dalsegno.checkpoint.manifest import Checkpoint, Manifest
from dalsegno.checkpoint.memory_dir import MemoryDir
from dalsegno.checkpoint.names import MODEL
from dalsegno.checkpoint.optimizer_state import tensors_per_parameter
from dalsegno.checkpoint.sidecar import SavedState
from dalsegno.checkpoint.snapshot import Snapshotter
from dalsegno.checkpoint.staging import NoRoom, Slot
from dalsegno.distributed import collectives
from dalsegno.distributed.hosts import Hosts, Transfer, transfer
from dalsegno.distributed.layout import Layout
from dalsegno.errors import ConfigurationError, DamagedCheckpoint, RankFailed, StateMismatch
from dalsegno.stateful.component import Component
from dalsegno.system import filesystem
from dalsegno.system.machine import available_memory, free_disk, lower_thread_priority
from dalsegno.system.progress import format_bytes

logger = logging.getLogger("dalsegno")


class MemoryCheckpoints:
    """Memory checkpoints of the run in ``output_dir``. All ranks call every method but :meth:`close`."""

    def __init__(self, output_dir: Path, layout: Layout) -> None:
        self._output_dir = output_dir
        self._layout = layout
        self._copies = 0
        self._former: MultiHostCheckpoint | None = None  # of a former leg, from which this one resumed
        self._forget_leg()

    def _forget_leg(self) -> None:
        self._directory: MemoryDir | None = None  # of this leg, on this host
        self._slots: tuple[Slot, ...] = ()  # the one that is written next, and the one of the newest checkpoint
        self._published: Path | None = None  # the newest checkpoint of this leg
        self._shareable: LinkableFiles | None = None  # of the newest checkpoint on this host
        self._captured: Callable[[], AsyncSave] | None = None  # starts a save
        self._in_progress: AsyncSave | None = None
        self._prefault: BufferPrefault | None = None
        self._has_saved = False
        self.room: str | None = None
        """In words: size and place of this leg's checkpoints on this host, and the memory free there; None without."""

    @property
    def name(self) -> str | None:
        return None if self._directory is None else self._directory.name

    def path_of(self, step: int) -> Path:
        """Path of that step's checkpoint in shared memory, published or not; the leg saves there."""
        assert self._directory is not None, "the leg saves in memory"
        return names.checkpoint_path(self._directory.checkpoints, step)

    @functools.cached_property
    def _hosts(self) -> Hosts:
        return Hosts.sharing(memory_dir.place())  # not asked for by a run that saves nothing in memory

    # -- what former legs have left --------------------------------------------------------------------------------

    def find(self, candidates: Mapping[str, int | None], *, after: int) -> Checkpoint | None:
        """The newest valid checkpoint of a step greater than ``after``, of which each file is on some host; None if
        there is none. Every host then has a directory for it, with all but the tensors that it may not need. One that
        is damaged, or not whole, is skipped with a warning.

        ``candidates``: names of directories that may contain it, each with its step; None: any step.
        """
        self._former = None
        of_hosts = self._hosts.run(lambda: _published(self._output_dir, candidates, after)) if candidates else []
        for found in sorted({*itertools.chain(*of_hosts)}, reverse=True):
            try:
                self._former = _assembled(self._output_dir, found, self._hosts, found in of_hosts[self._hosts.here])
                break
            except (ConfigurationError, StateMismatch, OSError, RankFailed) as error:
                if collectives.rank() == 0:
                    logger.warning("no memory checkpoint can be used: %s", error)
        return self._former

    def owns(self, path: Path) -> bool:
        return memory_dir.containing(path, self._output_dir) is not None

    def discard(self) -> None:
        """Give up all memory checkpoints, of former legs too: the run goes back, or begins elsewhere."""
        self.settle()
        self._captured = self._former = None
        published, self._published = self._published, None
        if published is not None and self._shareable is not None:
            self._shareable.directory = self._slots[1].directory

        def hide() -> None:
            if published is not None:
                filesystem.rename(published, self._slots[1].directory)
            memory_dir.remove_others(self._output_dir, keep=self._own_directories())

        self._hosts.run(hide)

    def _own_directories(self) -> list[MemoryDir]:
        """On this host, those of this leg, and of the checkpoint that it resumed from."""
        former = None if self._former is None else memory_dir.containing(self._former.path, self._output_dir)
        return [each for each in (self._directory, former) if each is not None]

    # -- before the first save -------------------------------------------------------------------------------------

    def begin_leg(
        self, sharded: Sequence[ShardedState], *, saving: bool, copies: int = 0, base: FrozenChecksums | None = None
    ) -> None:
        """Remove what no leg resumes from any more; if ``saving``, create the slots. Raises ConfigurationError on all
        ranks if the checkpoints do not fit into the memory of a host. ``copies``: number of other hosts that keep each
        host's files. ``base``: frozen parameters of which only checksums are saved."""
        former = self._former
        self._forget_leg()
        if not saving and former is None:
            if collectives.local_rank() == 0:
                with contextlib.suppress(OSError):  # the other ranks do not wait for this
                    memory_dir.remove_others(self._output_dir)
            return
        hosts = self._hosts
        self._shareable = None if former is None else LinkableFiles(former.path, former.files_here)
        name = collectives.broadcast(os.urandom(8).hex(), "name of memory checkpoints")
        slots = [f"slot-{name[:4]}-{number}" for number in range(2)]
        self._copies = min(copies, hosts.count - 1)
        if saving and self._copies < copies and collectives.rank() == 0:
            found = f"{hosts.count} hosts: only {self._copies} are" if self._copies else "one host: nothing is"
            logger.warning("save_in_memory=: copies=%d, and the ranks are on %s copied", copies, found)

        def tidy() -> None:
            memory_dir.remove_others(self._output_dir, keep=self._own_directories())
            for path in set() if former is None else {*former.path.parent.iterdir()} - {former.path}:
                filesystem.remove(path)
            if saving:
                created = memory_dir.create(self._output_dir, name)
                for slot in slots:
                    filesystem.mkdir_nosync(created.checkpoints / slot)

        def seen() -> MemoryDir:
            directory = memory_dir.find(name)
            if directory is None or not directory.is_of(self._output_dir):
                raise ConfigurationError(
                    f"save_in_memory=: rank {collectives.rank()} does not see {memory_dir.root() / name}, which the "
                    "lowest rank of its host has created; run all ranks of a host as the same user"
                )
            return directory

        try:
            hosts.run(tidy)
            if not saving:
                return
            self._directory = collectives.run_on_all_ranks(seen)
            self._slots = tuple(Slot(self._directory.checkpoints / slot) for slot in slots)
            self._snapshotter = Snapshotter(self._layout, base)
            self._snapshotter.check_serializable(sharded, ())
            self.room = self._check_room(sharded, self._directory)
            if collectives.rank() == 0:
                logger.info("memory checkpoints: %s", self.room)
        except BaseException:
            if hosts.leads:
                filesystem.remove(memory_dir.root() / name)
            self._forget_leg()
            raise

    def prepare(self, sharded: Sequence[ShardedState]) -> None:
        """Reserve the memory and map it in the background, once the optimizer has its state. Refuses as
        :meth:`begin_leg`."""
        if self._directory is None or self._has_saved or self._prefault is not None:
            return
        first, second = self._slots
        linked: Collection[int] = () if self._shareable is None else self._shareable.sizes
        try:
            steps = [self._snapshotter.prepare(sharded, linked, first)]
            if self._former is None:  # otherwise once that is not needed any more
                linked = {file.layout.length for file in self._snapshotter.plan.files}
                steps.append(self._snapshotter.prepare(sharded, linked, second))
        except NoRoom as error:
            raise _does_not_fit(error) from error
        self._check_room(sharded, self._directory)
        self._prefault = BufferPrefault(itertools.chain(*steps))

    def _check_room(self, sharded: Sequence[ShardedState], directory: MemoryDir) -> str:
        """Compare two slots, which share files of frozen parameters, with the memory that is free, or that the first
        save frees; also before the first step has created the optimizer's state. Returns both in words."""
        hosts, planned = self._hosts, self._snapshotter.plan.files
        frozen = sum(file.layout.length for file in planned if file.is_frozen)
        changing = [file for file in planned if not file.is_frozen]
        trained = sum(file.layout.length for file in changing if file.component == MODEL)
        optimizers = [each.optimizer for each in sharded if each.optimizer is not None]
        to_come = [tensors_per_parameter(each) for each in optimizers if not each.state]
        size = sum(file.layout.length for file in changing) + trained * sum(each or 0 for each in to_come)
        own = np.zeros((hosts.count, 2), np.int64)  # of a slot, and of what both share
        np.add.at(own, [*hosts.of_rank], collectives.gather((size, frozen), "size of memory checkpoints"))
        held = np.sum([np.roll(own, distance, axis=0) for distance in range(self._copies + 1)], axis=0)
        needed = (held @ (2, 1)).tolist()
        freed, memory = memory_dir.size_of(self._own_directories()), available_memory()
        on_disk = free_disk(directory.path) + freed
        rooms = [(on_disk, str(memory_dir.root().parent))]
        if memory is not None:
            rooms.append((len(hosts.ranks(hosts.here)) * memory + freed, "memory"))
        free, where = min(rooms)
        of_ranks = collectives.gather((free - needed[hosts.here], where), "room for memory checkpoints")
        left, where = min(of_ranks)
        host = hosts.of_rank[of_ranks.index((left, where))] if left < 0 else hosts.here
        slot, shared = held[host].tolist()
        text = f"{format_bytes(shared)} of frozen parameters, and " if shared else ""
        text += f"two slots of {format_bytes(slot)}"
        text += ", and what the optimizer adds in the first step" if None in to_come else ""
        if self._copies:
            of_its_own = format_bytes(int(own[host] @ (2, 1)))
            text += f" ({of_its_own} of its own, the rest copies of other hosts' parts)"
        if left < 0:
            where += f" of the host of rank {hosts.ranks(host)[0]}" if hosts.count > 1 else ""
            raise ConfigurationError(
                f"save_in_memory=: memory checkpoints take {text}, and {format_bytes(max(0, needed[host] + left))} are "
                f"free in {where}; leave save_in_memory out, or train on a host with more memory"
            )
        return f"{text} in {directory.path}, where {format_bytes(on_disk)} are free"

    # -- saves -----------------------------------------------------------------------------------------------------

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
        :meth:`CheckpointManager.save_async`. Skipped if the weights contain NaN or infinity, and with a warning if
        there is no room; raises ConfigurationError on every rank if not even the first fits, and the leg resumed from
        none."""
        self.settle()
        self._captured = None
        if not self._slots or collectives.all_reduce_max([not is_finite], "whether weights are finite")[0]:
            return
        try:
            snapshot = self._snapshotter.capture(
                sharded, components, carried, copy=True, former=self._shareable, slot=self._slots[0]
            )
        except NoRoom as error:
            if not self._has_saved and self._former is None:
                raise _does_not_fit(error) from error
            if collectives.rank() == 0:
                logger.warning("step %d: there is no room for a memory checkpoint: %s", step, error)
            return
        if snapshot.copying is not None:
            snapshot.copying.run()
        publication = MemoryPublication(self.path_of(step), self)
        self._captured = functools.partial(AsyncSave, snapshot, publication, step=step, metrics=metrics)

    def publish(self) -> None:
        """Start to publish what was captured, if anything, in the background. A failure is logged."""
        if self._captured is not None:
            self._in_progress = self._captured()
            self._captured = None

    def drop(self) -> None:
        self._captured = None

    def settle(self) -> None:
        """Wait for the save in progress, before the next one. Raises SaveFailed if it is stuck, and cancels it."""
        if self._in_progress is not None:
            self._in_progress.wait()
        self._conclude()

    def _conclude(self) -> None:
        if self._prefault is not None:
            self._prefault.stop()
        save, self._in_progress = self._in_progress, None
        if save is None:
            return
        save.join()
        if save.done and save.failure is None:
            self._has_saved, self._former, self._shareable = True, None, save.files
            self._slots, self._published = self._slots[::-1], save.path
        elif collectives.rank() == 0:
            logger.warning("memory checkpoint: %s", save.failure or f"{save.path.name} was not saved")

    def close(self, *, remove: bool) -> None:
        """At the end of a leg. Not collective: the other ranks may be gone. ``remove``: free the memory: the newest
        checkpoint on disk has all that these have."""
        self._conclude()
        directories = self._own_directories()
        self._former = None
        self._forget_leg()
        if remove and directories and self._hosts.leads:
            for directory in directories:
                memory_dir.remove(directory)


def _does_not_fit(error: Exception) -> ConfigurationError:
    place = memory_dir.root().parent
    return ConfigurationError(
        f"save_in_memory=: the memory checkpoints do not fit into {place}: {error}; leave save_in_memory out, or "
        f"give {place} more room"
    )


# --- on several hosts -----------------------------------------------------------------------------------------------
# A host may have its own ranks' files, copies of another host's, or none, if it replaces one that was lost. A directory
# belongs to one leg. So what a host that comes back has kept of a dead timeline is found by no later leg.


@dataclass(frozen=True, slots=True)
class MultiHostCheckpoint(Checkpoint):
    """A checkpoint in directories of that ``path`` on each host, which together contain all files.

    Attributes:
        hosts: which ranks share each directory.
        held: by host, the files that its directory contains, verified. Files that are fetched are added.
    """

    hosts: Hosts
    held: Sequence[set[str]]

    @property
    def files_here(self) -> Records:
        return {name: self.manifest.files[name] for name in self.held[self.hosts.here]}

    def is_here(self, name: str) -> bool:
        return name in self.held[self.hosts.here]

    def require(self, names: Collection[str]) -> None:
        """Fetch those of the files ``names`` that this host lacks into its directory. Raises on every rank if one
        fails."""
        if self.hosts.count == 1:
            return
        wanted = collectives.gather({*names} & self.manifest.files.keys(), "files of other hosts")
        transfers = self.transfers(self.hosts.joined(wanted))
        if transfers and collectives.rank() == 0:
            size = format_bytes(sum(each.size for each in transfers))
            logger.info("%s: fetching %d files, %s, from other hosts", self.path.name, len(transfers), size)
        failure = transfer(transfers, self.path, collectives.background_group())

        def expect_all() -> None:
            if failure is not None:
                raise OSError(f"{self.path}: a file could not be fetched from another host: {failure}")

        collectives.run_on_all_ranks(expect_all)
        for each in transfers:
            self.held[self.hosts.of_rank[each.target]].add(each.name)

    def transfers(self, wanted: Sequence[Collection[str]]) -> list[Transfer]:
        """Those that bring each host the files it wants and lacks, from the nearest host before it that has the file,
        spread over the ranks of both; in an order in which hosts of even number send while the others receive, and the
        reverse."""
        hosts, found = self.hosts, list[tuple[tuple[int, int], Transfer]]()
        for host, names_wanted in enumerate(wanted):
            targets = hosts.ranks(host)
            for number, name in enumerate(sorted({*names_wanted} - self.held[host])):
                distance = next(each for each in range(1, hosts.count) if name in self.held[host - each])
                source_host = (host - distance) % hosts.count
                sources, record = hosts.ranks(source_host), self.manifest.files[name]
                source, target = sources[number % len(sources)], targets[number % len(targets)]
                found.append(((distance, source_host % 2), Transfer(name, record.size, record.xxh3, source, target)))
        return [each for _, each in sorted(found, key=lambda each: each[0])]


Published = tuple[int, str, bytes]
"""Step, name of the directory, and manifest. Only parts with equal manifests, which are of the same save, are put
together."""


def _published(output_dir: Path, candidates: Mapping[str, int | None], after: int) -> list[Published]:
    found = []
    for name, only in candidates.items():
        directory = memory_dir.find(name)
        there = {} if directory is None else checkpoint_dir.published(directory.checkpoints, after)
        if there and directory is not None and not directory.is_of(output_dir):
            logger.warning(
                "%s is a copy of the run in %s, whose memory checkpoint of step %d stays with that run: resume there "
                "to use it",
                *(output_dir, directory.output_dir, max(there)),
            )
            continue
        for step, path in there.items():
            if only in (None, step):
                with contextlib.suppress(OSError):
                    found.append((step, name, (path / names.MANIFEST).read_bytes()))
    return found


def _assembled(output_dir: Path, found: Published, hosts: Hosts, is_here: bool) -> MultiHostCheckpoint:
    """Raises on every rank, if a file is damaged or on no host, or a host has no room for what it needs."""
    step, name, content = found
    manifest = Manifest.parse(content, Path(name))
    path = names.checkpoint_path(memory_dir.root() / name / names.CHECKPOINTS, step)
    of_ranks = collectives.gather(_problems(path, manifest, hosts) if is_here else {}, "files in memory")
    held = hosts.joined([[name for name in each if each[name] is None] for each in of_ranks])
    if missing := sorted(manifest.files.keys() - set[str]().union(*held)):
        problem = next((problem for each in of_ranks for problem in each.values() if problem is not None), None)
        raise DamagedCheckpoint(
            problem or f"step {step}: {missing[0]} was in the memory of a lost host; no other host has a copy"
        )

    def create() -> None:
        memory_dir.create(output_dir, name)
        filesystem.remove(path)
        filesystem.mkdir_nosync(path)
        filesystem.write_durably(path / names.MANIFEST, content)

    hosts.run(lambda: None if is_here else create())
    checkpoint = MultiHostCheckpoint(path, manifest, hosts, held)
    checkpoint.require([name for name in manifest.files if "/" not in name or name.endswith(".json")])
    return checkpoint


def _problems(path: Path, manifest: Manifest, hosts: Hosts) -> dict[str, str | None]:
    """This rank's share of the files in the directory, each with why it is not valid; None if it is."""
    here = {name: record for name, record in manifest.files.items() if (path / name).exists()}
    problems: dict[str, str | None] = {}
    for name in share_of_rank(here, hosts.position, len(hosts.ranks(hosts.here))):
        try:
            verify_files(path, [name], here[name])
            problems[name] = None
        except OSError as error:
            problems[name] = str(error)
    return problems


class MemoryPublication(NewDirectory):
    """The destination of a save of ``leg`` on one host: the slot ``partial``, which becomes the checkpoint ``path``. It
    supersedes the newest one of this leg, which is hidden, and that of a former leg."""

    def __init__(self, path: Path, leg: MemoryCheckpoints) -> None:
        self.path = path
        self.partial, self._hidden = (slot.directory for slot in leg._slots)
        self._superseded = leg._published
        self._former = leg._former
        self._shareable = leg._shareable
        self._hosts, self._copies = leg._hosts, leg._copies

    def make_room(self, length: int) -> str | None:
        return None  # it is laid out

    def discard(self) -> None: ...  # the next save writes over it

    def conclude(self, save: AsyncSave, report: Report) -> str | None:
        manifest = save.group.gather_decide(report, save.manifest)
        if isinstance(manifest, str):
            return manifest
        reason = save.group.gather_decide(self._send_copies(save, manifest), _joined)
        for act in (functools.partial(self.publish, manifest, save.advance), self._hide_superseded):
            reason = reason or self._on_each_host(save, act)
        if reason is not None:
            if self._hosts.leads:
                self._undo()
            return reason
        save.is_published, save.records = True, manifest.files
        try:
            if self._hosts.leads and self._former is not None:
                filesystem.remove(self._former.path.parent.parent)
        except OSError as error:
            logger.warning("the memory of the leg before is not freed: %s", error)
        return None

    def publish(self, manifest: Manifest, advance: Advance) -> None:
        """As on disk, after the removal of files that only an earlier checkpoint in this slot had."""
        for path in [path for path in self.partial.rglob("*") if path.is_file()]:
            if path.relative_to(self.partial).as_posix() not in manifest.files:
                filesystem.remove(path)
        # some directories are in another host's memory alone
        checkpoint_dir.publish(manifest, self.partial, self.path, is_whole=False)

    def _hide_superseded(self) -> None:
        if self._superseded is not None:
            filesystem.rename(self._superseded, self._hidden)  # the next save writes to its files

    def _undo(self) -> None:
        """The save is reported as failed, and the next one writes to this slot."""
        for renamed, back in ((self._hidden, self._superseded), (self.path, self.partial)):
            if back is not None:
                with contextlib.suppress(OSError):  # raised if that did not move, or once it is back
                    filesystem.rename(renamed, back)

    def _send_copies(self, save: AsyncSave, manifest: Manifest) -> str | None:
        """Send this host's files to the hosts that keep copies, and receive those of others, unless they are in the
        checkpoint before there; why that has failed."""
        lower_thread_priority()  # this takes processor time, unlike a write to a disk
        hosts = self._hosts
        if not self._copies:
            return None
        held = save.group.gather_decide([*save.records], hosts.joined)
        wanted = [
            {name for distance in range(1, self._copies + 1) for name in held[host - distance]}
            for host in range(hosts.count)
        ]
        linked = self._linked(save, wanted[hosts.here], manifest.files) if hosts.leads else []
        for of_host, names_here in zip(held, save.group.gather_decide(linked, hosts.joined), strict=True):
            of_host |= names_here
        transfers = MultiHostCheckpoint(self.partial, manifest, hosts, held).transfers(wanted)
        save.bytes_to_move += sum(each.size for each in transfers if collectives.rank() in (each.source, each.target))
        try:
            return transfer(transfers, self.partial, save.group, save.advance, save.progress.pause)
        finally:
            save.progress.pause()

    def _linked(self, save: AsyncSave, wanted: Collection[str], records: Records) -> list[str]:
        """Those whose content is in the checkpoint before on this host, and now is in this one: as a link."""
        linked = []
        former = self._shareable
        for name in wanted:
            if former is not None and (source := former.path_of(records[name])) is not None:
                with contextlib.suppress(Exception):  # it is sent: the other ranks wait for this one
                    filesystem.mkdir_nosync((self.partial / name).parent)
                    UnchangedFile(name, records[name], source, former).write_to(self.partial, save.advance)
                    linked.append(name)
        return linked

    def _on_each_host(self, save: AsyncSave, act: Callable[[], object]) -> str | None:
        failure = None
        if self._hosts.leads:
            try:
                act()
            except Exception as error:
                failure = described(error)
        return save.group.gather_decide(failure, _joined)


def _joined(failures: Sequence[str | None]) -> str | None:
    found = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure is not None]
    return "; ".join(found) or None
