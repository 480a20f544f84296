"""Loads of experts, summed over the ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from dalsegno.distributed import collectives


class LoadSums:
    """Sums the loads of all routers over all ranks, in one collective.

    A rank may run some of the routers only: those of its pipeline stage, or none on a batch that is padding. So ranks
    tell each other which routers they run, the first time and whenever a rank has run one that it had not before.
    Ranks that read the same data all count it, which changes no expert's share of the tokens.
    """

    def __init__(self, device: torch.device) -> None:
        """``device``: of the loads."""
        self._device = device
        self._run: dict[str, int] = {}  # number of experts of each router that this rank has run
        self._experts: dict[str, int] = {}  # of each router of all ranks, in the same order on all

    def __call__(self, loads: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Return each router's load by expert, of all ranks. Collective.

        Args:
            loads: those of this rank, int64, by router.
        """
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
