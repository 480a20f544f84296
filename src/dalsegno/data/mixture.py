"""Mixture: several datasets read as one stream, each with its share of the samples.

Which dataset a sample comes from is a pure function of (seed, epoch, number of the sample), so a position consists of
counts. All readers (ranks, and their worker processes) follow the same plan, and each loads only its own samples of it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypedDict

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from dalsegno.distributed.rng import MIXTURE, SAMPLE, WORD, mix
from dalsegno.errors import ConfigurationError, StateMismatch, expect_known
from dalsegno.stateful.annotations import check_types
from dalsegno.stateful.schema import Count, check

from .generators import OwnStates
from .map_loader import takes_seed
from .permutation import permute, uniform

logger = logging.getLogger("dalsegno")

_BLOCK = 1024
"""Numbers that are drawn at once: NumPy's cost per call is that of hundreds of them."""


class MixtureState(TypedDict):
    epoch: Count
    drawn: Count
    """Samples of the epoch, of all readers."""
    taken: dict[str, Count]
    """The same, by dataset, over all passes of the epoch."""
    generators: dict[str, Any]


class Plan(TypedDict):
    """What determines the order of a mixture's samples."""

    seed: int
    stopping_strategy: str
    datasets: list[str]
    lengths: list[int]
    """Number of samples of each."""
    bounds: list[float]
    """Where the share of each dataset but the last ends, between 0 and 1."""


