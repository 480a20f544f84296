"""ExpertLoadBalance: how evenly the routers of a mixture of experts distribute tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from dalsegno.callbacks.argument_checks import pattern, whole
from dalsegno.data.loader import tensors_in
from dalsegno.distributed import collectives
from dalsegno.distributed.pipeline.stage import running_microbatch
from dalsegno.distributed.sharded_tensors import device_of, strip_wrappers
from dalsegno.distributed.stage_places import is_cut
from dalsegno.errors import ConfigurationError
from dalsegno.events import FlaglessCallback, contexts
from dalsegno.stateful.schema import Count, Must


class ExpertLoadState(TypedDict):
    loads: dict[str, Annotated[list[Count], Must("a number for each expert", len)]]


class ExpertLoadBalance(FlaglessCallback):
    """Measures, every ``every`` steps, how the routers of a mixture of experts distribute the step's tokens.

    Counts over all ranks and micro-batches, and adds to the next training record, for each router by its name:

    - ``expert_load/<router>/max``: the busiest expert's share of the tokens times the number of experts; 1 if balanced.
    - ``expert_load/<router>/entropy``: entropy of the shares over that of a balanced load: 1 if balanced, 0 if all
      tokens go to one expert.
    - ``expert_load/<router>/idle``: number of experts without a token.

    A router is a module whose name matches; a matching module inside another is part of that one. If the output
    contains the experts of each token, as integers (..., experts per token) or a mask (..., experts), these are
    counted. Else the output, or the first tensor in it, contains a score for each expert in its last dimension, and a
    token goes to the ``top_k`` highest. Padding does not count: neither batches that only fill up ranks, nor tokens
    that the batch's ``attention_mask`` (samples, tokens) leaves out.

    Args:
        every: steps between measurements.
        router: regular expression, searched in modules' names.
        top_k: experts per token, for routers that output scores only. None: from the router or the model's ``config``
            (``top_k``, ``num_experts_per_tok``, ...), else 1.
        name: the key of its state in checkpoints; None: the class's name.
    """

    state_schema = ExpertLoadState

    def __init__(
        self,
        every: int = 100,
        router: str = r"(^|\.)(router|gate)$",
        top_k: int | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self.name = name
        self._every = whole("ExpertLoadBalance", "every", every)
        self._top_k = None if top_k is None else whole("ExpertLoadBalance", "top_k", top_k)
        self._router = pattern("ExpertLoadBalance", "router", router)
        self._handles: list[RemovableHandle] = []
        self._counts: dict[str, Tensor] = {}
        self._batches: list[Any] = []  # of a measured step's micro-batches; None for padding
        self._is_due = self._is_cut = False
        self._sums: LoadSums | None = None
        self._loads: dict[str, list[int]] = {}  # of the last measured step, until they are logged

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        self._counts, self._is_due, self._is_cut = {}, False, is_cut(ctx.model)
        self._sums = LoadSums(device_of(ctx.model))
        config = getattr(ctx.model, "config", None)
        routers: list[str] = []
        for name, module in ctx.model.named_modules():
            if self._router.search(strip_wrappers(name)) and not any(name.startswith(f"{outer}.") for outer in routers):
                routers.append(name)
                self._handles.append(module.register_forward_hook(self._counter(strip_wrappers(name), config)))
        if not self._handles:
            raise ConfigurationError(
                f"ExpertLoadBalance: no module's name matches router={self._router.pattern!r}; the model has "
                + ", ".join([name for name, _ in ctx.model.named_modules() if name][:20])
            )

    def on_step_begin(self, ctx: contexts.Context) -> None:
        if (ctx.state.global_step + 1) % self._every == 0:
            self._counts, self._batches, self._is_due = {}, [], True

    def on_microbatch_begin(self, ctx: contexts.MicrobatchBeginContext) -> None:
        if self._is_due:
            self._batches.append(ctx.batch if ctx.samples else None)

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        if self._is_due:
            counted, self._counts = self._counts, {}
            assert self._sums is not None, "on_train_begin comes first"
            self._loads = self._sums(counted)
        self._is_due, self._batches = False, []

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind == "train":
            for name, loads in self._loads.items():
                ctx.logs |= _balance(f"expert_load/{name}", loads)
            self._loads = {}

    def state_dict(self) -> ExpertLoadState:
        return {"loads": self._loads}

    def load_state_dict(self, state: Any) -> None:
        self._loads = state["loads"]

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _counter(self, name: str, config: Any) -> Any:
        masked_by = "attention_mask"
        if getattr(config, "is_encoder_decoder", False) and "decoder" in name.split("."):
            masked_by = "decoder_attention_mask"

        def count(module: nn.Module, args: Any, outputs: Any) -> None:
            if not self._batches or not torch.is_grad_enabled():
                return
            number = running_microbatch() if self._is_cut else -1  # a pipeline's recomputation is in none
            batch = None if number is None else self._batches[number]
            if batch is None:
                return
            try:
                top_k = self._top_k or _attribute(_TOP_K, module) or _attribute(_TOP_K, config) or 1
                sent = routed(module, outputs, top_k)
            except ValueError as error:
                raise ConfigurationError(
                    f"ExpertLoadBalance: {name} {error}; router={self._router.pattern!r} must match routers only"
                ) from error
            mask = batch.get(masked_by) if isinstance(batch, Mapping) else None
            if isinstance(mask, Tensor) and _is_of(mask, sent):
                sent = sent & mask.to(sent.device).bool().reshape(*sent.shape[:-1], 1)
            counts = sent.reshape(-1, sent.shape[-1]).sum(0)
            self._counts[name] = self._counts[name] + counts if name in self._counts else counts

        return count


def _is_of(mask: Tensor, sent: Tensor) -> bool:
    """Whether ``mask`` masks exactly these tokens, in this order."""
    tokens = sent.shape[:-1]
    return mask.dim() == 2 and (tokens == mask.shape or tokens == (mask.numel(),))


def _balance(title: str, loads: Sequence[int]) -> dict[str, float]:
    total = sum(loads) or 1.0
    shares = [load / total for load in loads]
    entropy = -sum(share * math.log(share) for share in shares if share > 0)
    return {
        f"{title}/max": max(shares) * len(shares),
        f"{title}/entropy": entropy / math.log(len(shares)) if len(shares) > 1 else 1.0,
        f"{title}/idle": float(sum(load == 0 for load in loads)),
    }


class LoadSums:
    """Sums the loads of all routers over all ranks, in one collective.

    A rank may run some of the routers only: those of its pipeline stage, or none on a batch that is padding. So ranks
    tell each other which routers they run, the first time and whenever a rank has run one that it had not before.
    Ranks that read the same data all count it, which changes no expert's share of the tokens.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._run: dict[str, int] = {}  # number of experts of each router that this rank has run
        self._experts: dict[str, int] = {}  # of each router of all ranks, in the same order on all

    def __call__(self, loads: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Return each router's load by expert, of all ranks, from those of this rank (int64). Collective."""
        if not self._experts:
            self._tell(loads)
        while (totals := self._summed(loads))[0]:
            self._tell(loads)
        parts = iter(totals[1:])
        return {name: [next(parts) for _ in range(count)] for name, count in self._experts.items()}

    def _summed(self, loads: Mapping[str, Tensor]) -> list[int]:
        """Return the number of routers that not all ranks know yet, and the sums of the loads of all others."""
        totals = torch.zeros(1 + sum(self._experts.values()), dtype=torch.int64, device=self._device)
        totals[0] = len(loads.keys() - self._run.keys())
        begin = 1
        for name, count in self._experts.items():
            if name in loads:
                totals[begin : begin + count] = loads[name]
            begin += count
        if collectives.initialized():
            dist.all_reduce(totals)
        return [int(each) for each in totals.tolist()]

    def _tell(self, loads: Mapping[str, Tensor]) -> None:
        self._run |= {name: len(counts) for name, counts in loads.items()}
        of_ranks = collectives.gather(self._run, "ExpertLoadBalance")
        self._experts = {name: each[name] for each in of_ranks for name in sorted(each)}


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "n_experts")
_TOP_K = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")
"""Common attribute names, mostly of Hugging Face's models, for the numbers of experts and of experts per token."""


