"""MetricAccumulator: the mean loss, gradient norms and token counts between two records, without device syncs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, TypedDict

import torch

from dalsegno.distributed import accelerator
from dalsegno.distributed.layout import Layout
from dalsegno.stateful.schema import Count, Must

_FOLD_AT = 512  # tensors held before they are summed; bounds memory if nothing is ever logged


Row = Annotated[
    torch.Tensor, Must("a row of floats", lambda row: row.dim() == 1 and len(row) and row.is_floating_point())
]


class MeterState(TypedDict):
    losses: Row | None
    loss_sum: float
    steps: Count
    grad_norms: Row | None
    grad_norm: float | None
    max_grad_norm: float | None
    run_loss_sum: float
    run_steps: Count
    tokens: Count
    run_tokens: Count


class MetricAccumulator:
    """Losses, gradient norms and token counts of this rank since the last record, and totals of the run.

    A component, so that a kill loses none. Losses stay tensors on the device until a record is due; then all of them
    are read in one sync.
    """

    state_scope = "per_rank"
    state_schema = MeterState

    def __init__(self, layout: Layout | None = None, device: torch.device | str = "cpu") -> None:
        """``layout``: which ranks read the same data; None: each its own."""
        self._layout = layout or Layout.flat()
        self._device = device
        self._losses: list[torch.Tensor] = []  # this rank's shares, not yet summed
        self._loss_sum = 0.0
        self._steps = 0
        self._grad_norms: list[torch.Tensor] = []
        self._grad_norm: float | None = None  # of the last step
        self._max_grad_norm: float | None = None
        self._run_loss_sum = 0.0
        self._run_steps = 0
        self._last: tuple[torch.Tensor, ...] = ()  # loss and norm of the last step
        self._tokens = 0
        self.run_tokens = 0  # on all ranks, as of the last record

    def add(self, loss: torch.Tensor, grad_norm: torch.Tensor | None, tokens: int) -> None:
        """Count one step, with this rank's share of its loss and tokens, and the gradient norm of all ranks."""
        self._tokens += tokens
        self._losses.append(loss)
        self._last = (loss,)
        if grad_norm is not None:
            self._grad_norms.append(grad_norm)
            self._last = loss, grad_norm
        if len(self._losses) == _FOLD_AT:
            self._fold()

    def _fold(self) -> None:
        """Read all losses and norms; waits for the device once."""
        if not self._losses:
            return
        values = accelerator.LateNumbers([*self._losses, *self._grad_norms]).values()
        losses, norms = values[: len(self._losses)], values[len(self._losses) :]
        earlier = [] if self._max_grad_norm is None else [self._max_grad_norm]
        is_known_of_each = len(norms) == len(losses) and (bool(earlier) or self._steps == 0)
        has_nan = any(map(math.isnan, earlier + norms))  # which max() may miss
        self._max_grad_norm = (math.nan if has_nan else max(earlier + norms)) if is_known_of_each else None
        self._grad_norm = norms[-1] if norms else self._grad_norm
        self._loss_sum = sum(losses, self._loss_sum)
        self._steps += len(losses)
        self._losses.clear()
        self._grad_norms.clear()

    def tokens_seen(self) -> int:
        """Tokens of the run on all ranks; since the last record, this rank's count stands for the other data ranks'."""
        return self.run_tokens + self._tokens * self._layout.data_size

    def is_broken(self) -> bool:
        """Whether this rank's loss of the last step, or its gradient norm, is NaN or infinite."""
        return not all(math.isfinite(float(each)) for each in self._last)

    def sums(self) -> list[float]:
        """Return this rank's losses and tokens since the last record, each summed."""
        self._fold()
        return [self._loss_sum, float(self._tokens)]

    def start_over(self, sums: Sequence[Sequence[float]]) -> dict[str, float]:
        """Forget the steps since the last record, of which ``sums`` has every rank's :meth:`sums`. Returns ``loss``
        (the mean over these steps), ``grad_norm`` (of the last one) and ``max_grad_norm``; each only if known, the
        last only if it is of each step: without clipping, the norms between two records are not computed."""
        loss_sum, tokens = self._layout.totals(sums)
        figures: dict[str, float] = {}
        if self._steps:
            figures["loss"] = loss_sum / self._steps
        norms = {"grad_norm": self._grad_norm, "max_grad_norm": self._max_grad_norm}
        figures |= {name: norm for name, norm in norms.items() if norm is not None}
        self._run_loss_sum += loss_sum
        self._run_steps += self._steps
        self.run_tokens += int(tokens)
        self._loss_sum, self._steps, self._tokens = 0.0, 0, 0
        self._grad_norm = self._max_grad_norm = None
        return figures

    def run_loss(self) -> float | None:
        """Mean loss over all steps of the run; resets nothing. Collective."""
        self._fold()
        (loss_sum,) = self._layout.sum_floats([self._loss_sum], "the loss of the run")
        steps = self._run_steps + self._steps
        return (self._run_loss_sum + loss_sum) / steps if steps else None

    def state_dict(self) -> MeterState:
        return {
            "losses": torch.stack(self._losses) if self._losses else None,
            "loss_sum": self._loss_sum,
            "steps": self._steps,
            "grad_norms": torch.stack(self._grad_norms) if self._grad_norms else None,
            "grad_norm": self._grad_norm,
            "max_grad_norm": self._max_grad_norm,
            "run_loss_sum": self._run_loss_sum,
            "run_steps": self._run_steps,
            "tokens": self._tokens,
            "run_tokens": self.run_tokens,
        }

    def load_state_dict(self, state: MeterState) -> None:
        self._losses = self._separate(state["losses"])
        self._loss_sum, self._steps = state["loss_sum"], state["steps"]
        self._grad_norms = self._separate(state["grad_norms"])
        self._grad_norm, self._max_grad_norm = state["grad_norm"], state["max_grad_norm"]
        self._run_loss_sum, self._run_steps = state["run_loss_sum"], state["run_steps"]
        self._tokens, self.run_tokens = state["tokens"], state["run_tokens"]

    def _separate(self, stacked: torch.Tensor | None) -> list[torch.Tensor]:
        return [] if stacked is None else list(stacked.to(self._device).unbind())

    @classmethod
    def reshard(cls, states: Sequence[MeterState], world_size: int) -> list[MeterState]:
        """Data rank 0 gets the sums over all; values that are global or counted in steps stay equal on each."""
        meters = []
        for state in states:
            meter = cls()
            meter.load_state_dict(state)
            meter._fold()
            meters.append(meter)
        first, *others = meters
        first._loss_sum += sum(meter._loss_sum for meter in others)
        first._tokens += sum(meter._tokens for meter in others)
        total = first.state_dict()
        rest: MeterState = {**total, "loss_sum": 0.0, "tokens": 0}
        return [total, *[rest] * (world_size - 1)]
