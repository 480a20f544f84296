"""DefaultMetrics, FlopUtilization, ComputeBudget: throughput, compute, and their share of the hardware's peak."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

import torch

from dalsegno.callbacks.argument_checks import number, whole
from dalsegno.callbacks.profiling.memory import peak_memory
from dalsegno.callbacks.profiling.model_flops import ModelFlops, known_peak
from dalsegno.distributed import collectives
from dalsegno.distributed.collectives import Gathered
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.errors import ConfigurationError
from dalsegno.events import Binder, Event, FlaglessCallback, contexts
from dalsegno.state import Handler
from dalsegno.stateful.schema import Count, Finite, Must


class UtilizationCallback(FlaglessCallback):
    """Base class of callbacks that report the model's FLOPs, and their share of the hardware's peak."""

    _counts_always = False  # also without a known peak
    _counts_each_record = False  # again for each record, so that results do not depend on where a leg begins

    def __init__(
        self,
        peak_hardware_flops: float | None = None,
        *,
        peak_flops_per_device: float | None = None,
        peak_flops_in_total: float | None = None,
    ) -> None:
        peaks = {
            "peak_hardware_flops": peak_hardware_flops,
            "peak_flops_per_device": peak_flops_per_device,
            "peak_flops_in_total": peak_flops_in_total,
        }
        owner = type(self).__name__
        given = {name: number(owner, name, peak, over=0) for name, peak in peaks.items() if peak is not None}
        if len(given) > 1:
            raise ConfigurationError(f"{owner}: {' and '.join(given)} are given; give only one")
        self._given_peak = given
        self.needs_events = (Event.MICROBATCH_BEGIN,) if given or self._counts_always else ()
        self._peak: float | None = None  # of all ranks' devices
        self._flops: ModelFlops | None = None

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        self._flops = binder.shared(ModelFlops)
        return super().bound_handlers(binder)

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        if self._flops is not None:
            own = self._own_peak(ctx)
            self._peak = self._flops.want(own, always=self._counts_always, each_record=self._counts_each_record)

    def _own_peak(self, ctx: contexts.Context) -> float | None:
        """Return this rank's share of the peak; None if it is unknown."""
        for name, peak in self._given_peak.items():
            ranks = collectives.world_size()
            if name == "peak_hardware_flops" and ranks > 1:  # one device to some programs, all of them to others
                raise ConfigurationError(
                    f"{type(self).__name__}: peak_hardware_flops={peak:g} is ambiguous on {ranks} ranks; give "
                    f"peak_flops_per_device={peak:g} if it is the peak of one device, or peak_flops_in_total={peak:g} "
                    "if it is that of all devices together"
                )
            return peak / ranks if name == "peak_flops_in_total" else peak
        return known_peak(device_of(ctx.model), ctx.args)

    def _add_mfu(self, logs: dict[str, Any]) -> None:
        if self._flops is not None and self._flops.rate is not None and self._peak is not None:
            logs["mfu"] = self._flops.rate / self._peak


class DefaultMetrics(UtilizationCallback):
    """Logs speed, hardware utilization and peak memory in each training record:

    - ``tok_per_sec``: tokens (elements of ``input_ids``) of all ranks per second since the last record, including
      evaluations and saves, but not the counting of FLOPs. Without tokens: ``steps_per_second``.
    - ``mfu``: model FLOPs utilization, the fraction of the hardware's peak that the model uses, 0 to 1: FLOPs per token
      (or per sample, without tokens), forward and backward, times tokens per second, over the peak of all ranks'
      devices (Chowdhery et al. 2022, "PaLM", arXiv:2204.02311, appendix B). Only where the peak is known and the
      model's FLOPs can be counted (:mod:`dalsegno.callbacks.profiling.flops`).
    - ``peak_mem``: bytes since the process began, of the rank with the most; on several ranks also ``rank_peak_mem``, a
      list of each rank's. On CUDA what PyTorch has allocated on the model's device; elsewhere the process's resident
      memory.

    Args:
        peak_hardware_flops: peak of the only device in FLOP/s, for the training's dtype; refused on several ranks.
        peak_flops_per_device: peak of each rank's device. None of the three: the known peak, in bf16 or fp16.
        peak_flops_in_total: peak of all ranks' devices together.
    """

    _device = torch.device("cpu")
    _began = _measured_at = 0.0  # seconds of training
    _tokens_before = _steps_before = 0
    _of_ranks: Gathered

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        self._of_ranks = Gathered(self._measure, "DefaultMetrics")
        binder.gather_for_record(self._of_ranks)
        return super().bound_handlers(binder)

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        self._device = device_of(ctx.model)
        super().on_train_begin(ctx)
        self._begin_interval(ctx)

    def _begin_interval(self, ctx: contexts.Context) -> None:
        self._began, self._tokens_before = ctx.state.elapsed(), ctx.state.num_input_tokens_seen
        self._steps_before = ctx.state.global_step
        self._of_ranks.forget()

    on_rollback = _begin_interval

    def _measure(self) -> list[float]:
        """Seconds since the last record, and peak memory, of this rank."""
        assert self._flops is not None, "it is bound"
        self._measured_at = self._flops.clock.seconds()
        return [self._measured_at - self._began, float(peak_memory(self._device))]

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind != "train":
            return
        by_rank = self._of_ranks.by_rank()
        seconds = max(elapsed for elapsed, _ in by_rank)
        peaks = [int(peak) for _, peak in by_rank]
        self._began = self._measured_at
        if "tokens" in ctx.logs:
            # A leg that begins between two records begins with an estimated count, which may be too high.
            ctx.logs["tok_per_sec"] = max(0, ctx.logs["tokens"] - self._tokens_before) / seconds
            self._tokens_before = int(ctx.logs["tokens"])
        else:
            ctx.logs["steps_per_second"] = (ctx.state.global_step - self._steps_before) / seconds
        self._steps_before = ctx.state.global_step
        self._add_mfu(ctx.logs)
        ctx.logs["peak_mem"] = max(peaks)
        if len(peaks) > 1:
            ctx.logs["rank_peak_mem"] = peaks


