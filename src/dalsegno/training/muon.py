"""MuonWithAdamW: Muon for the matrices of a model's blocks and AdamW for all other parameters, as one optimizer.

Muon: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks",
https://kellerjordan.github.io/posts/muon. Its second learning rate scale, which lets both share one learning rate and
weight decay: Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv:2502.16982, section 2.2.

torch.optim.Muon computes the same for whole tensors only; this class also updates DTensors, on any mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT

Scale = Literal["match_rms_adamw", "original"]

_SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}


class MuonWithAdamW(Optimizer):
    """Updates the parameter groups with ``use_muon=True`` by Muon, and the others by AdamW, each with decoupled weight
    decay.

    The momentum of a DTensor is sharded like its parameter. To orthogonalize it, each rank gathers one whole matrix at
    a time, in bfloat16, so that the update is that of an unsharded model; the computation is repeated on each rank, as
    under DDP.

    Args:
        params: parameters, or groups of them; a group's ``use_muon`` and other settings override those below.
        lr: learning rate of both.
        weight_decay: of both.
        use_muon: whether Muon updates the groups that do not set it. Its parameters must be matrices.
        momentum: decay of Muon's average of gradients, 0 to 1.
        nesterov: average the gradient once more before its use.
        ns_steps: iterations that orthogonalize a matrix.
        adjust_lr_fn: factor of Muon's learning rate for a matrix. ``match_rms_adamw``: 0.2·√max(rows, columns), so that
            updates are as large as AdamW's; ``original``: √max(1, rows/columns), for a learning rate of its own.
        betas: of AdamW.
        eps: of AdamW.

    Raises:
        ValueError: for a setting out of range, or a Muon parameter that is not a matrix.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.0,
        *,
        use_muon: bool = False,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: Scale = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum}; needs 0 or more, and less than 1")
        if not 1 <= ns_steps < 100:
            raise ValueError(f"ns_steps={ns_steps}; needs 1 to 99")
        if adjust_lr_fn not in _SCALES:
            raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r}; allowed are {', '.join(map(repr, _SCALES))}")
        self._adamw = AdamW([torch.zeros(0)], lr, betas, eps, weight_decay)
        muon = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, {**self._adamw.defaults, "use_muon": use_muon, **muon})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        shapes = [tuple(each.shape) for each in added["params"] if each.ndim != 2] if added["use_muon"] else []
        if shapes:
            raise ValueError(f"Muon updates matrices only, not a parameter of shape {shapes[0]}; use_muon=False")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._adamw = AdamW([torch.zeros(0)])  # a pickled optimizer has its groups and state only

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            if group["use_muon"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, parameter.grad, group)
        others = [group for group in self.param_groups if not group["use_muon"]]
        if others:
            self._adamw.param_groups, self._adamw.state = others, self.state
            self._adamw.step()
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, lr = self.state[parameter], float(group["lr"])
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
        rows, columns = parameter.shape
        scale = _SCALES[group["adjust_lr_fn"]](rows, columns)
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(_orthogonal_like(direction.bfloat16(), group["ns_steps"]), alpha=-lr * scale)


def _orthogonal_like(matrix: Tensor, steps: int) -> Tensor:
    """:func:`orthogonalized` of the whole matrix, sharded like ``matrix``. Collective, if it is sharded."""
    if not isinstance(matrix, DTensor):
        return orthogonalized(matrix, steps)
    mesh, whole = matrix.device_mesh, orthogonalized(matrix.full_tensor(), steps)
    copies = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copies.redistribute(placements=matrix.placements)  # each rank takes its part, without communication


def orthogonalized(matrix: Tensor, steps: int) -> Tensor:
    """Replace the singular values of a matrix, shape (rows, columns), by values of about 1.

    Newton-Schulz iteration of degree 5, whose coefficients are chosen for a steep slope at zero: values end between 0.7
    and 1.2, in 5 steps (Jordan et al. 2024).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=1e-7)  # the iteration needs singular values of at most 1
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide
