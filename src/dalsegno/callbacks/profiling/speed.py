"""DefaultMetrics, FlopUtilization, ComputeBudget: throughput, compute, and their share of the hardware's peak.

At first what they share: the model's FLOPs since the last record, and the peaks of devices.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from inspect import Parameter, signature
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dalsegno.args import TrainingArguments
from dalsegno.callbacks.argument_checks import number, whole
from dalsegno.callbacks.profiling.flops import Uncountable, count_flops
from dalsegno.callbacks.profiling.memory import peak_memory
from dalsegno.data.loader import to_device
from dalsegno.distributed import accelerator, collectives
from dalsegno.distributed.collectives import Gathered
from dalsegno.distributed.parallel.base import autocast_dtype
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.errors import ConfigurationError
from dalsegno.events import Binder, Event, FlaglessCallback, contexts
from dalsegno.state import Handler
from dalsegno.stateful.schema import Count, Finite, Must

logger = logging.getLogger("dalsegno")


class ModelFlops(FlaglessCallback):
    """Measures the model's FLOP/s since the last record, on all ranks, for all callbacks of a run.

    A leg's first step, in which kernels are chosen and compiled, is left out if the record covers more steps. FLOPs are
    counted from shapes (:mod:`dalsegno.callbacks.profiling.flops`), of each rank's first micro-batch in the step of the
    leg's first record, or of each record. Other steps count the same per token, where batches have ``input_ids``, else
    per sample. A model that cannot be counted is reported in one warning, and never estimated.
    """

    name = "model flops"

    def __init__(self, context: contexts.Context) -> None:
        self.clock = context.state.clock
        """Of the training, by which rates are measured."""
        self._of_ranks = Gathered(self._measure, "ModelFlops")
        self._reset(context)

    def _reset(self, ctx: contexts.Context) -> None:
        self.rate: float | None = None
        """Model FLOP/s, known from on_log_step of a training record on; None if they cannot be counted."""
        self.token_rate: float | None = None
        """Tokens per second, known likewise; None if batches have no ``input_ids``."""
        self.of_a_token = self.of_a_sample = 0.0
        """FLOPs per token and per sample, known likewise; 0 if they cannot be counted, or there are no tokens."""
        self._is_wanted = self._counts_each_record = self._has_counted = self._has_warned = False
        self._batch: Any = None  # the last step's first micro-batch, if it must be counted
        self._known: dict[Any, int] = {}  # FLOPs by shapes
        self._has_stepped = False
        self._begin_interval(ctx)

    on_train_begin = _reset  # called before the callbacks that request counting

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        binder.gather_for_record(self._of_ranks)
        return super().bound_handlers(binder)

    def want(self, own_peak: float | None, *, always: bool, each_record: bool) -> float | None:
        """Request counting, if the peaks are known or ``always``. Collective; to be called in on_train_begin.

        ``own_peak``: this rank's share of the peak, in FLOP/s. ``each_record``: count again for each record; counts are
        cached by shapes. Returns the sum of all ranks' peaks; None if one is unknown.
        """
        of_rank = [own_peak or 0.0, float(own_peak is not None)]
        (total, known) = collectives.sum_floats(of_rank, "the peak of the devices")
        is_known = known == collectives.world_size()
        self._is_wanted |= always or is_known
        self._counts_each_record |= each_record
        return total if is_known else None

    def flops(self, tokens: int, samples: int) -> float:
        """Return the FLOPs of this much data, by the counts known since on_log_step: per token if there are tokens."""
        return self.of_a_token * tokens if self.of_a_token else self.of_a_sample * samples

    def idle_events(self) -> Collection[Event]:
        return () if self._is_wanted else (Event.MICROBATCH_BEGIN, Event.STEP_END, Event.LOG_STEP)

    def _begin_interval(self, ctx: contexts.Context) -> None:
        self._began = self.clock.seconds()
        self._tokens, self._samples = ctx.state.num_input_tokens_seen, ctx.state.samples_seen

    on_rollback = _begin_interval

    def on_microbatch_begin(self, ctx: contexts.MicrobatchBeginContext) -> None:
        if self._is_wanted and ctx.index == 0 and (self._counts_each_record or not self._has_counted):
            self._batch = copy(ctx.batch)

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            if not ctx.state.will_log:
                self._begin_interval(ctx)

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind != "train" or not self._is_wanted:
            return
        seconds, tokens_before, samples_before = map(max, zip(*self._of_ranks.by_rank(), strict=True))
        if self._counts_each_record or not self._has_counted:
            with self.clock.paused():
                self._count(collectives.gather_floats([*map(float, self._of_batch(ctx))], "ModelFlops"))
        tokens = max(0, ctx.state.num_input_tokens_seen - int(tokens_before))
        done = self.flops(tokens, ctx.state.samples_seen - int(samples_before))
        self.rate = done / seconds if done else None
        self.token_rate = tokens / seconds if tokens else None
        self._begin_interval(ctx)

    def _measure(self) -> list[float]:
        """Seconds since the last record, and what was read before it: each rank's own estimate, maybe too high."""
        return [self.clock.seconds() - self._began, float(self._tokens), float(self._samples)]

    def _count(self, of_ranks: Sequence[Sequence[float]]) -> None:
        """Take each rank's FLOPs, tokens and samples; 0 per token and per sample if a rank cannot count."""
        self._has_counted = True
        flops, tokens, samples = (sum(column) for column in zip(*of_ranks, strict=True))
        is_counted = all(each[0] for each in of_ranks)
        self.of_a_sample = flops / samples if is_counted else 0.0
        self.of_a_token = flops / tokens if is_counted and all(each[1] for each in of_ranks) else 0.0

    def _of_batch(self, ctx: contexts.Context) -> tuple[int, int, int]:
        """Return FLOPs, tokens and samples of the last step's first micro-batch on this rank; zeros if it had none."""
        if self._batch is None:
            return 0, 0, 0
        args, kwargs = _call(ctx.model, to_device(self._batch, device_of(ctx.model)))
        self._batch = None
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim()), None)
        ids = kwargs.get("input_ids")
        tokens = ids.numel() if isinstance(ids, Tensor) else 0
        shapes = tuple((each.shape, each.dtype) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        if shapes not in self._known:
            self._known[shapes] = self._flops_of(ctx, args, kwargs)
        return self._known[shapes], tokens, 1 if first is None else first.shape[0]

    def _flops_of(self, ctx: contexts.Context, args: list[Any], kwargs: dict[str, Any]) -> int:
        try:
            flops = count_flops(ctx.model, args, kwargs, autocast_dtype(bf16=ctx.args.bf16, fp16=ctx.args.fp16))
            if not flops:
                raise Uncountable("it has no matrix products")
        except Uncountable as error:
            if not self._has_warned:
                logger.warning("the model's FLOPs cannot be counted, so records have no mfu: %s", error)
            self._has_warned = True
            return 0
        return flops


def _call(model: nn.Module, batch: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the model's arguments: the batch, without entries that its forward does not take (the loss's targets)."""
    inner = getattr(model, "_orig_mod", model)  # the forward of torch.compile's wrapper takes any arguments
    kinds = {name: each.kind for name, each in signature(inner.forward).parameters.items()}
    if isinstance(batch, Mapping):
        takes_all = Parameter.VAR_KEYWORD in kinds.values()
        return [], {name: each for name, each in batch.items() if takes_all or name in kinds}
    args = list(batch) if isinstance(batch, (tuple, list)) else [batch]
    by_place = [kind for kind in kinds.values() if kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    return (args if Parameter.VAR_POSITIONAL in kinds.values() else args[: len(by_place)]), {}


_H100 = ("H100 80GB HBM3", "H200", "H800", "GH200 480GB", "GH200 144G HBM3e")
_A100 = ("A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIE-40GB", "A100 80GB PCIe", "A800-SXM4-80GB", "A800 80GB PCIe")

KNOWN_PEAKS: Mapping[str, float] = {
    # NVIDIA's data sheets of each data center product. They give most figures with sparsity, which is twice this.
    "NVIDIA GB300": 2500e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA B300 SXM6 AC": 2250e12,
    "NVIDIA B200": 2250e12,
    **{f"NVIDIA {name}": 989e12 for name in _H100},
    **{f"NVIDIA {name}": 835e12 for name in ("H100 NVL", "H200 NVL")},
    **{f"NVIDIA {name}": 756e12 for name in ("H100 PCIe", "H800 PCIe")},
    "NVIDIA H20": 148e12,
    **{f"NVIDIA {name}": 312e12 for name in _A100},
    "NVIDIA L40S": 362e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L20": 119.5e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA A10": 125e12,
    # NVIDIA's white papers of RTX Blackwell, Ada and Ampere GA102, appendix A, "Peak BF16 Tensor TFLOPS with FP32
    # Accumulate": on a GeForce half of those with FP16 accumulate, which PyTorch does not use by default.
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA GeForce RTX 5080": 112.6e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 4080": 97.5e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA RTX 6000 Ada Generation": 364.2e12,
    "NVIDIA RTX A6000": 154.8e12,
    # AMD's data sheets of Instinct accelerators. An MI250X is two devices, each with half of its peak of 383 TFLOP/s.
    "AMD Instinct MI355X": 2516.6e12,
    "AMD Instinct MI325X": 1307.4e12,
    "AMD Instinct MI300X": 1307.4e12,
    "AMD Instinct MI300X OAM": 1307.4e12,
    "AMD Instinct MI250X": 191.5e12,
}
"""By the device's exact name in torch: an L40 is not an L4, an A1000 not an A100, a laptop's RTX 4090 not a desktop's,
a MIG slice not a whole device."""

ONLY_FP16: Mapping[str, float] = {
    "Tesla V100-SXM2-16GB": 125e12,
    "Tesla V100-SXM2-32GB": 125e12,
    "Tesla V100-PCIE-16GB": 112e12,
    "Tesla V100-PCIE-32GB": 112e12,
    "Tesla T4": 65e12,
}
"""Devices without matrix units for bf16."""


def known_peak(device: torch.device, args: TrainingArguments) -> float | None:
    """Return one device's peak FLOP/s in 16-bit matrix products; None if unknown, or if the run is not in 16 bits."""
    if device.type in ("cpu", "meta") or not (args.bf16 or args.fp16):
        return None
    name = accelerator.name_of(device)
    return KNOWN_PEAKS.get(name) or (ONLY_FP16.get(name) if args.fp16 else None)


# --- the callbacks --------------------------------------------------------------------------------------------------


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
