"""ModelMerge: the mean of the weights over the last steps before given steps."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, TypedDict

from torch import Tensor, nn

from dalsegno.callbacks.argument_checks import whole
from dalsegno.callbacks.averages.averaged_weights import WeightAverages
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError
from dalsegno.events import contexts
from dalsegno.stateful.schema import Count

logger = logging.getLogger("dalsegno")


class ModelMergeState(TypedDict):
    merge_step: Count
    merged: Count


class ModelMerge(WeightAverages):
    """Averages the weights of the last ``window`` steps up to a merge step, for that step's checkpoint.

    Covers the same parameters as ``EMA``; the means are sharded, saved and resharded like its averages, and
    ``export_model(..., average="ModelMerge")`` writes them. Tensors are allocated when the first window begins, and
    replaced when the next one does. Training and evaluations use the weights themselves; ``with merge.averaged():``
    swaps in the merged ones. Windows must not overlap, since there is one mean at a time, and a checkpoint must be due
    at each merge step.

    Args:
        steps: one or several merge steps. None: the run's last step.
        window: number of steps up to a merge step, including it, that are averaged; fewer if the run has fewer.
        every: steps between averaged steps; a merge step is always averaged.
        name: the callback's key, and the merged weights' name in checkpoints; None: the class's name.
    """

    state_schema = ModelMergeState

    def __init__(
        self, steps: int | Sequence[int] | None = None, window: int = 100, *, every: int = 1, name: str | None = None
    ) -> None:
        super().__init__(name)
        self._window = whole("ModelMerge", "window", window)
        self._every = whole("ModelMerge", "every", every)
        if every > window:
            raise ConfigurationError(f"ModelMerge: every={every!r}; needs an integer up to the window's {window}")
        self._steps = None if steps is None else _merge_steps(steps, window)
        self._last_step = 0  # of the run
        self._merge_step = 0  # end of the window of the present means; 0: there are none
        self._merged = 0  # number of steps in the present means

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        last, saving = ctx.state.max_steps, ctx.args.saving
        if self._steps is None and last < 1:
            raise ConfigurationError(
                "ModelMerge: the run's last step is unknown; set max_steps=, or ModelMerge(steps=)"
            )
        self._last_step = last
        for step in self._steps or []:
            if step != last and not saving.at_step(step):
                raise ConfigurationError(
                    f"ModelMerge: steps={step}, but no checkpoint is saved there to contain the merged weights; add "
                    f"AtSteps({step}) to save=, or choose another step"
                )

    def on_load(self, ctx: contexts.Context) -> None:
        if self._merged:
            self._bind(ctx.model, were_saved=True)

    on_rollback = on_load

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        merge_step = self._merge_step_of(ctx.step)
        if merge_step is None or (merge_step - ctx.step) % self._every:
            return
        if merge_step != self._merge_step:
            self._release()
            self._merge_step, self._merged = merge_step, 0
        if self._model is None:
            self._bind(ctx.model, were_saved=self._merged > 0)
        self._merged += 1
        self._approach(ctx.model, 1 / self._merged)
        if ctx.step == merge_step:
            self._report()

    def sharded_state(self, model: nn.Module) -> tuple[dict[str, Tensor], ModelMergeState]:
        """Return the means by parameter name; none before the first window."""
        rest: ModelMergeState = {"merge_step": self._merge_step, "merged": self._merged}
        return self._follow(model) if self._merged else {}, rest

    def tensors_to_load(self, model: nn.Module, rest: Any) -> dict[str, Tensor]:
        return self._expect(model) if rest["merged"] else {}

    def load_sharded_state(self, names: Collection[str], rest: Any) -> None:
        self._merge_step, self._merged = rest["merge_step"], rest["merged"]
        if self._merged:
            self._unbegun -= set(names)
        else:
            self._release()

    def _merge_step_of(self, step: int) -> int | None:
        """Return the end of the window that contains ``step``; None if none does."""
        steps = [self._last_step] if self._steps is None else self._steps
        return next((end for end in steps if end - self._window < step <= end), None)

    def _report(self) -> None:
        planned = (min(self._window, self._merge_step) - 1) // self._every + 1
        if collectives.rank() == 0:
            level = logging.INFO if self._merged == planned else logging.WARNING
            text = "%s: the mean of %d of %d weights up to step %d is in that step's checkpoint"
            logger.log(level, text, self.key, self._merged, planned, self._merge_step)


def _merge_steps(steps: int | Sequence[int], window: int) -> list[int]:
    """Return the merge steps in order. Raises ConfigurationError if one is not a step, or two windows overlap."""
    several: Any = list(steps) if isinstance(steps, (list, tuple, range)) else [steps]
    if not several:
        raise ConfigurationError(f"ModelMerge: steps={steps!r}; needs a step, or several")
    ordered = sorted({whole("ModelMerge", "steps", step) for step in several})
    for earlier, later in pairwise(ordered):
        if later - earlier < window:
            raise ConfigurationError(
                f"ModelMerge: steps={earlier} and {later} are closer than window={window}; give a second ModelMerge "
                "one of them, with another name"
            )
    return ordered
