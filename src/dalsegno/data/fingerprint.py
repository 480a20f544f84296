"""By what a dataset is known again, in constant time: its length, and what a few of its samples hold."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dalsegno.component import Stateful
from dalsegno.randomness import preserved_generators, seed_generators

SAMPLES = 4
"""How many are looked at, spread over the whole length."""

PASSES = 3
"""How often each is looked at. Where it is another one each time, samples say nothing about the dataset."""

PATIENCE = 10.0
"""Seconds. A dataset whose samples take longer to come is known by its length alone."""

_TOLERANCE = 1e-3  # another machine rounds otherwise; another sample differs by far more


def fingerprint(data: Any, num_workers: int = 0) -> dict[str, Any]:
    """What tells this dataset from another one; plain values, to be kept and compared by :func:`same`.

    Only a map dataset is looked into, and only one without a state, which looking could change: nothing of an iterable
    one is consumed. Samples are fetched as in training, in a worker process where there are some, so that no file is
    opened in this process that must not be shared with them. The random generators are as before afterwards.

    Args:
        data: a dataset, or whatever else the training reads.
        num_workers: of the training.

    Returns:
        ``type`` (its class), ``length`` (None if it has none), ``fingerprint`` (what a Hugging Face dataset knows
        itself by, else None), ``samples`` (of each that was looked at: a hash of its texts, integers and forms, and
        mean and mean square of its floats; or None where that would mean nothing).
    """
    length, own = _length(data), getattr(data, "_fingerprint", None)
    return {
        "type": type(data).__qualname__,
        "length": length,
        "fingerprint": own if isinstance(own, str) else None,
        "samples": _looked_at(data, length, num_workers) if length and _is_map(data) else None,
    }


def same(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two fingerprints are of the same data, as far as both know it."""
    if saved["length"] != now["length"]:
        return False
    if saved["fingerprint"] is not None and saved["fingerprint"] == now["fingerprint"]:
        return True
    if saved["samples"] is None or now["samples"] is None:
        return True
    return len(saved["samples"]) == len(now["samples"]) and all(map(_alike, saved["samples"], now["samples"]))


def _alike(saved: Sequence[Any], now: Sequence[Any]) -> bool:
    (text, mean, square), (other_text, other_mean, other_square) = saved, now
    largest = max(square, other_square)
    is_near = abs(mean - other_mean) <= _TOLERANCE * math.sqrt(largest)
    return bool(text == other_text and is_near and abs(square - other_square) <= 2 * _TOLERANCE * largest)


def _is_map(data: Any) -> bool:
    return hasattr(data, "__getitem__") and not isinstance(data, IterableDataset | Stateful)


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _looked_at(data: Any, length: int, num_workers: int) -> list[list[Any]] | None:
    places = sorted({number * (length - 1) // (SAMPLES - 1) for number in range(SAMPLES)})
    looks = DataLoader(
        _Looks(data),
        sampler=places * PASSES,
        batch_size=None,
        num_workers=min(num_workers, 1),
        generator=torch.Generator(),  # else a number would be drawn from everybody's
    )
    try:
        with preserved_generators():
            began, seen = time.monotonic(), []
            for look in looks:
                seen.append(list(look))
                if time.monotonic() - began > PATIENCE:
                    return None
    except Exception:  # training is going to say what is wrong with it
        return None
    once = seen[: len(places)]
    return once if seen == once * PASSES else None


class _Looks(Dataset[tuple[str, float, float]]):
    """Of each sample only what is compared, drawn with the same random numbers each time."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __getitem__(self, index: int) -> tuple[str, float, float]:
        seed_generators(0)
        text, floats = xxhash.xxh3_64(), [0.0, 0.0, 0.0]
        for part in _parts(self._data[index], 0):
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
