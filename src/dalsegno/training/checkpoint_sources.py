"""CheckpointSources: where the checkpoints of a run are, in memory, on disk and at its URL; finds and loads them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from dalsegno.checkpoint import (
    SETTINGS,
    Checkpoint,
    CheckpointManager,
    LoadReport,
    MemoryCheckpoints,
    load_parts,
    load_weights,
    memory_dir,
    weights_are_at,
)
from dalsegno.checkpoint.checkpoint_dir import newest_step
from dalsegno.checkpoint.remote import mirror_of
from dalsegno.data import ResumableLoader
from dalsegno.data.loader import IMPORTED, ImportedPlace
from dalsegno.distributed import collectives
from dalsegno.distributed.rng import preserved_generators
from dalsegno.errors import ConfigurationError, DamagedCheckpoint, NotFound, expect_known
from dalsegno.logs import RunFile
from dalsegno.state import NO_REQUESTS, ControlRequests, SavedTrainerState
from dalsegno.stateful.schema import check
from dalsegno.system.lease import Lease
from dalsegno.system.lock import DirectoryLock

from .checkpoint_contents import PROGRESS, CheckpointContents, RecordedSettings
from .chosen_start import ChosenStart
from .run_parts import RunParts

logger = logging.getLogger("dalsegno")

_LEASE_LOST = ControlRequests(lease_lost=True)


class CheckpointSources:
    """The checkpoints under ``output_dir``, their copies at its URL, and the newest state in shared memory. Methods are
    collective. ``SaveCoordinator`` adds to them.

    A checkpoint in memory serves one purpose: a leg resumes from it if it is newer than every valid one on disk. A
    path, retention, a rollback and the best model select from those on disk only.
    """

    def __init__(
        self,
        parts: RunParts,
        contents: CheckpointContents,
        settings: RecordedSettings,
        run_file: RunFile,
        chosen: ChosenStart,
    ) -> None:
        args = parts.args
        self._parts = parts
        self._contents = contents
        self._settings = settings
        self._run_file = run_file
        self._chosen = chosen
        self._directory = args.directory
        self.manager = CheckpointManager(self._directory, keep=args.keeping, layout=parts.layout)
        self.memory = MemoryCheckpoints(self._directory, parts.layout)
        self.mirror = mirror_of(args.url, self._directory, args.keeping)
        self._has_url = args.url is not None
        self._lease: Lease | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Own the run's checkpoints while the context is open; closing waits for all saves and uploads."""
        try:
            self._lease = DirectoryLock.lease_of(self._directory)
            self.mirror.claim(take_over=self._parts.args.take_over_lock)
            if self._parts.args.save_frozen == "never":
                self.manager.leave_out_base(self._contents.sharded())
            yield
        finally:
            try:
                self.manager.settle()
            finally:
                self.mirror.end()

    def lease_loss(self) -> str | None:
        """Why this process must not write any more: another one has taken over the run. None if it may. Local."""
        return DirectoryLock.loss(self._directory) or self.mirror.loss()

    def poll(self) -> ControlRequests:
        """Request the leg's end once the lease is lost: a source for :class:`ControlSync`. Looks at the disk only if a
        renewal is overdue."""
        is_late = self._lease is not None and not self._lease.is_certain()
        is_lost = (is_late and self.lease_loss() is not None) or (self._has_url and self.mirror.loss() is not None)
        return _LEASE_LOST if is_lost else NO_REQUESTS

    def start_uploads(self, resumed_from: Path | None) -> None:
        """Copy to the URL what is published from now on, and ``resumed_from`` if it is this run's own."""
        step = self._parts.state.global_step
        is_own = resumed_from is not None and self.owns(resumed_from, step)
        keeps = is_own and not self._chosen.outdates_url()
        self.mirror.begin(step if keeps else None, self._chosen.settle)

    # -- find ---------------------------------------------------------------------------------------------------

    def newest(self, *, strict: bool) -> Checkpoint | None:
        """The newest checkpoint that verifies, in memory, here or at the URL; None if there is none at all.

        Raises DamagedCheckpoint if none verifies, or ``strict`` and the newest does not.
        """
        on_disk, step = self.manager.newest_published()
        oldest = collectives.from_rank_zero(partial(newest_step, self.manager.directory)) if strict else 0
        after = max(oldest - 1, -1 if on_disk is None else step)
        checkpoint = self._newest_in_memory(after) or self._newest_on_disk(oldest, strict=strict)
        if self._fetch_newer(None if checkpoint is None else checkpoint.step, strict=strict):
            self.memory.close(remove=True)
            checkpoint = self.manager.find(strict=strict)
        return checkpoint

    def _newest_on_disk(self, oldest: int, *, strict: bool) -> Checkpoint | None:
        """The newest that verifies; if the newest is damaged, one in memory comes before those that are older, and if
        there is none, the one at the URL, of step ``oldest`` or later."""
        try:
            return self.manager.find(strict=strict, elsewhere=self._newest_in_memory)
        except DamagedCheckpoint as error:
            if self._fetch_newer(oldest - 1, strict=strict):
                return self.manager.find(strict=strict)
            error.add_note("resume_from_checkpoint=False starts anew, and moves all of output_dir into rewound/")
            raise

    def _newest_in_memory(self, after: int) -> Checkpoint | None:
        return self.memory.find(collectives.from_rank_zero(self._memory_candidates), after=after)

    def _memory_candidates(self) -> dict[str, int | None]:
        """The directory of the last leg; and the checkpoint in memory that it resumed from, as long as it has none and
        is not rolled back. What a leg gave up may still be in the memory of a host that was away then."""
        last = self._run_file.last_leg()
        candidates: dict[str, int | None] = {}
        if last is None or last.reason == "aborted":
            return candidates
        if last.from_checkpoint is not None and not last.rollbacks:
            former = memory_dir.name_of(Path(last.from_checkpoint))
            if former is not None:
                candidates[former] = last.first_step
        if last.memory is not None:
            candidates[last.memory] = None
        return candidates

    def _fetch_newer(self, newest_here: int | None, *, strict: bool) -> bool:
        return not self._chosen.outdates_url() and self.mirror.fetch_newer(newest_here, strict=strict)

    def latest_on_disk(self, checkpoint: Checkpoint) -> tuple[Path | None, int]:
        """``checkpoint``, which this run owns, and its step; for one in memory, those of the newest before it on disk,
        None and 0 if there is none."""
        path = self.manager.path_of(checkpoint.step)
        if checkpoint.path.resolve() == path.resolve():
            return path, checkpoint.step
        return self.manager.newest_published(until=checkpoint.step)

    def newest_until(self, step: int) -> Checkpoint | None:
        """The newest checkpoint of ``step`` or before that verifies and has finite weights; None if there is none."""
        while step >= 0:
            try:
                checkpoint = self.manager.find(until=step)
            except DamagedCheckpoint as error:
                if collectives.rank() == 0:
                    logger.warning("%s", error)
                return None
            if checkpoint is None or checkpoint.manifest.finite:
                return checkpoint
            step = checkpoint.step - 1
        return None

    def verified(self, path: Path) -> Checkpoint:
        """The checkpoint at ``path``, of this run or another. Raises NotFound or DamagedCheckpoint, and
        ConfigurationError if ``path`` contains weights only."""
        if collectives.from_rank_zero((path / "run.json").is_file):
            raise ConfigurationError(
                f"resume_from_checkpoint={str(path)!r}: the folder of a run; pass one of its checkpoints, such as "
                f"{str(path / 'checkpoints' / 'step-00000500')!r}. To resume the run itself, set output_dir= to it"
            )
        if collectives.from_rank_zero(lambda: weights_are_at(path)):
            raise ConfigurationError(
                f"resume_from_checkpoint={str(path)!r}: contains weights only, so no run can resume from it; also pass "
                'load_components=("model",) to begin a new run with them'
            )
        return self._at(path)

    def _at(self, path: Path) -> Checkpoint:
        checkpoint = self.manager.find(path)
        assert checkpoint is not None, "with a path, find() returns a checkpoint or raises"
        return checkpoint

    def owns(self, path: Path, step: int) -> bool:
        """Whether ``path`` is where this run saves ``step``, on disk or in memory. Local."""
        return path.resolve() == self.manager.path_of(step).resolve() or self.memory.owns(path)

    def archive_after(self, step: int | None, into: Path) -> list[Path]:
        """Move the checkpoints later than ``step`` (None: all) into that folder; their new paths. Those in memory are
        removed."""
        self.memory.discard()
        return self.manager.archive_after(step, into)

    # -- load ---------------------------------------------------------------------------------------------------

    def load(self, checkpoint: Checkpoint, *, strict_callbacks: bool, allowed: Collection[str]) -> LoadReport:
        """Restore every state from ``checkpoint``, which is verified.

        Raises StateMismatch or DamagedCheckpoint, before anything is changed, if a saved state does not fit its object
        here, or a required one is missing. ``allowed``: changes since the save that do not raise.
        """
        _expect_whole_run(checkpoint)
        parts = self._parts
        imported = ImportedRun(parts.loader)
        adapt: dict[str, Callable[[Any], Any]] = {"trainer": partial(_at_step, checkpoint), "loader": imported.adapt}
        if "dataset" in allowed:
            adapt["loader"] = lambda state: parts.loader.adapt(imported.adapt(state))
        report = self.manager.load(
            checkpoint,
            self._contents.sharded(),
            self._contents.components(),
            strict_callbacks=strict_callbacks,
            settings=self._settings.before_load(),
            allowed=allowed,
            adapt=adapt,
        )
        if SETTINGS in report.fresh:
            report.notes.append("settings: not saved in this checkpoint, so nothing was compared")
        if not checkpoint.manifest.finite:
            report.notes.append(
                "model: its weights contain NaN or infinity; pass resume_from_checkpoint= an older checkpoint"
            )
        notes = imported.resume(parts)
        report.notes.extend(notes)
        if notes and parts.state.is_world_process_zero:
            logger.warning("the checkpoint is imported:\n  %s", "\n  ".join(notes))
        self._settings.apply_overrides(report)
        parts.state.num_input_tokens_seen = parts.metrics.tokens_seen()
        return report

    def component_load(self, path: Path, names: Collection[str], allowed: Collection[str]) -> Callable[[], LoadReport]:
        """Verify ``path``, and return a function that loads only these components from it into a new run. Raises
        UnknownName for a name that this run, or the checkpoint, does not have. Of the
        model, ``path`` may be safetensors."""
        contents = self._contents
        keys = {contents.key_of(name) for name in names}
        if collectives.from_rank_zero(lambda: Checkpoint.is_at(path)):
            checkpoint = self._at(path)
            saved = checkpoint.manifest.components.keys()
            sharded = [each for each in contents.sharded() if each.key in saved]
            components = [each for each in contents.loadable() if saved & {*each.keys}]
            found = [*(each.key for each in sharded), *(each.key for each in components)]
            expect_known(f"component in {path}:", keys, found)
            load: Callable[[], LoadReport] = partial(
                load_parts,
                checkpoint,
                [each for each in sharded if each.key in keys],
                [each for each in components if each.key in keys],
                layout=self._parts.layout,
                allowed=allowed,
            )
        else:
            expect_known(f"component in {path}:", keys, [contents.model.key])
            load = partial(load_weights, path, contents.model, allowed=allowed)

        def run() -> LoadReport:
            report = load()
            if "optimizer" in keys:
                self._settings.initial.restore_lrs()  # this run's own
            return report

        return run

    def load_best_model(self) -> None:
        """Load the best checkpoint's weights, if ``load_best_model_at_end`` is set and there is one."""
        args, best = self._parts.args, self._parts.state.best_model_checkpoint
        if not args.load_best_model_at_end or best is None:
            return
        try:
            checkpoint = self._at(args.directory / best)
        except (NotFound, DamagedCheckpoint) as error:
            raise type(error)(
                f"{error}; load_best_model_at_end=True needs it, the best checkpoint of this run: restore it, or train "
                "with load_best_model_at_end=False, which leaves the last weights in the model"
            ) from error
        load_parts(checkpoint, self._contents.evaluated())


