"""SkipSamples: skips the first samples of the data."""

from __future__ import annotations

from typing import Any, TypedDict

from dalsegno.distributed import collectives
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import EpochContext
from dalsegno.stateful.schema import Count

from .argument_checks import whole


class SkipSamplesState(TypedDict):
    left: Count


class SkipSamples(Callback):
    """Skips the first ``n`` samples that the run would train on.

    Samples are counted over all ranks, in the order in which the run would read them, shuffled or not; skipping extends
    over several epochs if ``n`` is larger than one. Skipped samples of a map dataset are not loaded. An iterable
    dataset, a dataset with state, and a user's own loader are read in whole micro-batches: the micro-batch with the
    last skipped sample is skipped entirely. This happens once in a run, before its first step, however often the run is
    resumed. Epochs count skipped samples, ``state.samples_seen`` does not.

    Args:
        n: number of samples.

    Raises:
        ConfigurationError: if ``n`` is not an integer of at least 0.
    """

    sets_control_flags = False
    background_safe = False
    state_schema = SkipSamplesState

    def __init__(self, n: int) -> None:
        self._left = whole("SkipSamples", "n", n, least=0)

    def on_epoch_begin(self, ctx: EpochContext) -> None:
        if self._left and ctx.state.global_step == 0:  # a run added to later has no first samples left
            here = ctx.trainer.skip_samples(self._left)
            (passed,) = collectives.all_reduce_max([here], "SkipSamples")  # loaders may differ
            self._left = max(0, self._left - passed)

    def state_dict(self) -> SkipSamplesState:
        return {"left": self._left}

    def load_state_dict(self, state: Any) -> None:
        self._left = state["left"]
