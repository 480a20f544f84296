"""Checks a run's data before it starts: identity, equality across ranks, and repeatability.

The fingerprint of a dataset is its length and hashes of a few samples, in constant time. Probing these samples
also shows whether they repeat when all known random generators are reset.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, get_worker_info

from dalsegno.distributed import collectives
from dalsegno.distributed.rng import capture_generators, preserved_generators, seed_generators
from dalsegno.errors import ConfigurationError
from dalsegno.stateful.component import Stateful, stateful_behind

from .digests import digest, parts_of
from .generators import OwnStates
from .loader import length_of
from .mixture import Mixture
from .torchdata_loaders import StatefulDataLoader, keeps_its_order

SAMPLES = 4
"""Number of probed samples, spread over the whole length; of each dataset of a mixture."""

PASSES = 3
"""How often each sample is read; the first time a dataset may create what it needs later. If a sample changes between
passes, samples cannot identify the dataset."""

PROBE_TIMEOUT_S = 10.0
"""Seconds. A dataset whose samples take longer is identified by its length alone."""

_TOLERANCE = 1e-3  # rounding differs between machines; different samples differ by far more


class ProbeResult(NamedTuple):
    """Result of probing a few samples; the defaults if none could be probed."""

    samples: list[list[Any]] | None = None
    """For each sample, a hash of its strings, integers and shapes, and the mean and mean square of its floats; None if
    samples do not repeat."""
    repeats: bool = True
    """Whether each sample was equal when the random generators were reset."""
    draws: bool = False
    """Whether reading a sample drew random numbers."""


def fingerprint(data: Any, probed: ProbeResult) -> dict[str, Any]:
    """Describe a dataset by plain values, for saving and for comparison by :func:`same`.

    Returns:
        ``type`` (its class), ``length`` (None if it has none), ``fingerprint`` (that of a Hugging Face dataset, else
        None), ``samples`` (those of ``probed``), and of a mixture ``plan``.
    """
    own = getattr(data, "_fingerprint", None)
    described = {
        "type": type(data).__qualname__,
        "length": length_of(data),
        "fingerprint": own if isinstance(own, str) else None,
        "samples": probed.samples,
    }
    return {**described, "plan": data.plan} if isinstance(data, Mixture) else described


def probe(data: Any, num_workers: int = 0, collate: Callable[[list[Any]], Any] | None = None) -> ProbeResult:
    """Probe a few samples.

    Only map datasets without state are probed: reading could change the state, and would consume an iterable dataset.
    Samples are fetched as in training, in a worker process if there are any, so that this process opens no file that
    must not be shared with them. All random generators are restored afterwards.

    Args:
        data: a dataset, or any other training data.
        num_workers: as in training.
        collate: the collate function; called on each sample alone.
    """
    parts = [*data.datasets.values()] if isinstance(data, Mixture) else [data]
    data = ConcatDataset(parts) if isinstance(data, Mixture) else data
    if not length_of(data) or not hasattr(data, "__getitem__") or isinstance(data, IterableDataset | Stateful):
        return ProbeResult()
    places = [*_places(map(len, parts))]
    dataset = _Probe(data, collate)
    order = places * PASSES
    looks: Iterable[Any] = map(dataset.__getitem__, order)
    if num_workers:
        generator = torch.Generator()  # else a number would be drawn from the global generator
        looks = DataLoader(dataset, None, sampler=order, num_workers=1, generator=generator)
    try:
        with preserved_generators():
            began, seen = time.monotonic(), []
            for look in looks:
                seen.append(look)
                if time.monotonic() - began > PROBE_TIMEOUT_S:
                    return ProbeResult()
    except Exception:  # training will raise the same error
        return ProbeResult()
    finally:
        dataset.restore()
    last, before = seen[-len(places) :], seen[-2 * len(places) : -len(places)]
    draws = any(drew for *_, drew in seen)
    repeats = last == before
    return ProbeResult([list(look[:3]) for look in last] if repeats else None, repeats, draws)


def _places(lengths: Iterable[int]) -> Iterator[int]:
    begin = 0
    for length in lengths:
        yield from sorted({begin + number * (length - 1) // (SAMPLES - 1) for number in range(SAMPLES)})
        begin += length


def same(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two fingerprints may be of the same data, as far as both contain the same information."""
    if saved["length"] != now["length"]:
        return False
    if "plan" in saved and "plan" in now and saved["plan"] != now["plan"]:
        return False
    if saved["fingerprint"] is not None and saved["fingerprint"] == now["fingerprint"]:
        return True
    if saved["samples"] is None or now["samples"] is None:
        return True
    return len(saved["samples"]) == len(now["samples"]) and all(map(_similar, saved["samples"], now["samples"]))


