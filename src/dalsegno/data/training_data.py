"""TrainingData: checks a run's data before it starts: identity, equality across ranks, and repeatability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError
from dalsegno.stateful.component import Stateful, stateful_behind

from .fingerprint import ProbeResult, fingerprint, probe, same
from .torchdata_loaders import StatefulDataLoader, keeps_its_order


@dataclass(frozen=True, slots=True)
class TrainingData:
    """A dataset, or the user's own loader."""

    dataset: Any = None
    loader: Any = None
    collate_fn: Any = None
    num_workers: int = 0

    @classmethod
    def of_loader(cls, loader: Any) -> TrainingData:
        """Describe a loader, with the dataset and collate function that it is known to have."""
        return cls(
            getattr(loader, "dataset", loader),
            loader,
            getattr(loader, "collate_fn", None),
            getattr(loader, "num_workers", 0),
        )

    def examine(self) -> tuple[dict[str, Any], list[str]]:
        """Return the fingerprint, and a sentence for each thing that a resume would not reproduce. Collective. Raises
        ConfigurationError on all ranks, if their datasets differ."""
        if self.loader is not None:  # each rank may have its own part
            return collectives.from_rank_zero(self._examine_alone)
        found, problems = collectives.run_on_all_ranks(self._examine_alone)
        _expect_same("train_dataset", found)
        return collectives.broadcast((found, problems), "what rank 0 has seen of the data")

    def _examine_alone(self) -> tuple[dict[str, Any], list[str]]:
        probed = probe(self.dataset, self.num_workers, self.collate_fn)
        return fingerprint(self.dataset, probed), self._problems(probed)

    def _problems(self, probed: ProbeResult) -> list[str]:
        name, loader, problems = type(self.dataset).__name__, self.loader, []
        by_state = isinstance(loader, StatefulDataLoader) and keeps_its_order(loader)
        if not probed.repeats:
            where = " in a worker process" if self.num_workers else ""
            problems.append(
                f"{name}: a sample, or the batch made of it, changes{where} although all known random generators are "
                "reset; what it depends on is not saved. Draw from the global generators, or from one that is an "
                "attribute of the dataset since it was built"
            )
        elif probed.draws and loader is not None and self.num_workers and (by_state or loader.persistent_workers):
            problems.append(
                f"{name} draws random numbers in worker processes of your own loader, "
                + ("which does not save them" if by_state else "which outlive an epoch (persistent_workers)")
                + "; pass the dataset instead, as train_dataset="
            )
        is_plain = isinstance(loader, DataLoader) and not isinstance(loader, Stateful)
        if is_plain and isinstance(self.dataset, Stateful) and not self.num_workers:
            problems.append(
                f"{name} has a state_dict, which a plain DataLoader does not save; use torchdata's StatefulDataLoader, "
                "or pass the dataset"
            )
        if self.num_workers and stateful_behind(self.collate_fn) is not None:
            problems.append(
                "the collate function has a state_dict, and what it keeps in worker processes is not saved; use "
                "num_workers=0 (dataloader_num_workers=0)"
            )
        return problems


def check_same_length(argument: str, dataset: Any) -> None:
    """Check lengths before any loader is built: ranks with different ones could not step together. Collective. Raises
    ConfigurationError on all ranks, if the lengths of what they pass as ``argument`` differ."""
    _expect_same(argument, fingerprint(dataset, ProbeResult()))


def _expect_same(argument: str, found: dict[str, Any]) -> None:
    """Raises ConfigurationError on all ranks, if the fingerprints of what they pass as ``argument`` differ."""
    everywhere = collectives.gather(found, "the datasets of all ranks")
    others = [rank for rank, theirs in enumerate(everywhere) if not same(everywhere[0], theirs)]
    if not others:
        return
    lengths = [each["length"] for each in everywhere]
    differ = [f"{lengths[rank]} samples on rank {rank}" for rank in [0, *others[:3]]]
    what = ", ".join(differ) if len(set(lengths)) > 1 else f"rank 0 has other samples than rank {others}"
    raise ConfigurationError(
        f"{argument}: the ranks see different datasets: {what}; pass the whole dataset on each rank, in the same "
        "order; the trainer splits it. If your dataset is already split, pass your own loader"
    )
