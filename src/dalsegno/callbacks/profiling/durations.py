"""RateProfiler and DurationProfiler: samples and tokens per second, and where the time goes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypedDict

from torch import Tensor

from dalsegno.callbacks.argument_checks import whole
from dalsegno.distributed import collectives
from dalsegno.events import FlaglessCallback, contexts
from dalsegno.policies.triggers import SaveTrigger
from dalsegno.state import Clock
from dalsegno.stateful.schema import Count


class RateState(TypedDict):
    non_padding_tokens: Count


class RateProfiler(FlaglessCallback):
    """Logs samples and tokens per second, in total and of each rank, in each training record:

    - ``samples_per_second``, ``tokens_per_second``, ``non_padding_tokens_per_second``: sums over ranks.
    - ``rank_samples_per_second``, ``rank_tokens_per_second``, ``rank_non_padding_tokens_per_second``: lists with each
      rank's rate.
    - ``non_padding_tokens``: number of them in the run so far, as ``tokens`` is that of all.

    Tokens are the elements of ``input_ids``, padding included; batches without them have no token rates. Those that are
    not padding are the ones that ``attention_mask`` does not leave out; batches without it have none of these entries.
    A batch that only fills up ranks does not count.

    Args:
        window: number of the newest records whose time the rates cover. More of them smooth out evaluations and saves.
    """

    state_scope = "per_rank"
    state_schema = RateState

    def __init__(self, window: int = 1) -> None:
        self._window: deque[list[float]] = deque(maxlen=whole("RateProfiler", "window", window))
        """Of each record: seconds, samples, tokens, and tokens without padding."""
        self._began = 0.0
        self._samples = self._tokens = self._logged = 0
        self._non_padding: int | Tensor = 0
        """Of the run, on this rank; ``_logged`` of them until the last record."""

    def on_train_begin(self, ctx: contexts.Context) -> None:
        self._window.clear()
        self._begin(ctx)

    on_rollback = on_train_begin

    def on_microbatch_end(self, ctx: contexts.MicrobatchEndContext) -> None:
        if ctx.samples:
            ids, mask = _tensor(ctx.batch, "input_ids"), _tensor(ctx.batch, "attention_mask")
            self._samples += ctx.samples
            self._tokens += 0 if ids is None else ids.numel()
            if ids is not None and mask is not None and mask.shape == ids.shape:
                self._non_padding = self._non_padding + mask.count_nonzero()

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind != "train":
            return
        seconds, non_padding = ctx.state.elapsed() - self._began, int(self._non_padding)
        self._window.append([seconds, self._samples, self._tokens, non_padding - self._logged])
        seconds, *counts = map(sum, zip(*self._window, strict=True))
        each = collectives.gather_floats([*(count / seconds for count in counts), non_padding], "RateProfiler")
        counted = ctx.layout.of_data_ranks(each)  # ranks that read the same data do not add to a rate
        for position, name in enumerate(("samples", "tokens", "non_padding_tokens")):
            rates = [rates[position] for rates in each]
            if any(rates):
                ctx.logs[f"{name}_per_second"] = sum(rates[position] for rates in counted)
                ctx.logs[f"rank_{name}_per_second"] = rates
        if total := sum(int(rates[-1]) for rates in counted):
            ctx.logs["non_padding_tokens"] = total
        self._begin(ctx)

    def _begin(self, ctx: contexts.Context) -> None:
        self._began, self._samples, self._tokens = ctx.state.elapsed(), 0, 0
        self._non_padding = self._logged = int(self._non_padding)

    def state_dict(self) -> RateState:
        return {"non_padding_tokens": int(self._non_padding)}

    def load_state_dict(self, state: Any) -> None:
        self._non_padding = state["non_padding_tokens"]

    @classmethod
    def reshard(cls, states: Sequence[RateState], world_size: int) -> list[RateState]:
        """Rank 0 gets the tokens of all."""
        total = sum(each["non_padding_tokens"] for each in states)
        return [{"non_padding_tokens": 0 if rank else total} for rank in range(world_size)]


def _tensor(batch: Any, name: str) -> Tensor | None:
    found = batch.get(name) if hasattr(batch, "get") else None
    return found if isinstance(found, Tensor) else None


SECTIONS = ("data", "forward", "backward", "optimizer", "evaluate", "save", "other")


class DurationProfiler(FlaglessCallback):
    """Logs where the time goes (data, forward, backward, saves …) and the time left, in each training record:

    - ``data_runtime``, ``forward_runtime``, ``backward_runtime``, ``optimizer_runtime``, ``evaluate_runtime``,
      ``save_runtime``, ``other_runtime``: seconds of host time; each is the maximum over ranks.
    - ``data_share``: the share of the time since the last record that waiting for data takes, 0 to 1.
    - ``remaining_runtime``: seconds to the end: the steps left at the pace since the last record, and the evaluations
      left at the leg's mean duration of one, from the first one on. Only where the number of steps is known.
    """

    def __init__(self) -> None:
        self._begin(Clock(), 0)

    def _begin(self, clock: Clock, step: int) -> None:
        self._clock = clock  # the run's, kept since the context of on_save has a past one
        self._seconds: dict[str, float] = defaultdict(float)
        self._since = self._last_log = clock.seconds()
        self._is_saving = False  # since the last measurement
        self._last_step = step
        self._evaluations, self._evaluated_at, self._evaluated_for = 0, 0, 0.0  # number, last step, and seconds

    def on_train_begin(self, ctx: contexts.Context) -> None:
        self._begin(ctx.state.clock, ctx.state.global_step)

    on_rollback = on_train_begin

    def on_microbatch_begin(self, ctx: contexts.Context) -> None:
        self._clock = ctx.state.clock  # it may have been added in the middle of a leg
        if self._is_saving:  # until the reading began
            self._seconds["data"] += ctx.state.data_seconds
            self._since += ctx.state.data_seconds
        self._account("data")

    def on_epoch_end(self, ctx: contexts.Context) -> None:
        self._account("data")

    def on_before_backward(self, ctx: contexts.Context) -> None:
        self._account("forward")

    def on_microbatch_end(self, ctx: contexts.Context) -> None:
        self._account("backward")

    def on_step_end(self, ctx: contexts.Context) -> None:
        self._account("optimizer")

    def on_epoch_begin(self, ctx: contexts.Context) -> None:
        self._account("other")

    on_evaluate_begin = on_step_done = on_epoch_begin

    def on_evaluate(self, ctx: contexts.EvaluateContext) -> None:
        self._account("evaluate")
        self._evaluations += ctx.is_last
        self._evaluated_at = ctx.state.global_step

    def on_before_save(self, ctx: contexts.Context) -> None:
        self._account("other")
        self._is_saving = True  # planned or not; no event fires when the state has been captured

    def on_save(self, ctx: contexts.Context) -> None:
        self._account("save")  # waiting for the previous save

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind != "train":
            return
        self._account("other")
        now, steps = self._clock.seconds(), ctx.state.global_step - self._last_step
        took = [*(self._seconds[section] for section in SECTIONS), now - self._last_log]
        *sections, interval = (
            each / 1e9 for each in collectives.all_reduce_max([int(each * 1e9) for each in took], "DurationProfiler")
        )
        of_section = dict(zip(SECTIONS, sections, strict=True))
        self._evaluated_for += of_section["evaluate"]
        ctx.logs |= {f"{section}_runtime": seconds for section, seconds in of_section.items()}
        ctx.logs["data_share"] = of_section["data"] / interval
        if ctx.state.max_steps > 0 and steps:
            pace = (interval - of_section["evaluate"]) / steps
            evaluation = self._evaluated_for / self._evaluations if self._evaluations else 0.0
            steps_left = ctx.state.max_steps - ctx.state.global_step
            ctx.logs["remaining_runtime"] = pace * steps_left + evaluation * self._evaluations_left(ctx)
        self._seconds.clear()
        self._last_log, self._last_step = now, ctx.state.global_step

    def _evaluations_left(self, ctx: contexts.LogContext) -> int:
        """Number of evaluations that are due from this record on, which those of its step follow."""
        state, args = ctx.state, ctx.args
        triggers = (args.evaluation, args.saving) if args.eval_on_save else (args.evaluation,)
        steps_in_epoch = round(state.global_step / state.epoch, 2) if state.epoch else math.inf
        due = _steps_due(triggers, state.max_steps, steps_in_epoch)
        is_ahead = state.will_evaluate and self._evaluated_at != state.global_step
        return is_ahead + len(due) - bisect_right(due, state.global_step)

    def _account(self, section: str) -> None:
        """Add the time since the last measurement to this section."""
        now = self._clock.seconds()
        self._seconds["save" if self._is_saving else section] += now - self._since
        self._since, self._is_saving = now, False


@lru_cache(maxsize=4)
def _steps_due(triggers: tuple[SaveTrigger, ...], last: int, steps_in_epoch: float) -> list[int]:
    """The steps up to ``last`` with which one of them is due; a save, the second one, is at the end, too."""
    steps, step = {last} if any(triggers[1:]) else set[int](), 0.0
    while (step := min(each.next_step(int(step)) for each in triggers)) <= last:
        if any(each.at_step(int(step)) for each in triggers):
            steps.add(int(step))
    for epoch in range(1, int(last / steps_in_epoch + 1e-6) + 1):
        if any(each.at_epoch(epoch) for each in triggers):
            steps.add(round(epoch * steps_in_epoch))
    return sorted(steps)
