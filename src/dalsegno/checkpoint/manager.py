"""Checkpoints of a run: save, find, load, delete. All ranks call every method, in the same order."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from dalsegno.checkpoint import checkpoint_dir, names
from dalsegno.checkpoint.async_save import AsyncSave, BufferPrefault, NewDirectory
from dalsegno.checkpoint.compatibility import Value
from dalsegno.checkpoint.contract import ShardedState
from dalsegno.checkpoint.export import PretrainedDirectory
from dalsegno.checkpoint.file_reading import share_of_rank
from dalsegno.checkpoint.file_writing import LinkableFiles
from dalsegno.checkpoint.frozen_checksums import FrozenChecksums
from dalsegno.checkpoint.listing import Summaries
from dalsegno.checkpoint.manifest import Checkpoint
from dalsegno.checkpoint.restore import LoadReport, restore
from dalsegno.checkpoint.sidecar import SavedState, SavedStates
from dalsegno.checkpoint.snapshot import Snapshotter
from dalsegno.distributed import collectives
from dalsegno.distributed.layout import Layout
from dalsegno.errors import ConfigurationError, DamagedCheckpoint
from dalsegno.policies.retention import Keep, steps_to_keep
from dalsegno.stateful.component import Component, State
from dalsegno.system import filesystem

logger = logging.getLogger("dalsegno")


class CheckpointManager:
    """The directory ``<output_dir>/checkpoints``. ``keep``: policy that :meth:`prune` applies; None keeps all
    checkpoints. ``layout``: which ranks read the same data; None: each its own. ``locate``: returns the path of the
    checkpoint of a step that is elsewhere; :meth:`find` then needs a path."""

    def __init__(
        self,
        output_dir: Path,
        *,
        keep: Keep | None = None,
        layout: Layout | None = None,
        locate: Callable[[int], Path] | None = None,
    ) -> None:
        self._layout = layout or Layout.flat()
        self.directory = Path(output_dir) / names.CHECKPOINTS
        self.path_of = locate or functools.partial(names.checkpoint_path, self.directory)
        """Path of the checkpoint of a step, whether it exists or not."""
        self.carried: Mapping[str, SavedState] = {}
        """States of the loaded checkpoint that no component claimed; they go into every later checkpoint."""
        self._keep = keep
        self._snapshotter = Snapshotter(self._layout)
        self._has_warned_nonfinite = False
        self._summaries = Summaries()
        self._trusted: Path | None = None  # the checkpoint that this process verified or wrote last
        self._former: LinkableFiles | None = None  # of a checkpoint on disk, which the next save may link
        self._unsettled: AsyncSave | None = None
        self._has_saved = False
        self._prefault: BufferPrefault | None = None

    @property
    def base(self) -> FrozenChecksums | None:
        """The frozen parameters of which only checksums are saved; None if all are saved."""
        return self._snapshotter.base

    def save(
        self,
        step: int,
        sharded: Sequence[ShardedState],
        components: Sequence[Component],
        *,
        metrics: Mapping[str, float] | None = None,
        is_best: bool = False,
    ) -> Path:
        """As :meth:`save_async`, but wait until the checkpoint is published. Raises SaveFailed on every rank if it is
        not."""
        save = self.save_async(step, sharded, components, metrics=metrics, is_best=is_best, background=False)
        save.join()
        if save.failure is not None:
            raise save.failure
        return save.path

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
        pretrained: Mapping[str, bytes] | None = None,
        published: Callable[[], object] | None = None,
        settled: Callable[[], object] | None = None,
    ) -> AsyncSave:
        """Capture every state and write it in the background, after the save before; then delete checkpoints that the
        policy does not keep. Raises ConfigurationError if there is a checkpoint of that step.

        Args:
            is_finite: whether this rank's weights are not known to contain NaN or infinity.
            background: return once the state is copied. False: return once the checkpoint is published or the save
                has failed; takes no memory for a copy.
            pretrained: on rank 0, files of :func:`~dalsegno.checkpoint.export.pretrained_files`, for a checkpoint that
                ``from_pretrained`` loads; None: for none.
            published, settled: called on rank 0, on another thread, after publication, and after the deletions.
        """
        self.settle()
        final = self.path_of(step)
        exists, is_nonfinite, has_no_former = collectives.all_reduce_max(
            [collectives.rank() == 0 and final.exists(), not is_finite, self._former is None], "where to save"
        )
        if exists:
            raise ConfigurationError(f"{final}: there is a checkpoint of this step already; it is not overwritten")
        if is_nonfinite and collectives.rank() == 0 and not self._has_warned_nonfinite:
            self._has_warned_nonfinite = True
            logger.warning(
                "step %d: the weights contain NaN or infinity; this checkpoint does not displace a finite one", step
            )
        if has_no_former:
            self._find_former()
        former = self._former if self._former is not None and self._former.are_beside(final.parent) else None
        snapshot = self._snapshotter.capture(sharded, components, self.carried, copy=background, former=former)
        self._has_saved = True

        def trust() -> None:
            self._trusted = final.resolve()
            if published is not None:
                published()

        def prune() -> None:
            try:
                self._delete_unkept()
            finally:
                if settled is not None:
                    settled()

        self._unsettled = save = AsyncSave(
            snapshot,
            NewDirectory(final) if pretrained is None else PretrainedDirectory(final, pretrained),
            step=step,
            is_best=is_best,
            metrics=metrics or {},
            is_finite=not is_nonfinite,
            published=trust,
            afterwards=prune,
        )
        return save

    def leave_out_base(self, sharded: Sequence[ShardedState]) -> None:
        """Save only checksums of the frozen parameters that keep their present values, which the user's script must
        rebuild: call before anything is loaded. They are compared when a checkpoint is loaded."""
        if self.base is None:
            self._snapshotter.base = collectives.run_on_all_ranks(lambda: FrozenChecksums(sharded))

    def prepare(self, sharded: Sequence[ShardedState]) -> None:
        """Allocate the buffers of the first save in the background, so that it takes no longer than the next one. Call
        once the optimizer has its state."""
        if not self._has_saved and self._prefault is None:
            if self._former is None:
                self._find_former()
            sizes = () if self._former is None else self._former.sizes
            self._prefault = BufferPrefault(self._snapshotter.prepare(sharded, sizes))

    def settle(self) -> None:
        """Wait for the background threads, before anything else touches buffers or directories."""
        if self._prefault is not None:
            self._prefault.stop()
        save, self._unsettled = self._unsettled, None
        if save is not None:
            save.join()
            if save.done and save.failure is None:
                self._former = save.files

    def amend(self, step: int, *, metrics: Mapping[str, float], is_best: bool) -> None:
        path = self.path_of(step)
        collectives.from_rank_zero(lambda: checkpoint_dir.amend(path, metrics, is_best))

    def check_serializable(self, sharded: Sequence[ShardedState], components: Sequence[Component]) -> None:
        """Capture every state as a save does, but write nothing, to find before training what cannot be saved."""
        self._snapshotter.check_serializable(sharded, components)

    def find(
        self,
        path: Path | None = None,
        *,
        strict: bool = False,
        until: int | None = None,
        elsewhere: Callable[[int], Checkpoint | None] | None = None,
    ) -> Checkpoint | None:
        """The newest checkpoint whose every byte matches its manifest, or None; each rank reads some of the files.
        With a ``path``, exactly that checkpoint, of this run or another.

        Newer, damaged checkpoints are renamed to ``step-….damaged``, each with a warning that names the damage. That
        happens once a valid one is found. If there is none, nothing is renamed, so that the next attempt finds the
        same and does not start at step 0; nor does it once only renamed ones are left: raises DamagedCheckpoint.

        Args:
            strict: raise if the newest checkpoint is damaged, and rename nothing.
            until: search only the checkpoints of this step or before.
            elsewhere: if the newest checkpoint here is damaged, returns a valid one from another place, of a step
                greater than the argument, or None. It comes before the older ones here. Collective.
        """
        self.settle()
        if path is not None:
            return self._verified(path)
        published = functools.partial(checkpoint_dir.published, self.directory, until=until)
        paths = [*collectives.from_rank_zero(published).values()]
        found, damaged = checkpoint_dir.first_valid(paths[:1] if strict else paths, self._verified)
        if strict and damaged:
            (error,) = damaged.values()
            raise DamagedCheckpoint(f"{error} (strict: no other checkpoint is used in its place)") from error
        if damaged and elsewhere is not None:
            found = elsewhere(-1 if found is None else found.step) or found
        if found is None and damaged:
            reasons = "".join(f"\n  {error}" for error in damaged.values())
            raise DamagedCheckpoint(f"{self.directory}: no checkpoint is valid:{reasons}")
        for other, error in damaged.items():
            collectives.from_rank_zero(functools.partial(checkpoint_dir.quarantine, other, error))
        if found is None and until is None:
            collectives.from_rank_zero(functools.partial(checkpoint_dir.expect_none_quarantined, self.directory))
        return found

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
        """Restore everything from a checkpoint that :meth:`find` returned.

        States that no component claims are kept, and go into every later checkpoint.

        Args:
            strict_callbacks: refuse a saved state without its callback, and a callback without a saved state.
            settings: the run's present settings, compared with those saved under that key.
            allowed: changes that are not refused: see :data:`dalsegno.checkpoint.compatibility.REFUSED`.
            adapt: by component key, a function applied to the saved state before it is loaded.
        """
        saved = SavedStates(checkpoint, self._layout)
        carried: dict[str, SavedState] = {}
        report = restore(
            saved,
            sharded,
            components,
            strict_callbacks=strict_callbacks,
            settings=settings or {},
            allowed=allowed,
            adapt=adapt,
            carried=carried,
        )
        self.carried = carried
        return report

    def newest_published(self, until: int | None = None) -> tuple[Path | None, int]:
        """The newest published checkpoint of step ``until`` (None: any) or before, verified or not, and its step; else
        None and 0."""
        published = functools.partial(checkpoint_dir.published, self.directory, until=until)
        return next(((path, step) for step, path in collectives.from_rank_zero(published).items()), (None, 0))

    def archive_after(self, step: int | None, into: Path) -> list[Path]:
        """Move the checkpoints later than ``step`` (None: all) to ``into``, newest first. Returns their new paths."""

        def move() -> list[Path]:
            paths = checkpoint_dir.published(self.directory, after=-1 if step is None else step).values()
            return [checkpoint_dir.archive(path, into) for path in paths]

        self.settle()
        return collectives.from_rank_zero(move)

    def prune(self) -> list[Path]:
        """Delete what the policy does not keep; never the newest, the last verified one, or foreign files. A checkpoint
        with a missing file or a file of another size stays and does not count. Returns the deleted checkpoints."""
        self.settle()
        return collectives.from_rank_zero(self._delete_unkept)

    def remove_partial(self) -> None:
        """Remove what an interrupted save or deletion left. Only the holder of the run's lock may call this."""

        def remove() -> None:
            for path in checkpoint_dir.partial(self.directory):
                filesystem.remove(path)

        collectives.from_rank_zero(remove)

    def _delete_unkept(self) -> list[Path]:
        if self._keep is None:
            return []
        entries = self._summaries.of(self.directory)
        kept = steps_to_keep(self._keep, entries)
        unkept = [self.path_of(entry.step) for entry in entries if entry.step not in kept]
        return [path for path in unkept if path.resolve() != self._trusted and checkpoint_dir.delete(path)]

    def _find_former(self) -> None:
        """For a leg that has neither verified nor written a checkpoint, as one that resumed from memory."""
        newest = collectives.from_rank_zero(functools.partial(LinkableFiles.of_newest, self.directory))
        self._former = self._former or newest

    def _verified(self, path: Path) -> Checkpoint:
        checkpoint = collectives.from_rank_zero(lambda: Checkpoint.open(path))
        mine = share_of_rank(checkpoint.manifest.files, collectives.rank(), collectives.world_size())
        collectives.run_on_all_ranks(lambda: checkpoint.verify(mine))
        self._trusted = path.resolve()
        if self._trusted == self.path_of(checkpoint.step).resolve():  # files elsewhere may be written in place
            self._former = LinkableFiles(path, checkpoint.manifest.files)
        return checkpoint