def routed(router: nn.Module, outputs: Any, top_k: int) -> Tensor:
    """Return which tokens go to which experts: bool, shape (..., experts), where "..." are the tokens.

    ``outputs`` contain the experts of each token, as integers (..., experts per token) or as a mask (..., experts); or
    else the experts' scores (..., experts). Raises ValueError, with the reason, if they do not determine it.
    """
    tensors = [each.detach() for each in tensors_in(outputs)]
    scores = [each for each in tensors if each.is_floating_point() and each.dim()]
    decided = next((each for each in tensors if not each.is_floating_point() and each.dim() > 1), None)
    if decided is None:
        if not scores:
            raise ValueError(f"returns no expert scores, but a {type(outputs).__name__}")
        return _highest(router, scores, top_k)
    widest = max((each.shape[-1] for each in scores), default=0)
    experts = _attribute(_EXPERTS, router) or (widest if widest > decided.shape[-1] else _rows(router))
    if not experts:
        raise ValueError("returns the experts of each token, but not their number: give it num_experts")
    is_mask = decided.shape[-1] == experts and (decided.dtype == torch.bool or experts != top_k)
    return decided.bool() if is_mask else _one_hot(decided, experts)


def _highest(router: nn.Module, scores: Sequence[Tensor], top_k: int) -> Tensor:
    if hasattr(router, "e_score_correction_bias"):  # DeepSeek-V3's, applied outside of the router
        raise ValueError("returns only scores, to which e_score_correction_bias is added before experts are chosen")
    experts = _attribute(_EXPERTS, router)
    chosen = next((each for each in scores if each.shape[-1] == experts), scores[0])
    width = chosen.shape[-1]
    if isinstance(getattr(router, "weight", None), DTensor) and width < _rows(router):
        raise ValueError(f"is split over the ranks, and returns {width} of {_rows(router)} scores: leave it whole")
    return _one_hot(chosen.topk(min(top_k, width)).indices, width)


def _one_hot(chosen: Tensor, experts: int) -> Tensor:
    """Convert indices into a mask; an index without an expert (a dropped token) is left out."""
    return (chosen.unsqueeze(-1) == torch.arange(experts, device=chosen.device)).any(-2)


def _attribute(names: Sequence[str], owner: Any) -> int:
    """Return the first of these attributes that ``owner`` has as an integer; 0 if it has none."""
    found = (getattr(owner, name, None) for name in names)
    return next((value for value in found if type(value) is int), 0)


def _rows(router: nn.Module) -> int:
    """Return the rows of the router's weight matrix, one per expert; 0 if it has none."""
    weight = getattr(router, "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) and weight.dim() == 2 else 0
