"""Routing decisions of a mixture of experts: which tokens go to which experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .module_outputs import tensors_in

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "n_experts")
_TOP_K = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")
"""Common attribute names, mostly of Hugging Face's models, for the numbers of experts and of experts per token."""


def experts_of_a_token(router: nn.Module, config: Any) -> int:
    """Return the number of experts per token from the router's attributes, else from ``config``; else 1."""
    return _attribute(_TOP_K, router) or _attribute(_TOP_K, config) or 1


def routed(router: nn.Module, outputs: Any, top_k: int) -> Tensor:
    """Return which tokens go to which experts: bool, shape (..., experts), where "..." are the tokens.

    Args:
        router: the module.
        outputs: its output, which contains the experts of each token, as integers (..., experts per token) or as a mask
            (..., experts); or else the experts' scores (..., experts).
        top_k: number of experts per token.

    Raises:
        ValueError: if the outputs do not determine it; the message gives the reason.
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
