"""What a run is going to read, looked at before it begins: known again, the same on all ranks, and repeatable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError
from dalsegno.stateful.component import Stateful

from .fingerprint import Looks, fingerprint, look_at, same
from .order_check import keeps_its_order, order_of


@dataclass(frozen=True, slots=True)
class TrainingData:
    """A dataset, or a loader of the user's own."""

    dataset: Any = None
    loader: Any = None
    collate_fn: Any = None
    num_workers: int = 0

    @classmethod
    def of_loader(cls, loader: Any) -> TrainingData:
        """A loader with what is known to be in it."""
        return cls(
            getattr(loader, "dataset", loader),
            loader,
            getattr(loader, "collate_fn", None),
            getattr(loader, "num_workers", 0),
        )

    def examine(self) -> tuple[dict[str, Any], list[str]]:
        """The fingerprint, and what will not be the same after a resume, a sentence each. Collective.

        Raises:
            ConfigurationError: on all ranks, if they are given different datasets.
        """
        if self.loader is not None:  # each rank may have a part of its own
            return collectives.from_rank_zero(self._examine_alone)
        found, doubts = collectives.run_on_all_ranks(self._examine_alone)
        _expect_same("train_dataset", found)
        return collectives.broadcast((found, doubts), "what rank 0 has seen of the data")

    def _examine_alone(self) -> tuple[dict[str, Any], list[str]]:
        looks = look_at(self.dataset, self.num_workers, self.collate_fn)
        return fingerprint(self.dataset, looks), self._doubts(looks)

    def _doubts(self, looks: Looks) -> list[str]:
        name, loader, doubts = type(self.dataset).__name__, self.loader, []
        by_state = isinstance(loader, StatefulDataLoader) and keeps_its_order(loader)
        if not looks.repeats:
            where = " in a worker process" if self.num_workers else ""
            doubts.append(
                f"{name}: a sample, or the batch made of it, is another one{where} although all random generators that "
                "can be found are as before; what it depends on is not saved. Draw from the global generators, or from "
                "one that is an attribute of the dataset since it was built"
            )
        elif looks.draws and loader is not None and self.num_workers and (by_state or loader.persistent_workers):
            doubts.append(
                f"{name} draws random numbers in worker processes of a loader of your own, "
                + ("which does not save them" if by_state else "which live longer than an epoch (persistent_workers)")
                + "; hand over the dataset instead, as train_dataset="
            )
        if not by_state and order_of(loader) == "unknown":
            doubts.append(
                "the sampler of your loader gives another order at each pass although all random generators that can "
                "be found are as before; let it depend on its generator, or on set_epoch(epoch), alone"
            )
        is_plain = isinstance(loader, DataLoader) and not isinstance(loader, StatefulDataLoader)
        if is_plain and isinstance(self.dataset, Stateful) and not self.num_workers:
            doubts.append(
                f"{name} has a state_dict, which a plain DataLoader does not save; use torchdata's StatefulDataLoader, "
                "or hand over the dataset"
            )
        return doubts


def expect_same_length(argument: str, dataset: Any) -> None:
    """Already when a dataset is handed over, since the ranks could not even be joined in steps. Collective.

    Raises:
        ConfigurationError: on all ranks, if what they are given as ``argument`` is not equally long.
    """
    _expect_same(argument, fingerprint(dataset, Looks()))


def _expect_same(argument: str, found: dict[str, Any]) -> None:
    """
    Raises:
        ConfigurationError: on all ranks, if the fingerprints of what they are given as ``argument`` differ.
    """
    everywhere = collectives.gather(found, "the datasets of all ranks")
    others = [rank for rank, theirs in enumerate(everywhere) if not same(everywhere[0], theirs)]
    if not others:
        return
    lengths = [each["length"] for each in everywhere]
    differ = [f"{lengths[rank]} samples on rank {rank}" for rank in [0, *others[:3]]]
    what = ", ".join(differ) if len(set(lengths)) > 1 else f"rank 0 has other samples than rank {others}"
    raise ConfigurationError(
        f"{argument}: the ranks see different datasets: {what}; each rank is given the whole dataset, in the same "
        "order, and takes its share by itself. A dataset that is split already goes into a loader of your own"
    )
