"""Where a leg begins: which checkpoint it goes on from, and everything brought to where that one was taken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dalsegno.checkpoint import (
    CALLBACKS,
    SETTINGS,
    Checkpoint,
    CheckpointManager,
    LoadReport,
    ModelState,
    ShardedState,
    load_parts,
    load_weights,
    weights_are_at,
)
from dalsegno.checkpoint.load.compatibility import check_allowed
from dalsegno.checkpoint.remote import Mirror
from dalsegno.data import ResumableLoader
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError, DamagedCheckpoint, NotFound, UnknownName
from dalsegno.events.dispatcher import Dispatcher
from dalsegno.state import SavedTrainerState, TrainerState
from dalsegno.stateful.component import Component
from dalsegno.system import archive

from .settings import RecordedSettings
from .step_boundary import StepBoundary

logger = logging.getLogger("dalsegno")

_OF_THE_COURSE = ("trainer", "clock", "loader", "rng", "meter", SETTINGS)
"""Components that say where a run stands: a new one does not begin there."""


@dataclass(frozen=True, slots=True)
class ResumeOptions:
    """How a leg is to begin: what ``Trainer.train`` and ``dalsegno.Run`` are told about it."""

    origin: bool | str | Path = True
    """True: the newest checkpoint, if there is one. A path: that one. False: none, whatever there is."""
    strict: bool = False
    """A damaged checkpoint is an error, where else an older one would be used."""
    strict_callbacks: bool = False
    """A callback's state that finds no callback, or a callback that finds no state, is an error."""
    allow_changes: Collection[str] = ()
    """What may differ from the checkpoint although its state belongs to it: names from ``changes.REFUSED``."""

    load_components: Collection[str] = ()
    """Only these, from the path, into a new run that begins at step 0."""
    continue_stopped: bool = False
    """Go on with a run that a callback has judged to be over."""

    @property
    def chooses(self) -> bool:
        """Whether the user says where to begin, in place of going on from wherever the run is."""
        return self.origin is not True and not self.load_components

    def __post_init__(self) -> None:
        if not isinstance(self.origin, (bool, str, Path)):
            raise ConfigurationError(
                f"resume_from_checkpoint={self.origin!r}; give True (from the newest checkpoint, if any), False "
                "(start anew) or a checkpoint's path"
            )
        object.__setattr__(self, "allow_changes", check_allowed(self.allow_changes))
        names = [self.load_components] if isinstance(self.load_components, str) else list(self.load_components)
        object.__setattr__(self, "load_components", names)
        if names and isinstance(self.origin, bool):
            raise ConfigurationError(
                f"load_components={names}: say from where: resume_from_checkpoint= a checkpoint, or a folder of "
                f"safetensors; it is {self.origin}"
            )


