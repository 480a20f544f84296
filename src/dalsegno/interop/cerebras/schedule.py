"""The ``trainer.schedule`` of Cerebras's callbacks: the stretches of training and the validations of a fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from dalsegno.events.contexts import Context
from dalsegno.interop.stand_in import StandIn, reads


@dataclass(frozen=True)
class StageType:
    """Equal to the library's own member of this name."""

    name: str

    def __eq__(self, other: object) -> bool:
        return getattr(other, "name", None) == self.name

    def __hash__(self) -> int:
        return hash(self.name)


TRAINING, VALIDATION = StageType("TRAIN_DATALOADER"), StageType("VAL_DATALOADER")


@dataclass(frozen=True)
class Stage:
    """A stretch of training, whose ``steps`` are optimizer steps, or a validation, whose ``steps`` are batches."""

    type: StageType
    start_step: int
    """Finished optimizer steps when it begins."""
    name: str
    steps: int | None
    """None where the length of the data is unknown."""
    every_n_vals: int | None = None


class Position:
    """Where the run is. Kept by the dialect's shared state."""

    def __init__(self) -> None:
        self.initial_step = 0
        """Finished steps when the fit began."""
        self.microbatch = 0
        """Index of the micro-batch in its step."""
        self.batch_idx = -1
        """Of the micro-batch in the current stretch of training."""
        self.is_counted = False
        """Whether the step whose micro-batches were the last is counted already."""
        self.ends_stretch = False
        """Whether the stretch ends with the step in progress."""
        self.val_name: str | None = None
        """Of the evaluation set; None in training."""
        self.val_batches: int | None = None
        self.val_batch_idx = -1


class Schedule(StandIn):
    """Stands in for ``trainer.schedule``, from ``max_steps`` and ``eval_steps``."""

    _stands_for = "trainer.schedule"
    checkpoint_schedule = None
    """dalsegno saves at steps that a trigger decides on, so none is known ahead."""
    checkpoint_steps = None
    initial_global_step: int = reads("_position.initial_step")
    train_steps: int | None = reads("current_stage.steps")
    """Steps of the current stretch of training."""

    def __init__(self, context: Context, position: Position) -> None:
        self._state, self._args, self._position = context.state, context.args, position
        loaders = context.eval_dataloader
        self._sets: dict[str, Any] = dict(loaders) if isinstance(loaders, Mapping) else {"validate": loaders}
        if loaders is None:
            self._sets = {}

    @property
    def evaluates(self) -> bool:
        """Whether evaluations are scheduled."""
        return bool(self._args.evaluation) and bool(self._sets)

    @property
    def batch_idx(self) -> int:
        """Index of the batch in progress, in the current stage."""
        position = self._position
        return position.batch_idx if position.val_name is None else position.val_batch_idx

    @property
    def stages(self) -> list[Stage]:
        """All stages of the fit."""
        return list(self._stages(self._position.initial_step))

    def _stages(self, start: int) -> Iterator[Stage]:
        total, period = self._state.max_steps, self._args.evaluation.steps if self.evaluates else 0
        if total < 0:
            yield Stage(TRAINING, start, "train", None)
            return
        while start < total:
            end = min(total, (start // period + 1) * period) if period else total
            yield Stage(TRAINING, start, "train", end - start)
            if period and end % period == 0:
                for name, loader in self._sets.items():
                    yield Stage(VALIDATION, end, name, batches_in(loader))
            start = end

    @property
    def current_stage(self) -> Stage:
        position, step = self._position, self._state.global_step
        if position.val_name is not None:
            return Stage(VALIDATION, step, position.val_name, position.val_batches)
        return self._training_stage(step - position.is_counted)

    def _training_stage(self, step: int) -> Stage:
        stages = [stage for stage in self.stages if stage.type == TRAINING and stage.start_step <= step]
        return stages[-1] if stages else Stage(TRAINING, step, "train", 0)

    @property
    def stages_remaining(self) -> list[Stage]:
        """Those after the current one."""
        now = self.current_stage
        later = [stage for stage in self.stages if stage.start_step > now.start_step]
        if now.type == TRAINING:
            return later
        names = list(self._sets)
        after = names[names.index(now.name) + 1 :] if now.name in names else []
        same = [Stage(VALIDATION, now.start_step, name, batches_in(self._sets[name])) for name in after]
        rest = [stage for stage in self.stages if stage.type == TRAINING and stage.start_step == now.start_step]
        return [*same, *rest, *later]

    @property
    def epochs(self) -> int:
        """Stretches of training in this fit."""
        return sum(stage.type == TRAINING for stage in self.stages)

    @property
    def epochs_remaining(self) -> int:
        return sum(stage.type == TRAINING for stage in [self.current_stage, *self.stages_remaining])

    @property
    def batches_remaining(self) -> int:
        """Batches after this one in the current stage; in training, of full steps.

        Raises:
            AttributeError: if the length of the data is unknown.
        """
        stage = self.current_stage
        if stage.steps is None:
            raise AttributeError("trainer.schedule.batches_remaining: the length of the data is unknown; set max_steps")
        if stage.type == VALIDATION:
            return stage.steps - self.batch_idx - 1
        accumulation = self._args.accumulation.at(stage.start_step)
        return max(0, stage.steps * accumulation - self.batch_idx - 1)


def batches_in(loader: Any) -> int | None:
    """Return the length of a loader; None if it is unknown."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:
        return None
