"""RateProfiler and DurationProfiler: samples and tokens per second, and where the time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from dalsegno.distributed import collectives
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import Context, LogContext, MicrobatchEndContext


class RateProfiler(Callback):
    """Logs samples and tokens per second, in total and of each rank, in each training record:

    - ``samples_per_second``, ``tokens_per_second``: sums over ranks.
    - ``rank_samples_per_second``, ``rank_tokens_per_second``: lists with each rank's rate.

    Tokens are the elements of ``input_ids``; batches without them have no token rates. Padding does not count.
    """

    sets_control_flags = False

    def __init__(self) -> None:
        self._began = 0.0
        self._samples = self._tokens = 0

    def on_train_begin(self, ctx: Context) -> None:
        self._begin()

    on_rollback = on_train_begin

    def on_microbatch_end(self, ctx: MicrobatchEndContext) -> None:
        if ctx.samples:
            self._samples += ctx.samples
            self._tokens += _tokens(ctx)

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind != "train":
            return
        seconds = time.perf_counter() - self._began
        each = collectives.gather_floats([self._samples / seconds, self._tokens / seconds], "RateProfiler")
        counted = ctx.layout.of_data_ranks(each)  # ranks that read the same data do not add to a rate
        for position, name in enumerate(("samples", "tokens")):
            rates = [rates[position] for rates in each]
            if any(rates):
                ctx.logs[f"{name}_per_second"] = sum(rates[position] for rates in counted)
                ctx.logs[f"rank_{name}_per_second"] = rates
        self._begin()

    def _begin(self) -> None:
        self._began, self._samples, self._tokens = time.perf_counter(), 0, 0


def _tokens(ctx: MicrobatchEndContext) -> int:
    ids: Any = ctx.batch.get("input_ids") if hasattr(ctx.batch, "get") else None
    return ids.numel() if hasattr(ids, "numel") else 0


SECTIONS = ("data", "forward", "backward", "optimizer", "evaluate", "save", "other")


class DurationProfiler(Callback):
    """Logs where the time goes (data, forward, backward, saves …) and the time left, in each training record:

    - ``data_runtime``, ``forward_runtime``, ``backward_runtime``, ``optimizer_runtime``, ``evaluate_runtime``,
      ``save_runtime``, ``other_runtime``: seconds of host time; each is the maximum over ranks.
    - ``remaining_runtime``: seconds to the last step, at the pace since the last record. Only where the number of steps
      is known.
    """

    sets_control_flags = False

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._since = 0.0
        self._is_saving = False  # since the last measurement
        self._last_log = 0.0
        self._last_step = 0

    def on_train_begin(self, ctx: Context) -> None:
        self._seconds.clear()
        self._is_saving = False
        self._since = self._last_log = time.perf_counter()
        self._last_step = ctx.state.global_step

    on_rollback = on_train_begin

    def on_microbatch_begin(self, ctx: Context) -> None:
        self._account("data")

    on_epoch_end = on_microbatch_begin

    def on_before_backward(self, ctx: Context) -> None:
        self._account("forward")

    def on_microbatch_end(self, ctx: Context) -> None:
        self._account("backward")

    def on_step_end(self, ctx: Context) -> None:
        self._account("optimizer")

    def on_epoch_begin(self, ctx: Context) -> None:
        self._account("other")

    on_evaluate_begin = on_step_done = on_epoch_begin

    def on_evaluate(self, ctx: Context) -> None:
        self._account("evaluate")

    def on_before_save(self, ctx: Context) -> None:
        self._account("other")
        self._is_saving = True  # planned or not; no event fires when the state has been captured

    def on_save(self, ctx: Context) -> None:
        self._account("save")  # waiting for the previous save

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind != "train":
            return
        self._account("other")
        now, steps = time.perf_counter(), ctx.state.global_step - self._last_step
        took = [*(self._seconds[section] for section in SECTIONS), now - self._last_log]
        *sections, interval = (
            each / 1e9 for each in collectives.all_reduce_max([int(each * 1e9) for each in took], "DurationProfiler")
        )
        ctx.logs |= {f"{section}_runtime": seconds for section, seconds in zip(SECTIONS, sections, strict=True)}
        if ctx.state.max_steps > 0 and steps:
            ctx.logs["remaining_runtime"] = interval / steps * (ctx.state.max_steps - ctx.state.global_step)
        self._seconds.clear()
        self._last_log, self._last_step = now, ctx.state.global_step

    def _account(self, section: str) -> None:
        """Add the time since the last measurement to this section."""
        now = time.perf_counter()
        self._seconds["save" if self._is_saving else section] += now - self._since
        self._since, self._is_saving = now, False
