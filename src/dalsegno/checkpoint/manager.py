"""The checkpoints of a run: save, find, load, keep. All ranks call every method, in the same order."""

from __future__ import annotations

import functools
import heapq
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError, DamagedCheckpoint
from dalsegno.policies.retention import Entry, Keep, staying
from dalsegno.stateful.component import Component, State
from dalsegno.system import filesystem

from . import checkpoint_dir
from .compatibility import Value
from .format.manifest import Checkpoint, FileRecord
from .format.sidecar import SavedState
from .listing import CheckpointStatus, list_checkpoints
from .load.restore import restore
from .load.states import LoadReport, SavedStates, unclaimed_states
from .save.async_save import AsyncSave, BufferPrefault
from .save.saving import Snapshotter, manifest_of
from .state.sharded import ShardedState

logger = logging.getLogger("dalsegno")


class CheckpointManager:
    """Everything under ``<output_dir>/checkpoints``.

    Args:
        output_dir: the run's directory.
        keep: which checkpoints :meth:`prune` leaves; None leaves all.
    """

    def __init__(self, output_dir: Path, *, keep: Keep | None = None) -> None:
        self.directory = Path(output_dir) / "checkpoints"
        self._keep = keep
        self._stage = Snapshotter()
        self._carried: Mapping[str, SavedState] = {}
        self._has_said_broken = False
        self._trusted: Path | None = None  # verified, or written, by this process last
        self._flight: AsyncSave | None = None  # the newest
        self._preparation: BufferPrefault | None = None

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of that step is, or would be."""
        return checkpoint_dir.path_of(self.directory, step)

    def save(
        self,
        step: int,
        sharded: Sequence[ShardedState],
        components: Sequence[Component],
        *,
        metrics: Mapping[str, float] | None = None,
        is_best: bool = False,
    ) -> Path:
        """As :meth:`launch`, and wait until it is published.

        Returns:
            The checkpoint's directory.

        Raises:
            CannotSave: on every rank, if a state holds what cannot be saved.
            SaveFailed: on every rank, if it did not get to the disk. No half checkpoint stays.
            ConfigurationError: if there is a checkpoint of that step.
        """
        flight = self.save_async(step, sharded, components, metrics=metrics, is_best=is_best, background=False)
        flight.join()
        if flight.failure is not None:
            raise flight.failure
        return flight.path

    def save_async(
        self,
        step: int,
        sharded: Sequence[ShardedState],
        components: Sequence[Component],
        *,
        metrics: Mapping[str, float] | None = None,
        is_best: bool = False,
        is_finite: bool = True,
        background: bool = True,
        published: Callable[[], object] = int,
        settled: Callable[[], object] = int,
    ) -> AsyncSave:
        """Take every state, and send it on its way to the disk; what the policy does not keep is deleted afterwards.

        One save at a time is on its way: this waits for the one before.

        Args:
            step: finished steps; there must be no checkpoint of that step yet.
            sharded: model and optimizer.
            components: everything else that has a state.
            metrics: of the last evaluation, for policies and people.
            is_best: whether no earlier checkpoint was better.
            is_finite: whether the weights are not known to hold NaN or infinity on this rank.
            background: go on as soon as the state is copied. False: when it is published, or has failed; that takes no
                memory for a copy.
            published: called on rank 0, on another thread, once it is published.
            settled: the same, once what is not kept has been deleted too.

        Raises:
            CannotSave: on every rank, if a state holds what cannot be saved.
            ConfigurationError: if there is a checkpoint of that step.
        """
        self.settle()
        final = self.path_of(step)
        is_there, is_broken = collectives.all_reduce_max(
            [collectives.rank() == 0 and final.exists(), not is_finite], "where to save"
        )
        if is_there:
            raise ConfigurationError(f"{final}: there is a checkpoint of this step already; it is not overwritten")
        if is_broken and collectives.rank() == 0 and not self._has_said_broken:
            self._has_said_broken = True
            logger.warning(
                "step %d: NaN or infinity is in the weights; no good checkpoint is deleted for one of these", step
            )
        captured = self._stage.capture(sharded, components, self._carried, copy=background)

        def publish() -> None:
            self._trusted = final.resolve()
            published()

        def thin_out() -> None:
            try:
                self._delete_what_is_not_kept()
            finally:
                settled()

        self._flight = AsyncSave(
            captured,
            final,
            step=step,
            is_best=is_best,
            manifest_of=functools.partial(manifest_of, step, captured, metrics or {}, is_best, not is_broken),
            published=publish,
            afterwards=thin_out,
        )
        return self._flight

    def prepare(self, sharded: Sequence[ShardedState]) -> None:
        """Make room in memory for the first save, on another thread, so that it takes no longer than the next.

        To be called once the optimizer has its state. Collective.
        """
        if self._flight is None and self._preparation is None:
            self._preparation = BufferPrefault(self._stage.prepare(sharded))

    def settle(self) -> None:
        """Wait until no thread of a save is at work any more: before anything else touches memory or folders."""
        if self._preparation is not None:
            self._preparation.stop()
        if self._flight is not None:
            self._flight.join()

    def amend(self, step: int, *, metrics: Mapping[str, float], is_best: bool) -> None:
        """Note in the manifest of that step's checkpoint what an evaluation has said of it since it was published."""
        path = self.path_of(step)
        collectives.from_rank_zero(lambda: checkpoint_dir.amend(path, metrics, is_best))

    def check_serializable(self, sharded: Sequence[ShardedState], components: Sequence[Component]) -> None:
        """Take every state as a save does, and write nothing: what cannot be saved is better known before hours of
        training. Collective.

        Args:
            sharded: model and optimizer.
            components: everything else that has a state.

        Raises:
            CannotSave: on every rank, if a state holds what cannot be saved, or the ranks hold different tensors.
        """
        self._stage.rehearse(sharded, components)

    def find(self, path: Path | None = None, *, strict: bool = False) -> Checkpoint | None:
        """The newest checkpoint whose every byte is what its manifest says; the ranks share the reading, file by file.

        If newer ones are damaged, they are renamed to ``step-….damaged``, with a warning that says what is wrong with
        each. That happens once a good one is found: where there is none, nothing is moved, so that the next attempt
        finds what this one did, and does not begin at step 0. With a ``path``, exactly that checkpoint, of this run or
        another.

        Args:
            path: of the checkpoint that is wanted.
            strict: if the newest one is damaged, that is an error, and nothing is moved.

        Returns:
            None if no ``path`` is given and there is no checkpoint.

        Raises:
            NotFound: if there is no ``path``.
            DamagedCheckpoint: if the one at ``path`` is, or all are.
            OSError: if one cannot be read, which is no damage: nothing is moved.
        """
        self.settle()
        if path is not None:
            return self._verified(path)
        damaged: dict[Path, DamagedCheckpoint] = {}
        for candidate in collectives.from_rank_zero(functools.partial(checkpoint_dir.newest_first, self.directory)):
            try:
                found = self._verified(candidate)
            except DamagedCheckpoint as error:
                if strict:
                    raise DamagedCheckpoint(f"{error} (strict: no other checkpoint is used in its place)") from error
                damaged[candidate] = error
            else:
                for other, reason in damaged.items():
                    collectives.from_rank_zero(functools.partial(checkpoint_dir.quarantine, other, reason))
                return found
        if damaged:
            reasons = "".join(f"\n  {error}" for error in damaged.values())
            raise DamagedCheckpoint(f"{self.directory}: no checkpoint is whole:{reasons}")
        return None

    def load(
        self,
        checkpoint: Checkpoint,
        sharded: Sequence[ShardedState],
        components: Sequence[Component],
        *,
        strict_callbacks: bool = False,
        settings: Mapping[str, Value] | None = None,
        allowed: Collection[str] = (),
        adapt: Mapping[str, Callable[[State], State]] | None = None,
    ) -> LoadReport:
        """Restore everything from a checkpoint that :meth:`find` gave.

        States that no component takes are kept, and go into every checkpoint from now on.

        Args:
            checkpoint: where from.
            sharded: model and optimizer.
            components: everything else that has a state.
            strict_callbacks: refuse a state that finds no callback, and a callback that finds no state.
            settings: what the run is trained with now, to be compared with what is saved under that key.
            allowed: which changes are not refused: see :data:`dalsegno.checkpoint.compatibility.REFUSED`.
            adapt: by a component's key, a function that its saved state goes through before it is loaded.

        Raises:
            StateMismatch: before anything is changed, if a state does not fit what it is for.
            DamagedCheckpoint: if a file holds what dalsegno cannot have written.
        """
        saved = SavedStates(checkpoint)
        report = restore(
            saved,
            sharded,
            components,
            strict_callbacks=strict_callbacks,
            settings=settings or {},
            allowed=allowed,
            adapt=adapt or {},
        )
        self._carried = unclaimed_states(saved, components, report)
        return report

    def entries(self) -> list[Entry]:
        """All that are whole at a glance, oldest first, as policies see them. Others are left out, with a warning."""
        return collectives.from_rank_zero(self._entries)

    def archive_after(self, step: int | None, into: Path) -> list[Path]:
        """Move the checkpoints later than ``step`` (None: all) to ``into``, newest first: their timeline is left.

        Returns:
            Where they are now.
        """

        def move() -> list[Path]:
            moved = []
            for path in checkpoint_dir.newest_first(self.directory, after=-1 if step is None else step):
                filesystem.make_directory(into)
                target = into / path.name
                if target.exists():
                    target = filesystem.numbered(into, path.name)
                filesystem.rename(path, target)
                filesystem.fsync_directory(self.directory)
                moved.append(target)
            return moved

        self.settle()
        return collectives.from_rank_zero(move)

    def prune(self) -> list[Path]:
        """Delete what the policy does not keep; never the newest, the last verified one, or files that are not ours.

        One that is damaged at a glance (a file is missing, or has another size) stays, and does not count: another one
        is kept in its place.

        Returns:
            The deleted checkpoints.
        """
        self.settle()
        return collectives.from_rank_zero(self._delete_what_is_not_kept)

    def remove_partial(self) -> None:
        """Remove what an interrupted save or deletion has left. Only the process that owns the run may call this."""

        def remove() -> None:
            for path in checkpoint_dir.partial(self.directory):
                filesystem.remove(path)

        collectives.from_rank_zero(remove)

    def _entries(self) -> list[Entry]:
        entries = []
        for found in list_checkpoints(self.directory) if checkpoint_dir.newest_first(self.directory) else []:
            if found.entry is not None:
                entries.append(found.entry)
            elif found.condition in (CheckpointStatus.DAMAGED, CheckpointStatus.UNREADABLE, CheckpointStatus.NEWER):
                logger.warning("%s is left out: %s", found.path.name, found.problem)
        return entries

    def _delete_what_is_not_kept(self) -> list[Path]:
        if self._keep is None:
            return []
        entries = self._entries()
        kept = staying(self._keep, entries)
        doomed = [self.path_of(entry.step) for entry in entries if entry.step not in kept]
        return [path for path in doomed if path.resolve() != self._trusted and checkpoint_dir.delete(path)]

    def _verified(self, path: Path) -> Checkpoint:
        checkpoint = collectives.from_rank_zero(lambda: checkpoint_dir.opened(path))
        collectives.run_on_all_ranks(lambda: checkpoint.verify(_share(checkpoint.manifest.files)))
        self._trusted = path.resolve()
        return checkpoint


def _share(sizes: Mapping[str, FileRecord]) -> list[str]:
    """The files that this rank reads: each, from the largest on, goes to the rank that has the least to read so far.

    A checksum is one of a whole file. So where a few ranks have saved and more load, some of them have nothing to read.
    """
    loads = [(0, rank) for rank in range(collectives.world_size())]
    mine = []
    for name in sorted(sizes, key=lambda name: -sizes[name].size):
        load, rank = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[name].size, rank))
        if rank == collectives.rank():
            mine.append(name)
    return mine