class Resumer:
    """Chooses the checkpoint that a leg goes on from, and loads it."""

    def __init__(
        self,
        manager: CheckpointManager,
        mirror: Mirror,
        output_dir: Path,
        *,
        on: Dispatcher,
        state: TrainerState,
        boundary: StepBoundary,
        settings: RecordedSettings,
        feed: ResumableLoader,
    ) -> None:
        self._manager = manager
        self._mirror = mirror
        self._output_dir = output_dir
        self._on = on
        self._state = state
        self._boundary = boundary
        self._settings = settings
        self._feed = feed

    def select_checkpoint(self, resume: ResumeOptions, *, has_trained: bool) -> Checkpoint | None:
        """The verified checkpoint that the leg goes on from; None: it begins at step 0. Fires on_before_load.

        With parts to load, a checkpoint of this run's own all the same, if there is one: the run has begun with them.

        Args:
            resume: what the user asks for.
            has_trained: whether the model in memory is another one than at the beginning.

        Raises:
            NotFound: if there is no checkpoint at the path.
            DamagedCheckpoint: if the one at the path is damaged, or there is none that is whole.
            ConfigurationError: if the leg would begin at step 0, but the model is trained already.
        """
        checkpoint = self._requested_checkpoint(resume, has_trained)
        if self._on.before_load and (checkpoint is not None or not resume.load_components):
            self._on.before_load.fill(*((checkpoint.path, checkpoint.step) if checkpoint else (None, 0)))
            self._on.before_load.fire()
        return checkpoint

    def load(
        self,
        checkpoint: Checkpoint,
        resume: ResumeOptions,
        sharded: Sequence[ShardedState],
        components: Sequence[Component],
    ) -> None:
        """Restore everything, and leave the timeline that lies beyond. Fires on_load.

        Raises:
            StateMismatch: before anything is changed, if what was saved does not fit what is here.
        """
        _expect_all_of_a_run(checkpoint)
        adapt: dict[str, Callable[[Any], Any]] = {"trainer": partial(_at_step, checkpoint)}
        if "dataset" in resume.allow_changes:
            adapt["loader"] = self._feed.adapt
        report = self._manager.load(
            checkpoint,
            sharded,
            components,
            strict_callbacks=resume.strict_callbacks,
            settings=self._settings.state_dict(),
            allowed=resume.allow_changes,
            adapt=adapt,
        )
        if SETTINGS in report.fresh:
            report.notes.append("settings: this checkpoint does not know its own, so nothing was compared")
        if not checkpoint.manifest.finite:
            report.notes.append("model: NaN or infinity is in its weights; resume_from_checkpoint= an older checkpoint")
        self._settings.apply_overrides(report.changes)
        self._archive_later(checkpoint, report, chosen=resume.chooses)
        logger.info("resumed from %s\n%s", checkpoint.path, report.table())
        self._warn(report)
        if self._on.load:
            self._on.load.fill(checkpoint.path, checkpoint.step, report)
            self._on.load.fire()

    def load_parts(
        self, resume: ResumeOptions, sharded: Sequence[ShardedState], components: Sequence[Component]
    ) -> None:
        """Load what ``resume`` names, and nothing else, as the beginning of a new run. Fires on_before_load, on_load.

        Raises:
            UnknownName: for a name that is none of this run's parts, or that the checkpoint has not.
            StateMismatch: before anything is changed, if what was saved does not fit what is here.
        """
        path = Path(str(resume.origin))
        parts = [component for component in components if component.key not in _OF_THE_COURSE]
        known = [*(each.key for each in sharded), *(each.key for each in parts)]
        keys = {_key_of(name, known) for name in resume.load_components}
        if collectives.from_rank_zero(lambda: Checkpoint.is_at(path)):
            checkpoint = self._manager.find(path)
            assert checkpoint is not None, "a path is found, or an error"
            there = checkpoint.manifest.components.keys()
            found = [each.key for each in parts if there & {*each.keys}]
            _check_all_exist(keys, [*there & {each.key for each in sharded}, *found], path)
            self._log_origin(path)
            report = load_parts(
                checkpoint,
                [each for each in sharded if each.key in keys],
                [each for each in parts if each.key in keys],
                allowed=resume.allow_changes,
            )
        else:
            model = next(each for each in sharded if isinstance(each, ModelState))
            _check_all_exist(keys, [model.key], path)
            self._log_origin(path)
            report = load_weights(path, model, allowed=resume.allow_changes)
        if "optimizer" in keys:
            self._settings.restore_lrs()
        logger.info("begun with parts of %s\n%s", path, report.table())
        self._warn(report)
        if self._on.load:
            self._on.load.fill(path, 0, report)
            self._on.load.fire()

    def _log_origin(self, path: Path) -> None:
        if self._on.before_load:
            self._on.before_load.fill(path, 0)
            self._on.before_load.fire()

    def _warn(self, report: LoadReport) -> None:
        beware = [str(change) for change in report.changes if change.severity != "info"]
        if beware and self._state.is_world_process_zero:
            logger.warning("the run goes on with changes:\n  %s", "\n  ".join(beware))

    def _requested_checkpoint(self, resume: ResumeOptions, has_trained: bool) -> Checkpoint | None:
        if resume.origin is False:
            if has_trained:
                raise ConfigurationError(
                    "resume_from_checkpoint=False: this model is trained already; build a new trainer"
                )
            collectives.from_rank_zero(partial(archive.archive_run, self._output_dir))
            return None
        if resume.origin is True or resume.load_components:
            checkpoint = self._newest(resume)
        else:
            checkpoint = self._checkpoint_at(Path(resume.origin))
        if checkpoint is None and has_trained:
            raise ConfigurationError(
                "the last train() was aborted or broke off inside a step, and there is no checkpoint to go back to; "
                "build a new trainer (or Run), which begins at step 0"
            )
        return checkpoint

    def _checkpoint_at(self, path: Path) -> Checkpoint | None:
        if collectives.from_rank_zero(lambda: weights_are_at(path)):
            raise ConfigurationError(
                f"resume_from_checkpoint={str(path)!r}: these are weights, and no run to go on with; give "
                'load_components=("model",), too, and a new run begins with them'
            )
        return self._manager.find(path)

    def _newest(self, resume: ResumeOptions) -> Checkpoint | None:
        try:
            checkpoint = self._manager.find(strict=resume.strict)
        except DamagedCheckpoint as error:
            if not resume.strict and self._mirror.fetch_newer(None):
                return self._manager.find()
            error.add_note("resume_from_checkpoint=False starts anew, and moves all that is there into rewound/")
            raise
        if self._mirror.fetch_newer(None if checkpoint is None else checkpoint.step):
            checkpoint = self._manager.find(strict=resume.strict)
        return checkpoint

    def _archive_later(self, checkpoint: Checkpoint, report: LoadReport, *, chosen: bool) -> None:
        """One timeline: what is beyond a chosen checkpoint is moved away; all, if that is another run's."""
        step, state = checkpoint.step, self._state
        is_own = checkpoint.path.resolve() == self._manager.path_of(step).resolve()
        self._boundary.saves.set_latest(checkpoint.path if is_own else None, step)
        self._boundary.note_measured(checkpoint.manifest.metrics if is_own else {})
        if not is_own:
            state.best_metric, state.best_global_step, state.best_model_checkpoint = None, 0, None
        if chosen:
            place = archive.new_archive_dir(self._output_dir) / "checkpoints"
            moved = self._manager.archive_after(step if is_own else None, place)
            if moved:
                report.notes.append(f"{len(moved)} later checkpoint(s) are now in {place}")


