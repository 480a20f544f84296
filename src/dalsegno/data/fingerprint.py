"""By what a dataset is known again, in constant time: its length, and what a few of its samples hold.

The same looks show whether its samples come again where all random generators that can be found are as they were.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from dalsegno.distributed.rng import capture_generators, preserved_generators, seed_generators
from dalsegno.stateful.component import Stateful

from .generators import OwnGenerators

SAMPLES = 4
"""How many are looked at, spread over the whole length."""

PASSES = 3
"""How often each is looked at; at the first time a dataset may make what it needs later. Where a sample is another one
each time, samples say nothing about the dataset."""

PATIENCE = 10.0
"""Seconds. A dataset whose samples take longer to come is known by its length alone."""

_TOLERANCE = 1e-3  # another machine rounds otherwise; another sample differs by far more


class Looks(NamedTuple):
    """What a few samples have shown; nothing, where none could be looked at."""

    samples: list[list[Any]] | None = None
    """Of each a hash of its texts, integers and forms, and mean and mean square of its floats; None where that would
    mean nothing."""
    repeats: bool = True
    """Whether each was the same when the random generators were the same."""
    draws: bool = False
    """Whether random numbers were drawn for one."""


def fingerprint(data: Any, looks: Looks) -> dict[str, Any]:
    """What tells this dataset from another one; plain values, to be kept and compared by :func:`same`.

    Returns:
        ``type`` (its class), ``length`` (None if it has none), ``fingerprint`` (what a Hugging Face dataset knows
        itself by, else None), ``samples`` (those of ``looks``).
    """
    own = getattr(data, "_fingerprint", None)
    return {
        "type": type(data).__qualname__,
        "length": _length(data),
        "fingerprint": own if isinstance(own, str) else None,
        "samples": looks.samples,
    }


def look_at(data: Any, num_workers: int = 0, collate: Callable[[list[Any]], Any] | None = None) -> Looks:
    """Look at a few samples.

    Only a map dataset is looked into, and only one without a state, which looking could change: nothing of an iterable
    one is consumed. Samples are fetched as in training, in a worker process where there are some, so that no file is
    opened in this process that must not be shared with them. All random generators are as before afterwards.

    Args:
        data: a dataset, or whatever else the training reads.
        num_workers: of the training.
        collate: what makes batches of the samples; it is given each of them alone.
    """
    length = _length(data)
    if not length or not hasattr(data, "__getitem__") or isinstance(data, IterableDataset | Stateful):
        return Looks()
    places = sorted({number * (length - 1) // (SAMPLES - 1) for number in range(SAMPLES)})
    sight = _Sight(data, collate)
    looks = DataLoader(
        sight,
        sampler=places * PASSES,
        batch_size=None,
        num_workers=min(num_workers, 1),
        generator=torch.Generator(),  # else a number would be drawn from everybody's
    )
    try:
        with preserved_generators():
            began, seen = time.monotonic(), []
            for look in looks:
                seen.append(look)
                if time.monotonic() - began > PATIENCE:
                    return Looks()
    except Exception:  # training is going to say what is wrong with it
        return Looks()
    finally:
        sight.put_back()
    last, before = seen[-len(places) :], seen[-2 * len(places) : -len(places)]
    draws = any(drew for *_, drew in seen)
    if last != before:
        return Looks(None, False, draws)
    return Looks([list(look[:3]) for look in last], True, draws)


def same(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two fingerprints are of the same data, as far as both know it."""
    if saved["length"] != now["length"]:
        return False
    if saved["fingerprint"] is not None and saved["fingerprint"] == now["fingerprint"]:
        return True
    if saved["samples"] is None or now["samples"] is None:
        return True
    return len(saved["samples"]) == len(now["samples"]) and all(map(_alike, saved["samples"], now["samples"]))


def digest(value: Any) -> str:
    """A hash of a state, or whatever else consists of plain values, arrays and tensors: equal values, equal digests."""
    hashed = xxhash.xxh3_128()
    for part in _parts(value, 0):
        hashed.update(part.tobytes() if isinstance(part, np.ndarray) else part)
    return hashed.hexdigest()


def _alike(saved: Sequence[Any], now: Sequence[Any]) -> bool:
    (text, mean, square), (other_text, other_mean, other_square) = saved, now
    largest = max(square, other_square)
    is_near = abs(mean - other_mean) <= _TOLERANCE * math.sqrt(largest)
    return bool(text == other_text and is_near and abs(square - other_square) <= 2 * _TOLERANCE * largest)


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


class _Sight(Dataset[tuple[str, float, float, str, bool]]):
    """Of each sample only what is compared, drawn with the same random numbers each time."""

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self._data = data
        self._collate = collate
        self._own = OwnGenerators(dataset=data, collate_fn=collate)
        self._before = self._own.state_dict()

    def __getitem__(self, index: int) -> tuple[str, float, float, str, bool]:
        self.put_back()
        seed_generators(0)
        untouched = self._generators()
        sample = self._data[index]
        batch = "" if self._collate is None else self._collated(sample)
        drew = untouched != self._generators()
        if get_worker_info() is None:  # one that is made in a worker is out of reach of every checkpoint
            self._before = {**self._own.state_dict(), **self._before}
        return *_summary(sample), batch, drew

    def put_back(self) -> None:
        """The dataset's own generators are as before."""
        self._own.load_state_dict(self._before)

    def _generators(self) -> str:
        own = self._own.state_dict()
        return digest([capture_generators(), {way: own[way] for way in self._before}])

    def _collated(self, sample: Any) -> str:
        assert self._collate is not None
        try:
            return digest(self._collate([sample]))
        except Exception:  # it may need more than one
            return ""


def _summary(sample: Any) -> tuple[str, float, float]:
    text, floats = xxhash.xxh3_64(), [0.0, 0.0, 0.0]
    for part in _parts(sample, 0):
        if isinstance(part, np.ndarray):
            finite = part[np.isfinite(part)].astype(np.float64)
            for number, more in enumerate((finite.size, finite.sum(), np.square(finite).sum())):
                floats[number] += float(more)
        else:
            text.update(part)
    count, total, squares = floats
    return text.hexdigest(), total / max(count, 1.0), squares / max(count, 1.0)


def _parts(value: Any, depth: int) -> Iterator[bytes | np.ndarray]:
    """What is in a sample: floats as arrays, all else as bytes; of what is of an unknown type, the type."""
    yield type(value).__qualname__.encode()
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        value = value.to(torch.float64).numpy() if value.is_floating_point() else value.contiguous().view(-1).numpy()
    if isinstance(value, float | np.floating):
        value = np.asarray(float(value))
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        value = value.tolist()  # its bytes would be addresses
    if isinstance(value, np.ndarray):
        yield str(value.shape).encode()
        yield value if value.dtype.kind == "f" else value.tobytes()
    elif isinstance(value, str | bytes | bytearray):
        yield value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
    elif isinstance(value, bool | int | complex | np.generic) or value is None:
        yield str(value).encode()
    elif isinstance(value, Mapping | Sequence) and depth < 10:
        items = [each for item in value.items() for each in item] if isinstance(value, Mapping) else value
        for each in items:
            yield from _parts(each, depth + 1)
    elif callable(to_bytes := getattr(value, "tobytes", None)):  # an image
        yield to_bytes()