def _expect_whole_run(checkpoint: Checkpoint) -> None:
    saved = checkpoint.manifest.components
    is_imported = "loader" in saved and saved["loader"].class_name == f"{IMPORTED}.loader"
    progress = ("trainer", "loader") if is_imported else PROGRESS
    if missing := [key for key in ("model", "optimizer", *progress) if key not in saved and key != SETTINGS]:
        raise DamagedCheckpoint(
            f"{checkpoint.path}: contains no state of {', '.join(missing)}, so no run can resume from it; "
            'train(…, load_components=("model",)) begins a new run with its weights'
        )


def _at_step(checkpoint: Checkpoint, state: SavedTrainerState) -> SavedTrainerState:
    if state["global_step"] != checkpoint.step:
        raise DamagedCheckpoint(
            f"{checkpoint.path}: trainer.global_step is {state['global_step']}; must be {checkpoint.step}, its step"
        )
    return state


class ImportedRun:
    """Moves the data to where the other program was, and compares the schedule with its.

    Does nothing after a checkpoint of this trainer's own.
    """

    def __init__(self, loader: ResumableLoader) -> None:
        self._loader = loader
        self._place: ImportedPlace | None = None

    def adapt(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state to load: for an imported one, the start of its epoch."""
        if state["kind"] != IMPORTED:
            return state
        check(state, ImportedPlace, "loader")
        self._place = ImportedPlace(**state)  # type: ignore[typeddict-item]
        return {**self._loader.state_dict(), "epoch": state["epoch"]}

    def resume(self, parts: RunParts) -> list[str]:
        """Skip the samples of the epoch that the other program has read, and count them; returns notes for the user.
        All ranks skip alike, and draw no random numbers."""
        if self._place is None:
            return []
        loader, place = self._loader, self._place
        whole, consumed = _samples_per_epoch(loader), _consumed(place, loader)
        with preserved_generators():
            loader.skip(consumed or 0)
        parts.state.epoch = loader.position
        if whole is not None and not parts.state.samples_seen:
            parts.state.samples_seen = place["epoch"] * whole + (consumed or 0)
        where = "the start (the position within it is unknown)" if consumed is None else f"sample {consumed:,}"
        data = f"loader: continues at {where} of epoch {place['epoch']}, in this run's own order of the samples"
        return [data, *(jump for each in parts.schedulers if (jump := _jump(each)) is not None)]


def _jump(scheduler: Any) -> str | None:
    """How the learning rate here differs from that of the other program, whose schedule is known by its values only."""
    if not isinstance(scheduler, LambdaLR):
        return None
    step, saved = scheduler.last_epoch, scheduler.get_last_lr()
    here = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=False)]
    if all(math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12) for one, other in zip(here, saved, strict=False)):
        return None
    return f"learning rate: was {float(saved[0]):g}, is {float(here[0]):g} in the schedule here, from the next step on"


def _consumed(place: ImportedPlace, loader: ResumableLoader) -> int | None:
    whole, batch = _samples_per_epoch(loader), loader.samples_per_microbatch()
    if place["fraction"] == 0:
        return 0
    if batch is None:
        return None
    if place["microbatches"] is not None:
        return place["microbatches"] * batch
    if place["fraction"] is None or whole is None:
        return None
    return min(whole, round(place["fraction"] * -(-whole // batch)) * batch)


def _samples_per_epoch(loader: ResumableLoader) -> int | None:
    """Number over all ranks; for a loader that knows only its length, that of whole micro-batches."""
    samples, count, each = loader.samples_per_epoch(), loader.microbatches_per_epoch(), loader.samples_per_microbatch()
    return samples if samples is not None or count is None or each is None else count * each