def _similar(saved: Sequence[Any], now: Sequence[Any]) -> bool:
    (text, mean, square), (other_text, other_mean, other_square) = saved, now
    largest = max(square, other_square)
    is_near = abs(mean - other_mean) <= _TOLERANCE * math.sqrt(largest)
    return bool(text == other_text and is_near and abs(square - other_square) <= 2 * _TOLERANCE * largest)


class _Probe(Dataset[tuple[str, float, float, str, bool]]):
    """Reads of each sample only what is compared, with the same random numbers each time."""

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self._data = data
        self._collate = collate
        self._own = OwnStates(dataset=data, collate_fn=collate)
        self._before = self._own.state_dict()
        self._untouched: tuple[Any, ...] = ()

    def __getitem__(self, index: int) -> tuple[str, float, float, str, bool]:
        self.restore()
        seed_generators(0)
        if self._before or not self._untouched:  # else the process's alone, seeded alike before each read
            self._untouched = self._generators()
        sample = self._data[index]
        batch = self._collated(sample)
        drew = self._untouched != self._generators()
        if get_worker_info() is None:  # a generator that a worker creates is not reachable from a checkpoint
            self._before = {**self._own.state_dict(), **self._before}
        return *_summary(sample), batch, drew

    def restore(self) -> None:
        """Restore the generators of the dataset, and what the collate function keeps."""
        self._own.load_state_dict(self._before)

    def _generators(self) -> tuple[Any, ...]:
        """States of the process's and the dataset's own generators, to be compared."""
        states = capture_generators()
        own = self._own.state_dict() if self._before else {}
        return states["python"], digest([states["numpy"], states["torch"], {way: own[way] for way in self._before}])

    def _collated(self, sample: Any) -> str:
        try:
            return digest(None if self._collate is None else self._collate([sample]))
        except Exception:  # it may need more than one sample
            return ""


def _summary(sample: Any) -> tuple[str, float, float]:
    text, floats = xxhash.xxh3_64(), np.zeros(3)
    for part in parts_of(sample):
        if isinstance(part, np.ndarray):
            finite = part[np.isfinite(part)].astype(np.float64)
            floats += (finite.size, finite.sum(), np.square(finite).sum())
        else:
            text.update(part)
    count, total, squares = floats.tolist()
    return text.hexdigest(), total / max(count, 1.0), squares / max(count, 1.0)


Examined = tuple[dict[str, Any], list[str]]
"""A fingerprint, and a sentence for each thing that a resume would not reproduce."""


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

    def examine(self) -> Examined:
        """Return the fingerprint, that of rank 0, and a sentence for each thing that a resume would not reproduce.
        Collective. Raises ConfigurationError on all ranks, if their datasets differ."""
        if self.loader is not None:  # each rank may have its own part
            return collectives.from_rank_zero(self._examine_alone)
        return _examined_alike("train_dataset", self._examine_alone)

    def _examine_alone(self) -> Examined:
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
    _examined_alike(argument, lambda: (fingerprint(dataset, ProbeResult()), []))


def _examined_alike(argument: str, examine: Callable[[], Examined]) -> Examined:
    """Return what ``examine`` returns, with rank 0's fingerprint. Raises ConfigurationError on all ranks, if the
    fingerprints of what they pass as ``argument`` differ."""
    (found, problems), are_equal = collectives.run_and_compare(examine, lambda examined: sorted(examined[0].items()))
    if are_equal:
        return found, problems
    everywhere = collectives.gather(found, "the datasets of all ranks")
    others = [rank for rank, theirs in enumerate(everywhere) if not same(everywhere[0], theirs)]
    if not others:
        return everywhere[0], problems
    lengths = [each["length"] for each in everywhere]
    differ = [f"{lengths[rank]} samples on rank {rank}" for rank in [0, *others[:3]]]
    what = ", ".join(differ) if len(set(lengths)) > 1 else f"rank 0 has other samples than rank {others}"
    raise ConfigurationError(
        f"{argument}: the ranks see different datasets: {what}; pass the whole dataset on each rank, in the same "
        "order; the trainer splits it. If your dataset is already split, pass your own loader"
    )