class FlopUtilization(UtilizationCallback):
    """Logs the model's FLOPs per second, and their share of the hardware's peak, in each training record:

    - ``flops_per_second``: the model's FLOPs on all ranks, per second of wall-clock time since the last record.
    - ``mfu``: ``flops_per_second`` over the peak of all ranks' devices, where the peak is known; the same value that
      ``DefaultMetrics`` adds.

    Arguments are those of :class:`DefaultMetrics`.
    """

    _counts_always = True

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind == "train" and self._flops is not None and self._flops.rate is not None:
            ctx.logs["flops_per_second"] = self._flops.rate
            self._add_mfu(ctx.logs)


class ComputeBudgetState(TypedDict):
    flops: Annotated[Finite, Must("0 or more", lambda flops: flops >= 0)]
    tokens: Count
    samples: Count


class ComputeBudget(UtilizationCallback):
    """Logs how much compute the run has used, and how many tokens for the model's size, in each training record:

    - ``total_petaflops``: the model's FLOPs on all ranks since the run began, in 10¹⁵ FLOPs, counted again for each
      record: longer sequences take more.
    - ``chinchilla_multiple``: tokens of the run over ``tokens_per_parameter`` times the model's parameters. 1 is the
      compute-optimal number of tokens for a model of this size (Hoffmann et al. 2022, "Training Compute-Optimal Large
      Language Models", arXiv:2203.15556, section 3).
    - ``tokens_per_device_per_second``: since the last record.
    - ``mfu``: the same value that ``DefaultMetrics`` adds where it knows the peak.

    Without ``input_ids`` there are only ``total_petaflops``, by samples, and ``mfu``.

    Args:
        parameters: number of parameters, e.g. those active per token in a mixture of experts. None: all of the model, a
            tied one once.
        tokens_per_parameter: ratio of tokens to parameters that counts as 1.
        peak_hardware_flops: this and the other two peaks: as in :class:`DefaultMetrics`.
        name: the key of its state in checkpoints; None: the class's name.
    """

    _counts_always = _counts_each_record = True
    state_schema = ComputeBudgetState

    def __init__(
        self,
        parameters: int | None = None,
        *,
        tokens_per_parameter: float = 20.0,
        peak_hardware_flops: float | None = None,
        peak_flops_per_device: float | None = None,
        peak_flops_in_total: float | None = None,
        name: str | None = None,
    ) -> None:
        self.name = name
        self._given = None if parameters is None else whole("ComputeBudget", "parameters", parameters)
        self._ratio = number("ComputeBudget", "tokens_per_parameter", tokens_per_parameter, over=0)
        super().__init__(
            peak_hardware_flops, peak_flops_per_device=peak_flops_per_device, peak_flops_in_total=peak_flops_in_total
        )
        self._parameters = 0
        self._used_flops = 0.0  # up to the last record, with the run's tokens and samples at that record
        self._tokens = self._samples = 0

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        super().on_train_begin(ctx)
        self._parameters = self._given or sum(each.numel() for each in ctx.model.parameters())  # whole ones, if sharded

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind != "train" or self._flops is None:
            return
        tokens = ctx.logs.get("tokens", 0)
        done = self._flops.flops(tokens - self._tokens, ctx.state.samples_seen - self._samples)
        if done:
            self._used_flops += done
            self._tokens, self._samples = tokens, ctx.state.samples_seen
            ctx.logs["total_petaflops"] = self._used_flops / 1e15
        if tokens and self._parameters:
            ctx.logs["chinchilla_multiple"] = tokens / (self._ratio * self._parameters)
        if self._flops.token_rate is not None:
            ctx.logs["tokens_per_device_per_second"] = self._flops.token_rate / collectives.world_size()
        self._add_mfu(ctx.logs)

    def state_dict(self) -> ComputeBudgetState:
        return {"flops": self._used_flops, "tokens": self._tokens, "samples": self._samples}

    def load_state_dict(self, state: Any) -> None:
        self._used_flops, self._tokens, self._samples = state["flops"], state["tokens"], state["samples"]
