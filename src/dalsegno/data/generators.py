"""OwnStates: finds, saves and restores the random generators owned by data: samplers, datasets, collate functions.

Torch's, NumPy's and Python's global generators belong to the process (see :mod:`dalsegno.distributed.rng`). A
``self.rng = np.random.default_rng(0)`` belongs to its object. Found are those in attributes of the loader, its
samplers, its dataset and its collate function, of objects in these attributes, and so on; also in lists, tuples and
dicts. Nothing is called and no property is read. An object with ``state_dict`` is skipped: it saves its own state. Of
samplers and collate functions, that state is saved here, too.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from dalsegno.distributed import accelerator
from dalsegno.distributed.rng import GeneratorStates
from dalsegno.errors import StateMismatch
from dalsegno.stateful.component import Stateful, held_attributes, is_stateful, stateful_behind

from .digests import digest
from .loader import CountingCollate

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState | np.random.BitGenerator

OBJECTS = 5_000
"""Maximum number of objects in a walk, which takes at most 5 ms. Breadth first, so objects near the data come first."""

ITEMS = 64
"""Maximum number of items visited per container."""

_LOADER_ATTRIBUTES = ("dataset", "sampler", "batch_sampler", "generator", "collate_fn")
_LEAVES = (
    *(types.ModuleType, types.FunctionType, type, property, staticmethod, classmethod, torch.Tensor, np.ndarray),
    *(str, bytes, bytearray, int, float, complex, type(None)),
)


class EpochGenerators(GeneratorStates):
    """All generators, as they are when an epoch begins."""

    own: dict[str, Any]
    """Those that the data owns, by path."""


class EpochGenerator(torch.Generator):
    """Lent to a loader, so that its workers' seeds are not drawn from a generator that others use."""


