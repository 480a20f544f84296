"""ComputeBudget: the compute that a run has used so far, and its rate."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from dalsegno.distributed import collectives
from dalsegno.events.callback import Binder, Callback
from dalsegno.events.contexts import LogContext, TrainBeginContext
from dalsegno.events.table import Event
from dalsegno.state import Handler
from dalsegno.stateful.schema import Count, Finite, Must

from .argument_checks import number, whole
from .measures.model_flops import ModelFlops
from .measures.peaks import GivenPeak


class ComputeBudgetState(TypedDict):
    flops: Annotated[Finite, Must("0 or more", lambda flops: flops >= 0)]
    tokens: Count
    samples: Count


class ComputeBudget(Callback):
    """Logs how much compute the run has used, and how many tokens for the model's size, in each training record:

    - ``total_petaflops``: the model's FLOPs on all ranks since the run began, forward and backward, in 10¹⁵ FLOPs
      (:mod:`dalsegno.callbacks.measures.flops`). The sum is part of each checkpoint. FLOPs per token are counted again
      for each record, since longer sequences take more, and the model may change at a resume.
    - ``chinchilla_multiple``: tokens of the run over ``tokens_per_parameter`` times the model's parameters. 1 is the
      compute-optimal number of tokens for a model of this size, about 20 per parameter (Hoffmann et al. 2022, "Training
      Compute-Optimal Large Language Models", arXiv:2203.15556, section 3).
    - ``tokens_per_device_per_second``: since the last record.
    - ``mfu``: the same value that ``DefaultMetrics`` adds where it knows the peak.

    The last two leave out a leg's first step, in which kernels are chosen and compiled, if the record covers more
    steps; they include evaluations and saves. Tokens are the elements of ``input_ids``: without them there are only
    ``total_petaflops``, by samples, and ``mfu``. For a model that cannot be counted, both are missing, and a warning
    gives the reason. If the callback is added to a run later, earlier tokens count as many FLOPs each as later ones.

    Args:
        parameters: number of parameters, e.g. those active per token in a mixture of experts. None: all of the model, a
            tied one once.
        tokens_per_parameter: ratio of tokens to parameters that counts as 1.
        peak_hardware_flops: peak of the device in FLOP/s, for the training's dtype. On several ranks it is refused,
            since it could be the peak of one device or of all; use one of the next two.
        peak_flops_per_device: peak of each rank's device. None of the three: the known peak of the device, if the run
            is in bf16 or fp16.
        peak_flops_in_total: peak of all ranks' devices together.
        name: the key of its state in checkpoints; None: the class's name.

    Raises:
        ConfigurationError: for an invalid value, and before the first step for ``peak_hardware_flops`` on several
            ranks.
    """

    sets_control_flags = False
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
        self._given_peak = GivenPeak("ComputeBudget", peak_hardware_flops, peak_flops_per_device, peak_flops_in_total)
        self._parameters = 0
        self._peak: float | None = None  # of all ranks' devices
        self._model_flops: ModelFlops | None = None
        self._flops = 0.0  # up to the last record, with the run's tokens and samples at that record
        self._tokens = self._samples = 0

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        self._model_flops = binder.shared(ModelFlops)
        return super().bound_handlers(binder)

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        assert self._model_flops is not None, "bound_handlers() is called before any event"
        self._peak = self._model_flops.want(self._given_peak, ctx, always=True, each_record=True)
        self._parameters = self._given or sum(each.numel() for each in ctx.model.parameters())  # whole ones, if sharded

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind != "train" or self._model_flops is None:
            return
        model_flops, tokens = self._model_flops, ctx.logs.get("tokens", 0)
        done = model_flops.flops(tokens - self._tokens, ctx.state.samples_seen - self._samples)
        if done:
            self._flops += done
            self._tokens, self._samples = tokens, ctx.state.samples_seen
            ctx.logs["total_petaflops"] = self._flops / 1e15
        if tokens and self._parameters:
            ctx.logs["chinchilla_multiple"] = tokens / (self._ratio * self._parameters)
        if model_flops.token_rate is not None:
            ctx.logs["tokens_per_device_per_second"] = model_flops.token_rate / collectives.world_size()
        if model_flops.rate is not None and self._peak is not None:
            ctx.logs["mfu"] = model_flops.rate / self._peak

    def state_dict(self) -> ComputeBudgetState:
        return {"flops": self._flops, "tokens": self._tokens, "samples": self._samples}

    def load_state_dict(self, state: Any) -> None:
        self._flops, self._tokens, self._samples = state["flops"], state["tokens"], state["samples"]
