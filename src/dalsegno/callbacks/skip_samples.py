"""SkipSamples: the data from a later sample on."""

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
    """Passes over the first ``n`` samples that the run would train on.

    They are counted over all ranks, in the order in which the run would have seen them, shuffled or not; if there are
    more than an epoch has, the next ones are skipped, too. Of a map dataset none is loaded. An iterable dataset, one
    with a state, and a loader of your own are read past, in whole micro-batches: the one that holds the last sample to
    be skipped is skipped as a whole. That happens once in a run, before its first step, however often it is resumed.
    Epochs count what is skipped, ``state.samples_seen`` does not.

    Args:
        n: how many.

    Raises:
        ConfigurationError: if that is not a whole number of at least 0.
    """

    makes_wishes = False
    background_safe = False
    state_schema = SkipSamplesState

    def __init__(self, n: int) -> None:
        self._left = whole("SkipSamples", "n", n, least=0)

    def on_epoch_begin(self, ctx: EpochContext) -> None:
        if self._left and ctx.state.global_step == 0:  # in a run that is under way there are no first samples any more
            (passed,) = collectives.all_reduce_max(
                [ctx.trainer.skip_samples(self._left)], "SkipSamples"
            )  # loaders may differ
            self._left = max(0, self._left - passed)

    def state_dict(self) -> SkipSamplesState:
        return {"left": self._left}

    def load_state_dict(self, state: Any) -> None:
        self._left = state["left"]
