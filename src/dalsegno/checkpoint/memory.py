"""MemoryCheckpoints: the newest state of a run in shared memory, which outlives its processes but not its host.

Each is a checkpoint as on disk: the same files, verified before use. There are two slots. A save copies the state into
the one that is not published, hashes it on a thread, publishes it by a rename, and hides the other. So a process that
is killed at any instant leaves one whole checkpoint, and the pages of both are used again.

No page of a former leg is written to: one of its processes may still live.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dalsegno.distributed import collectives
from dalsegno.distributed.layout import Layout
from dalsegno.errors import ConfigurationError, DamagedCheckpoint, RankFailed, StateMismatch
from dalsegno.stateful.component import Component
from dalsegno.system import filesystem
from dalsegno.system.byte_sizes import format_bytes

from .format import checkpoint_dir, memory_dir, names
from .format.keys import MODEL
from .format.manifest import Checkpoint, Manifest
from .format.memory_dir import MemoryDir
from .format.sidecar import SavedState
from .manager import CheckpointManager
from .save.async_save import AsyncSave, BufferPrefault
from .save.base import FrozenBase
from .save.resources import available_memory, free_disk
from .save.shared_files import SharedFiles
from .save.snapshot import Snapshotter
from .state.contract import ShardedState
from .state.first_step import tensors_per_parameter

logger = logging.getLogger("dalsegno")


@dataclass(slots=True)
class _Slot:
    """Files that a memory checkpoint is written to; hidden in ``hidden`` unless ``published`` is set."""

    hidden: Path
    snapshotter: Snapshotter
    published: Path | None = None


@dataclass(slots=True)
class _Publication:
    """The destination of a save: a slot that becomes the checkpoint ``path``, in place of the one before."""

    slot: _Slot
    path: Path
    others: Sequence[_Slot]
    former: Path | None
    partial: Path = field(init=False)

    def __post_init__(self) -> None:
        self.partial = self.slot.hidden

    def make_room(self, length: int) -> str | None:
        return None  # it is laid out

    def publish(self, manifest: Manifest) -> None:
        checkpoint_dir.publish(manifest, self.partial, self.path)
        moves = [(other.published, other.hidden) for other in self.others if other.published is not None]
        if self.former is not None:
            moves.append((self.former, self._aside))
        try:
            for published, hidden in moves:
                filesystem.rename(published, hidden)
        except BaseException:  # the save is reported as failed, and the next one writes to this slot
            for published, hidden in [*moves, (self.partial, self.path)]:
                with contextlib.suppress(OSError):  # raised if that did not move, or once it is back
                    filesystem.rename(hidden, published)
            raise

    def remove_former(self) -> None:
        """To be called after publication."""
        if self.former is not None:
            filesystem.remove(self._aside)

    @property
    def _aside(self) -> Path:
        return self.partial.with_name("former")

    def discard(self) -> None: ...  # the next save writes over it


class MemoryCheckpoints:
    """Memory checkpoints of the run in ``output_dir``. All ranks call every method but :meth:`close`.

    Args:
        output_dir: the run's directory.
        layout: which ranks read the same data.
    """

    def __init__(self, output_dir: Path, layout: Layout) -> None:
        self._output_dir = output_dir
        self._layout = layout
        self._directory: MemoryDir | None = None
        self._former: Path | None = None  # the checkpoint of a former leg that this one resumed from
        self._slots: list[_Slot] = []
        self._in_progress: tuple[AsyncSave, _Slot] | None = None
        self._prefault: BufferPrefault | None = None
        self._has_saved = False

    @property
    def name(self) -> str | None:
        """Name of the run's directory in shared memory; None if it has none."""
        return None if self._directory is None else self._directory.name

    def path_of(self, step: int) -> Path:
        """Path of that step's checkpoint in shared memory, published or not; the leg saves there."""
        assert self._directory is not None, "the leg saves in memory"
        return names.checkpoint_path(self._directory.checkpoints, step)

    # -- find -------------------------------------------------------------------------------------------------------

    def find(self, name: str | None, *, after: int) -> Checkpoint | None:
        """The newest valid checkpoint of a step greater than ``after`` in a directory; None if there is none.

        A damaged one is skipped with a warning.

        Args:
            name: of the directory, as the last leg recorded it.
            after: number of finished steps.
        """
        self._leave()
        directory = self._of_last_leg(name, after)
        if directory is None or not self._is_seen(directory):
            return None
        try:
            checkpoint = CheckpointManager(directory.path, layout=self._layout).find()
        except (DamagedCheckpoint, StateMismatch, OSError, RankFailed) as error:
            if collectives.rank() == 0:
                logger.warning("no memory checkpoint can be used: %s", error)
            return None
        if checkpoint is None or checkpoint.step <= after:
            return None
        self._directory, self._former = directory, checkpoint.path
        return checkpoint

    def _of_last_leg(self, name: str | None, after: int = -1) -> MemoryDir | None:
        """The directory ``name``, if it has a checkpoint of a step greater than ``after``; looked up by rank 0."""

        def look_up() -> MemoryDir | None:
            directory = None if name is None else memory_dir.find(name, self._output_dir)
            newest = None if directory is None else directory.newest_step
            return directory if newest is not None and newest > after else None

        return collectives.from_rank_zero(look_up)

    def owns(self, path: Path) -> bool:
        """Whether ``path`` is a memory checkpoint of the run."""
        directory = memory_dir.find(path.parent.parent.name, self._output_dir)
        return directory is not None and path.resolve().parent == directory.checkpoints.resolve()

    def discard(self, name: str | None) -> None:
        """Give up all memory checkpoints: the run goes back, or begins elsewhere.

        ``name``: of the directory of the last leg, whose checkpoints are given up too, if this one has not begun.
        """
        self.settle()
        former, self._former = self._former, None
        published = [(slot.published, slot.hidden) for slot in self._slots if slot.published is not None]
        for slot in self._slots:
            slot.published = None
        of_last_leg = self._of_last_leg(name) if self._directory is None else None

        def hide() -> None:
            for path, hidden in published:
                filesystem.rename(path, hidden)
            if former is not None:
                filesystem.remove(former)
            if of_last_leg is not None:
                memory_dir.remove(of_last_leg)

        collectives.from_rank_zero(hide)

    # -- a leg ------------------------------------------------------------------------------------------------------

    def begin_leg(self, sharded: Sequence[ShardedState], *, saving: bool, base: FrozenBase | None = None) -> None:
        """Remove what no leg resumes from any more; if ``saving``, create the slots.

        Args:
            sharded: model and optimizer.
            saving: whether this leg saves in memory.
            base: frozen parameters of which only checksums are saved.

        Raises:
            ConfigurationError: on all ranks, if the checkpoints do not fit into memory, or the ranks share none.
        """
        self._slots, self._has_saved = [], False
        directory, former = self._directory, self._former

        def tidy() -> MemoryDir | None:
            memory_dir.remove_others(self._output_dir, keep=directory)
            if directory is not None:
                for path in directory.checkpoints.iterdir():
                    if path != former:
                        filesystem.remove(path)
            return memory_dir.create(self._output_dir) if saving and directory is None else directory

        is_new = directory is None
        self._directory = directory = collectives.from_rank_zero(tidy)
        if not saving or directory is None:
            return
        try:
            self._create_slots(directory, sharded, base)
        except BaseException:
            self._slots = []
            if is_new:
                self.close(remove=True)
            raise

    def _create_slots(self, directory: MemoryDir, sharded: Sequence[ShardedState], base: FrozenBase | None) -> None:
        if not self._is_seen(directory):
            raise ConfigurationError(
                f"save_in_memory=: rank 0 has created {directory.path}, which other ranks do not see; all ranks must "
                "be on one host, in one container. Leave save_in_memory out"
            )
        token = collectives.broadcast(os.urandom(2).hex(), "names of memory slots")
        hidden = [directory.checkpoints / f"slot-{token}-{number}" for number in range(2)]

        def create() -> None:
            for path in hidden:
                filesystem.mkdir_nosync(path)

        collectives.from_rank_zero(create)
        self._slots = [_Slot(path, Snapshotter(self._layout, shared=SharedFiles(path))) for path in hidden]
        if base is not None:
            for slot in self._slots:
                slot.snapshotter.leave_out(base)
        self._check_room(sharded)

    def prepare(self, sharded: Sequence[ShardedState]) -> None:
        """Reserve the memory, and map it in the background. To be called once the optimizer has its state.

        Raises:
            ConfigurationError: on all ranks, if the checkpoints do not fit into memory.
        """
        if not self._slots or self._has_saved or self._prefault is not None:
            return
        slots = self._slots if self._former is None else self._slots[:1]  # the other one once that is not needed
        try:
            steps = [slot.snapshotter.prepare(sharded) for slot in slots]
        except (OSError, RankFailed) as error:
            raise self._does_not_fit(error) from error
        self._prefault = BufferPrefault(turn for each in steps for turn in each)

    def save(
        self,
        step: int,
        sharded: Sequence[ShardedState],
        components: Sequence[Component],
        carried: Mapping[str, SavedState],
        *,
        metrics: Mapping[str, float],
        is_finite: bool,
    ) -> None:
        """Copy every state into shared memory, and publish it in the background. A failure is logged.

        Skipped if the weights contain NaN or infinity.

        Args:
            step: finished steps.
            sharded: model and optimizer.
            components: everything else with a state.
            carried: states that no component claimed.
            metrics: of the evaluation at this step.
            is_finite: whether this rank's weights are not known to contain NaN or infinity.

        Raises:
            CannotSave: on every rank, if a state cannot be saved.
            SaveFailed: if the save before is stuck.
            ConfigurationError: on every rank, if the first one does not fit into memory.
        """
        self.settle()
        if not self._slots or collectives.all_reduce_max([not is_finite], "whether weights are finite")[0]:
            return
        slot = next(slot for slot in self._slots if slot.published is None)
        try:
            snapshot = slot.snapshotter.capture(sharded, components, carried, copy=True)
        except (OSError, RankFailed) as error:
            if not self._has_saved:
                raise self._does_not_fit(error) from error
            if collectives.rank() == 0:
                logger.warning("step %d: there is no room for a memory checkpoint: %s", step, error)
            return
        path = self.path_of(step)
        others = [each for each in self._slots if each is not slot]
        publication = _Publication(slot, path, others, self._former)
        save = AsyncSave(
            replace(snapshot, durables=()),  # what a process wrote outlives it without fsync
            publication,
            step=step,
            is_best=False,
            manifest_of=lambda records: snapshot.manifest(step, metrics, False, True, records),
            published=publication.remove_former,
            afterwards=int,
        )
        self._in_progress = save, slot

    def settle(self) -> None:
        """Wait for the save in progress, before the next one.

        Raises:
            SaveFailed: if that is stuck. It is cancelled.
        """
        if self._in_progress is not None:
            self._in_progress[0].wait()
        self._conclude()

    def _conclude(self) -> None:
        if self._prefault is not None:
            self._prefault.stop()
        if self._in_progress is None:
            return
        (save, saved_in), self._in_progress = self._in_progress, None
        save.join()
        if not save.done or save.failure is not None:
            if collectives.rank() == 0:
                logger.warning("memory checkpoint: %s", save.failure or f"{save.path.name} was not saved")
            return
        self._has_saved, self._former = True, None
        for slot in self._slots:
            slot.published = save.path if slot is saved_in else None

    def close(self, *, remove: bool) -> None:
        """At the end of a leg. Not collective: the other ranks may be gone.

        Args:
            remove: free the memory: the newest checkpoint on disk has all that these have.
        """
        self._conclude()
        directory = self._directory
        self._leave()
        if remove and directory is not None and collectives.rank() == 0:
            memory_dir.remove(directory)

    def _leave(self) -> None:
        self._directory = self._former = self._prefault = None
        self._slots = []

    def _is_seen(self, directory: MemoryDir) -> bool:
        """Whether all ranks see it."""
        is_hidden = memory_dir.find(directory.name, self._output_dir) is None
        return not collectives.all_reduce_max([is_hidden], "who sees memory checkpoints")[0]

    def _check_room(self, sharded: Sequence[ShardedState]) -> None:
        """Compute the size of the slots, before the first step has created the optimizer's state; log it on rank 0."""
        snapshotter = self._slots[0].snapshotter
        snapshotter.check_serializable(sharded, ())
        size, trained = snapshotter.planned_bytes(), snapshotter.planned_bytes_trained(MODEL)
        is_exact = True
        for each in sharded:
            if each.optimizer is not None and not each.optimizer.state:
                per_parameter = tensors_per_parameter(each.optimizer)
                is_exact = is_exact and per_parameter is not None
                size += trained * (per_parameter or 0)
        needed = 2 * sum(collectives.gather(size, "size of memory checkpoints"))
        directory = self._directory
        assert directory is not None, "there are slots"
        held = collectives.from_rank_zero(lambda: directory.size)  # by a former leg: the first save frees it
        free = collectives.from_rank_zero(lambda: free_disk(directory.path)) + held
        room = available_memory()
        share = held // collectives.world_size()
        left = collectives.gather(None if room is None else room + share - 2 * size, "room for memory checkpoints")
        about = "" if is_exact else ", and what the optimizer adds in the first step"
        text = f"two slots of {format_bytes(needed // 2)}{about}"
        shortest = min((each for each in left if each is not None), default=0)
        if needed > free or shortest < 0:
            have = free if needed > free else needed + shortest
            raise ConfigurationError(
                f"save_in_memory=: memory checkpoints take {text}, and {format_bytes(max(0, have))} are free "
                f"{f'in {directory.path.parent.parent}' if needed > free else 'in memory'}; leave save_in_memory out, "
                "or train on a host with more memory"
            )
        if collectives.rank() == 0:
            logger.info("memory checkpoints: %s in %s, where %s are free", text, directory.path, format_bytes(free))

    def _does_not_fit(self, error: Exception) -> ConfigurationError:
        place = memory_dir.root().parent
        return ConfigurationError(
            f"save_in_memory=: the memory checkpoints do not fit into {place}: {error}; leave save_in_memory out, or "
            f"give {place} more room"
        )