class OwnStates:
    """The generators reachable from ``roots``, by their paths: ``sampler.generator``, ``dataset.rng``; and the samplers
    and the collate function, as far as they have a ``state_dict``: ``batch_sampler``, ``collate_fn``.

    Searched anew at each call, since a dataset may create its generator when the first sample is read. ``roots``:
    starting points by name; an empty name adds no prefix to the path."""

    def __init__(self, **roots: Any) -> None:
        self._roots = roots
        self._seeded: list[Generator] | None = None

    def find(self) -> dict[str, Generator]:
        """Return each generator once, by its shortest path."""
        return dict(_walk(self._roots))

    def parts(self) -> dict[str, Stateful]:
        """The samplers and the collate function that have a state, each once."""
        found: dict[str, Stateful] = {}
        for name, thing in _handed_in(self._roots):
            part = stateful_behind(thing)
            if part is not None and not any(part is each for each in (*found.values(), *_datasets(self._roots))):
                found[name] = part
        return found

    def __bool__(self) -> bool:
        return bool(self.find() or self.parts())

    def state_dict(self) -> dict[str, Any]:
        states = {way: state_of(generator) for way, generator in self.find().items()}
        return {**states, **{name: copy.deepcopy(part.state_dict()) for name, part in self.parts().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore each generator and part. A part whose state is the saved one already is left alone: a sampler that is
        being read may take what is loaded for the place where its next iterator begins. Raises StateMismatch if one no
        longer exists, has another type, or does not take its state."""
        found, parts = (self.find(), self.parts()) if state else ({}, {})
        generators = {way: saved for way, saved in state.items() if way not in parts}
        for way, saved in generators.items():
            if way not in found or not _fits(found[way], saved):
                now = type(found[way]).__name__ if way in found else "missing"
                raise StateMismatch(
                    f"the random generator or state {way!r} of the data was saved, and now it is {now}; resume with "
                    "the original dataset, loader and collate function, or start from scratch"
                )
        for way, saved in generators.items():
            try:
                _set_state(found[way], saved)
            except (RuntimeError, TypeError, ValueError, OverflowError) as error:
                raise StateMismatch(f"the saved state of the random generator {way!r} of the data: {error}") from error
        for name, part in parts.items():
            if name in state and digest(part.state_dict()) != digest(state[name]):
                try:
                    part.load_state_dict(copy.deepcopy(state[name]))
                except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
                    raise StateMismatch(
                        f"the saved state of the {name} does not fit this {type(part).__name__}: {error!r}"
                    ) from error

    def seed(self, seeds: Iterator[int]) -> None:
        """Seed each generator from ``seeds``. Searches only once, because it is called for every micro-batch."""
        if self._seeded is None:
            self._seeded = list(self.find().values())
        for generator, seed in zip(self._seeded, seeds, strict=False):
            _seed(generator, seed)


def _walk(roots: Mapping[str, Any]) -> Iterator[tuple[str, Generator]]:
    waiting = deque(roots.items())
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
    while waiting:
        way, thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, Generator):
            if not is_shared(thing):
                yield way, thing
        elif isinstance(thing, DataLoader) or not is_stateful(thing):
            parts = (each for each in _parts_of(thing) if not isinstance(each[1], _LEAVES))
            room = max(0, OBJECTS - len(seen) - len(waiting))
            waiting.extend((f"{way}{step}".lstrip("."), part) for step, part in itertools.islice(parts, room))


def is_shared(generator: Generator) -> bool:
    """Whether the generator belongs to the process or the run, or has no state."""
    return isinstance(generator, EpochGenerator | random.SystemRandom) or any(
        generator is each
        for each in (
            torch.default_generator,
            *accelerator.default_generators(),
            np.random.mtrand._rand,
            np.random.mtrand._rand._bit_generator,
            getattr(random, "_inst", None),
        )
    )


def _parts_of(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, dict | list | tuple | deque) and type(thing).__module__ not in ("builtins", "collections"):
        yield from _attributes(thing)
    if isinstance(thing, DataLoader):
        yield from ((f".{name}", getattr(thing, name, None)) for name in _LOADER_ATTRIBUTES)
    elif isinstance(thing, dict):
        yield from ((f"[{key!r}]", value) for key, value in itertools.islice(thing.items(), ITEMS))
    elif isinstance(thing, list | tuple | deque):
        yield from ((f"[{index}]", value) for index, value in enumerate(itertools.islice(thing, ITEMS)))
    elif isinstance(thing, functools.partial):
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    elif isinstance(thing, types.MethodType | types.BuiltinMethodType):  # e.g. random.Random(0).random
        yield ".__self__", thing.__self__
    else:
        yield from _attributes(thing)


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    held = held_attributes(thing)
    yield from ((f".{name}", value) for name, value in held.items())
    for name, value in [item for kind in type(thing).__mro__ for item in vars(kind).items()]:
        if not (name in held or name.startswith("__")):
            yield f".{name}", value


def state_of(generator: Generator) -> Any:
    """Return a state that the codec supports. For NumPy, a dict with the name of the bit generator."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return _bit_generator_of(generator).state


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _bit_generator_of(generator).state = state


def _seed(generator: Generator, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    else:
        bits = _bit_generator_of(generator)
        bits.state = type(bits)(seed).state


def _bit_generator_of(generator: Any) -> Any:
    if isinstance(generator, np.random.BitGenerator):
        return generator
    return generator._bit_generator if isinstance(generator, np.random.RandomState) else generator.bit_generator


def _fits(generator: Generator, state: Any) -> bool:
    """Whether the state has the layout of this generator's; with another one NumPy would read out of bounds."""
    now = state_of(generator)
    return _layout(now) == _layout(state) and _is_in_range(state)


def _layout(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: value if key == "bit_generator" else _layout(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_layout(each) for each in state] if len(state) < 10 else len(state)
    if isinstance(state, np.ndarray | torch.Tensor):
        return str(state.dtype), tuple(state.shape)
    return None


def _is_in_range(state: Any) -> bool:
    """Check the positions in the buffers of a Mersenne Twister or Philox."""
    if not isinstance(state, dict):
        return True
    inner = state.get("state")
    places = [(inner["pos"], len(inner["key"]))] if isinstance(inner, dict) and "pos" in inner else []
    if "buffer_pos" in state:
        places.append((state["buffer_pos"], len(state["buffer"])))
    return all(isinstance(place, int) and 0 <= place <= length for place, length in places)


def _handed_in(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Samplers and collate functions. A loader with a ``state_dict`` saves its samplers itself."""
    for name, root in roots.items():
        if name == "collate_fn":
            yield name, root
        elif isinstance(root, DataLoader):
            collate = root.collate_fn
            yield "collate_fn", collate.collate if isinstance(collate, CountingCollate) else collate
            if not is_stateful(root):
                yield "sampler", root.sampler
                yield "batch_sampler", root.batch_sampler
                yield "batch_sampler.sampler", getattr(root.batch_sampler, "sampler", None)


def _datasets(roots: Mapping[str, Any]) -> Iterator[Any]:
    """The data, whose state is saved elsewhere if at all, also where one of its methods collates."""
    for name, root in roots.items():
        data = root.dataset if isinstance(root, DataLoader) else root if name == "dataset" else None
        yield from (data, getattr(data, "dataset", None))