class Mixture(IterableDataset[Any]):
    """Samples of several map datasets in random order, each dataset with its share, shuffled anew in each pass over it.

    Pass it as ``train_dataset=``. Its position is saved in each checkpoint, per rank and worker process, so a resume
    needs as many of both. Nothing is read again. A resume with another mixture (weights, seed, order of the names, a
    dataset that has grown) is refused; with ``allow_changes="dataset"``, each dataset continues at its own position.

    Args:
        datasets: map datasets, by name.
        weights: share of the samples, by the same names; they need not add up to 1. None: equal shares.
        seed: of the order of datasets, and of their samples.
        stopping_strategy: end of an epoch. ``first_exhausted``: when a sample is due of a dataset that has been read to
            its end. ``all_exhausted``: when that is so for all of them; those that end before begin a new pass.

    Raises:
        ConfigurationError: for no dataset, an empty one, one without ``__len__`` and ``__getitem__``, or weights that
            are not numbers over 0, one for each dataset.
        UnknownName: for an unknown strategy, or a weight without a dataset.
    """

    @check_types
    def __init__(
        self,
        datasets: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        *,
        seed: int = 0,
        stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted",
    ) -> None:
        _check_datasets(datasets)
        self.datasets, self.weights = dict(datasets), _checked_weights(datasets, weights)
        self.seed, self.stopping_strategy = seed, stopping_strategy
        self._readers, self._reader = 1, 0
        self._generators = OwnStates(**self.datasets)
        self._names = [*self.datasets]
        self._lengths = {name: len(each) for name, each in self.datasets.items()}
        shares = np.cumsum([*self.weights.values()])
        self._bounds = shares[:-1] / shares[-1]
        self._restart(epoch=0)

    @property
    def plan(self) -> Plan:
        """Equal for mixtures whose samples have the same order."""
        return {
            "seed": int(self.seed) & WORD,
            "stopping_strategy": self.stopping_strategy,
            "datasets": [*self._lengths],
            "lengths": [*self._lengths.values()],
            "bounds": self._bounds.tolist(),
        }

    def split_by_rank(self, rank: int, world_size: int) -> Mixture:
        """Return the part of a rank: every ``world_size``-th sample of the plan."""
        strategy: Any = self.stopping_strategy
        part = Mixture(self.datasets, self.weights, seed=self.seed, stopping_strategy=strategy)
        part._readers, part._reader = world_size, rank
        return part

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch. Does not move within the present one."""
        if epoch != self._epoch:
            self._restart(epoch)

    def _restart(self, epoch: int) -> None:
        self._epoch, self._drawn, self._taken = epoch, 0, dict.fromkeys(self.datasets, 0)
        self._is_resumed = False
        self._choices: tuple[int, Any] = (-1, ())  # the present block of the plan, and its number
        self._indices: dict[str, tuple[int, Any]] = {}  # the same of each dataset's shuffled indices

    def __iter__(self) -> Iterator[Any]:
        if not self._is_resumed:
            self._restart(self._epoch)
        self._is_resumed = False
        readers, reader = self._readers, self._reader
        if (worker := get_worker_info()) is not None:
            readers, reader = readers * worker.num_workers, reader * worker.num_workers + worker.id
        return self._samples(readers, reader)

    def _samples(self, readers: int, reader: int) -> Iterator[Any]:
        while (name := self._next_dataset()) is not None:
            number, place = self._drawn, self._taken[name]
            self._drawn, self._taken[name] = number + 1, place + 1
            if number % readers == reader:
                yield self._sample(name, place)

    def _next_dataset(self) -> str | None:
        block, offset = divmod(self._drawn, _BLOCK)
        if self._choices[0] != block:
            drawn = uniform(block * _BLOCK, _BLOCK, mix(MIXTURE, self.seed, self._epoch))
            self._choices = block, np.searchsorted(self._bounds, drawn, side="right").tolist()
        name = self._names[self._choices[1][offset]]
        due = [name] if self.stopping_strategy == "first_exhausted" else self._names
        return None if all(self._taken[each] >= self._lengths[each] for each in due) else name

    def _sample(self, name: str, place: int) -> Any:
        data = self.datasets[name]
        index = self._index(name, place)
        if takes_seed(data):
            return data.__getitem__(index, seed=mix(SAMPLE, self.seed, self._epoch, self._drawn))
        return data[index]

    def _index(self, name: str, place: int) -> int:
        length = self._lengths[name]
        pass_, within = divmod(place, length)
        block, offset = divmod(within, _BLOCK)
        cached, indices = self._indices.get(name, (-1, None))
        wanted = pass_ * -(-length // _BLOCK) + block
        if cached != wanted:
            places = np.arange(block * _BLOCK, min(length, (block + 1) * _BLOCK), dtype=np.uint64)
            indices = permute(places, length, mix(MIXTURE, self.seed, self._epoch, self._names.index(name), pass_))
            self._indices[name] = wanted, indices
        return int(indices[offset])

    def state_dict(self) -> MixtureState:
        return {
            "epoch": self._epoch,
            "drawn": self._drawn,
            "taken": dict(self._taken),
            "generators": self._generators.state_dict(),
        }

    def load_state_dict(self, state: Any) -> None:
        """Raises StateMismatch for a state that no mixture can have saved."""
        check(state, MixtureState, "mixture")
        if sum(state["taken"].values()) != state["drawn"]:
            raise StateMismatch(f"mixture: {state['drawn']} samples are drawn, but by dataset {state['taken']}")
        if state["taken"].keys() != self.datasets.keys():
            logger.warning(
                "the saved position is in a mixture of %s, now it is of %s: those of both continue at their positions",
                ", ".join(state["taken"]),
                ", ".join(self.datasets),
            )
        self._restart(state["epoch"])
        self._drawn, self._taken, self._is_resumed = state["drawn"], {**self._taken, **state["taken"]}, True
        self._generators.load_state_dict(state["generators"])


def _check_datasets(datasets: Mapping[str, Any]) -> None:
    if not isinstance(datasets, Mapping) or not datasets:
        raise ConfigurationError("Mixture: needs datasets by name, {'web': web, 'code': code}")
    for name, data in datasets.items():
        is_map = hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)
        if not is_map:
            raise ConfigurationError(
                f"Mixture: {name!r} is a {type(data).__name__}, not a map dataset, which has __len__ and __getitem__; "
                "mix streams with their own library (datasets.interleave_datasets, streaming.Stream)"
            )
        if hasattr(data, "state_dict"):
            raise ConfigurationError(f"Mixture: {name!r} has a state_dict, which a mixture does not save; remove it")
        if not len(data):
            raise ConfigurationError(f"Mixture: {name!r} is empty")


def _checked_weights(datasets: Mapping[str, Any], weights: Mapping[str, float] | None) -> dict[str, float]:
    if weights is None:
        return dict.fromkeys(datasets, 1.0)
    expect_known("Mixture: dataset in weights", weights, datasets)
    missing = [name for name in datasets if name not in weights]
    wrong = {name: each for name, each in weights.items() if not (0 < each < math.inf)}
    if missing or wrong:
        raise ConfigurationError(
            f"Mixture: weights={dict(weights)}; needs a number over 0 for each of {', '.join(datasets)}"
        )
    return {name: float(weights[name]) for name in datasets}