def load_best(manager: CheckpointManager, path: Path, parts: Sequence[ShardedState]) -> None:
    """Put these parts of the best checkpoint, at ``path``, into memory. Collective.

    Raises:
        NotFound, DamagedCheckpoint: if it is not there any more, or damaged; says how to do without.
    """
    try:
        checkpoint = manager.find(path)
    except (NotFound, DamagedCheckpoint) as error:
        raise type(error)(
            f"{error}; it is the best one of this run, which load_best_model_at_end=True asks for: bring it back, or "
            "train with load_best_model_at_end=False, which leaves the last weights in the model"
        ) from error
    assert checkpoint is not None, "a path is found, or an error"
    load_parts(checkpoint, parts)


def _expect_all_of_a_run(checkpoint: Checkpoint) -> None:
    """
    Raises:
        DamagedCheckpoint: if something is not there without which a run would go on with what it was built with.
    """
    wanted = ["model", "optimizer", *_OF_THE_COURSE]
    wanted.remove(SETTINGS)  # which the first checkpoints did not have
    if missing := [key for key in wanted if key not in checkpoint.manifest.components]:
        raise DamagedCheckpoint(
            f"{checkpoint.path}: holds no state of {', '.join(missing)}, so no run can go on from it"
        )


def _at_step(checkpoint: Checkpoint, state: SavedTrainerState) -> SavedTrainerState:
    """
    Raises:
        DamagedCheckpoint: if the saved state is that of another step than the checkpoint.
    """
    if state["global_step"] != checkpoint.step:
        raise DamagedCheckpoint(
            f"{checkpoint.path}: trainer.global_step is {state['global_step']}; must be {checkpoint.step}, its step"
        )
    return state


def _key_of(name: str, known: Sequence[str]) -> str:
    """The key of the component that ``name`` means: a callback's may be given without what all of theirs begin with."""
    key = next((key for key in (name, f"{CALLBACKS}{name}") if key in known), None)
    if key is None:
        raise UnknownName("component in load_components", name, [each.removeprefix(CALLBACKS) for each in known])
    return key


def _check_all_exist(keys: Collection[str], there: Collection[str], path: Path) -> None:
    for key in keys:
        if key not in there:
            raise UnknownName(f"component in {path}:", key, there)
