"""Unsaved: state of the user's own code that training changes and no checkpoint contains.

A state takes effect when it likes, perhaps long after the steps that a resumed leg repeats. So it is looked for where
it is: in the objects and functions that the run was given, in what these refer to by attributes, containers, closures
and names of globals, and so on, as far as the user's own code defines it; of a package that is installed, only in what
holds the user's. Values are compared with those before the first step. What a checkpoint contains is passed over.
"""

from __future__ import annotations

import dis
import functools
import itertools
import logging
import re
import sys
import sysconfig
import time
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dalsegno.data import NOT_EXACT
from dalsegno.data.digests import add_batch
from dalsegno.data.generators import OBJECTS, Generator, is_shared, state_of
from dalsegno.events.adapters import CallbackAdapter
from dalsegno.events.callback import Callback
from dalsegno.stateful.component import TensorHolder, is_stateful

logger = logging.getLogger("dalsegno")

SHARE = 0.003
"""Fraction of the training time that witnessing may take."""

FIRST = 3
"""Steps and saves that are witnessed in any case."""

ITEMS = 64
"""Items of a container that are looked at; of a longer one, also its length."""

_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))
_CONTENTS = (torch.Tensor, np.ndarray, itertools.count, *get_args(Generator))
_CONTAINERS = (dict, list, tuple, set, deque)
_USERS = (Optimizer, LRScheduler)
"""Or of a class of the user's."""
_STRUCTURE = "the structure of "
_CLOCKS = (time.time, time.perf_counter, time.monotonic, time.time_ns, time.perf_counter_ns, time.monotonic_ns)
_OF_MODULE = vars(nn.Module()).keys()
_OF_OPTIMIZER = vars(torch.optim.SGD([torch.zeros(1)])).keys()
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Unsaved:
    """Of one rank.

    Args:
        callbacks: those of the run; of these with a state, it is what they want to be saved.
        given: what else the user has given to the run, by name.
        saved: what checkpoints contain; of modules, with all submodules.
    """

    def __init__(
        self,
        callbacks: Callable[[], Iterable[Callback]],
        given: Mapping[str, object],
        saved: Callable[[], Collection[object]],
    ) -> None:
        self._callbacks = callbacks
        self._given = given
        self._saved = saved
        self._began = [clock() for clock in _CLOCKS]  # a number since then is a time
        self._known: dict[str, Any] = {}
        self._names: set[str] = set()
        self._looks = self._said = 0
        self._is_first_step = True
        self._cost, self._last = 0.0, time.perf_counter()  # seconds that a look takes; when the last one ended

    def begin(self) -> None:
        """What is there before the leg's first step is the script's."""
        self._known, self._looks, self._said, self._names = self._values(), 0, 0, set()
        self._is_first_step = True

    def end_first_step(self) -> None:
        """What the leg's first step sets, the next leg's sets again; what changes after it, too, is found then. New
        attributes are made by each leg, items may be of a state."""
        if self._is_first_step:
            self._known |= {way: value for way, value in self._values().items() if way in self._known or "[" in way}
            self._is_first_step = False

    def names(self) -> str:
        """What training has changed since the first step; empty if nothing."""
        began = time.perf_counter()
        for way, value in self._values().items():
            if way in self._known and self._is_lost(self._known[way], value):
                self._names.add(way.partition("[")[0])
            if way in self._known or "[" in way:
                self._known[way] = value
        self._looks += 1
        self._last = time.perf_counter()
        self._cost = self._last - began
        found = sorted(self._names)
        return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if found[5:] else "")

    def warn(self) -> None:
        """At a save. Looks at the first three in any case, then so that it takes no more than 0.3 % of the time."""
        if self._is_first_step or (self._looks >= FIRST and self._cost > SHARE * (time.perf_counter() - self._last)):
            return
        names = self.names()
        if len(self._names) > self._said:
            self._said = len(self._names)
            logger.warning(
                "a resumed run may differ from an uninterrupted one: training has changed %s, which no checkpoint "
                "contains. %s",
                names,
                self._advice(),
                extra={NOT_EXACT: True},
            )

    def _advice(self) -> str:
        for each in self._callbacks():
            lost = tuple(
                sorted(name.removeprefix(f"{each.key}.") for name in self._names if name.startswith(f"{each.key}."))
            )
            if lost and isinstance(each, CallbackAdapter):
                kind = type(each.__wrapped__).__name__
                name = "" if each.key == kind else f", name={each.key!r}"
                return (
                    "Give the class state_dict and load_state_dict, or name what to save: "
                    f"dalsegno.adapt({kind}(…){name}, state={lost!r})"
                )
        if any(name.startswith(_STRUCTURE) for name in self._names):
            return "Build the model so before training begins: one of another structure cannot load the checkpoint"
        return (
            "Keep it in an object with state_dict and load_state_dict that the run saves, or in a buffer of the model"
        )

    def _roots(self) -> dict[str, object]:
        roots = dict(self._given)
        for each in self._callbacks():
            if isinstance(each, CallbackAdapter):
                roots |= {f"{each.key}.{name}": value for name, value in each.unsaved_attributes().items()}
            elif not (is_stateful(each) or isinstance(each, TensorHolder)):
                roots[each.key] = each
        return roots

    def _is_lost(self, before: Any, value: Any) -> bool:
        """Not if an object was made only now, as in a cache, nor the time."""
        if before == value or before != before or isinstance(before, _Digest) != isinstance(value, _Digest):
            return False
        clocks = zip(self._began, _CLOCKS, strict=True)
        return not any(type(value) is type(began) and began <= value <= clock() for began, clock in clocks)

    def _values(self) -> dict[str, Any]:
        try:
            return dict(_Walk(self._saved()).leaves(self._roots()))
        except Exception as error:  # another thread changes a container meanwhile, a tensor of a kind that is new
            logger.debug("state that no checkpoint contains was not looked for: %r", error)
            return {}


class _Digest(NamedTuple):
    """Of a tensor, an array, a generator."""

    contents: str


class _Walk:
    """One walk, breadth first."""

    def __init__(self, saved: Collection[object]) -> None:
        modules = [each for thing in saved if isinstance(thing, nn.Module) for each in thing.modules()]
        tensors = [each for module in modules for each in (*module._parameters.values(), *module._buffers.values())]
        groups = [each for thing in saved if isinstance(thing, Optimizer) for each in thing.param_groups]
        self._saved = {id(each) for each in (*saved, *modules, *tensors, *groups)}

    def leaves(self, roots: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
        """Plain values, and digests of others, each once and by its shortest path."""
        waiting: deque[tuple[str, Any]] = deque(roots.items())
        seen: dict[int, object] = {}  # keeps the objects alive, so that no id is reused
        while waiting:
            way, thing = waiting.popleft()
            kind = _kind(type(thing))  # type: ignore[arg-type]
            if kind is _PLAIN:
                yield way, thing
            elif id(thing) not in seen:
                seen[id(thing)] = thing
                if kind is _CONTENTS:
                    if id(thing) not in self._saved and not (isinstance(thing, Generator) and is_shared(thing)):
                        yield way, _digest(thing)
                else:
                    room = max(0, OBJECTS - len(seen) - len(waiting))
                    waiting.extend(itertools.islice(self._parts(way, thing, kind), room))

    def _parts(self, way: str, thing: Any, kind: object) -> Iterator[tuple[str, object]]:
        if kind is _CONTAINERS:
            if id(thing) not in self._saved:
                yield from _items(way, thing)
        elif kind is nn.Module:
            yield from self._of_module(way, thing)
        elif kind is functools.partial:
            yield from ((way, each) for each in (thing.func, thing.args, thing.keywords))
        elif kind is types.MethodType:
            yield from ((way, each) for each in (thing.__self__, thing.__func__))
        elif kind is types.FunctionType:
            yield from _variables(thing)
        elif kind is type:
            if _is_users(thing.__module__):
                yield from ((f"{thing.__name__}.{name}[of the class]", value) for name, value in _members(thing))
                yield from ((way, base) for base in thing.__bases__)
        elif id(thing) in self._saved:
            yield from self._beside_state(way, thing)
        elif kind is _USERS:
            yield from _attributes(way, thing)
        elif "." not in way:  # such as a callback of dalsegno's around functions of the user's
            yield from ((way, each) for each in _functions_in(getattr(thing, "__dict__", {}).values()))

    def _of_module(self, way: str, module: nn.Module) -> Iterator[tuple[str, object]]:
        held, is_saved = vars(module), id(module) in self._saved
        for name, value in list(held.items()):
            # Small ones are among the flags of the run, which are saved.
            if name not in _OF_MODULE and not (is_saved and (isinstance(value, torch.Tensor) or _is_plain(value))):
                yield f"{way}.{name}", value
        tensors = {**module._parameters, **module._buffers}
        if is_saved:
            yield f"{_STRUCTURE}{way}", " ".join([*tensors, *module._modules])
            yield from ((f"{way}.{name}", each) for name, each in module._modules.items())
        else:
            yield from ((f"{way}[{name}]", each) for name, each in (*tensors.items(), *module._modules.items()))
        hooks = [held.get(name) for name in _HOOKS]
        hooks += [getattr(each, "_backward_hooks", None) for each in tensors.values()]
        yield from ((way, each) for of_one in hooks if of_one for each in list(of_one.values()))
        yield way, type(module)

    def _beside_state(self, way: str, thing: Any) -> Iterator[tuple[str, object]]:
        """What an object has, whose state is saved, that is not in the state."""
        held = vars(thing)
        if isinstance(thing, LRScheduler):  # saves its attributes, functions excepted
            yield from ((way, each) for each in _functions_in(held.values()))
        elif isinstance(thing, Optimizer) and type(thing).state_dict is Optimizer.state_dict:
            added = [(name, value) for name, value in list(held.items()) if name not in _OF_OPTIMIZER]
            yield from (
                (f"{way}.{name}", value) for name, value in added if not isinstance(value, (*_PLAIN, torch.Tensor))
            )


def _items(way: str, thing: Any) -> Iterator[tuple[str, object]]:
    if isinstance(thing, dict):
        items = enumerate(itertools.islice(list(thing.items()), ITEMS))
        yield from ((f"{way}[{key if type(key) is str else number}]", value) for number, (key, value) in items)
    else:
        yield f"{way}[len]", len(thing)
        if not isinstance(thing, set):
            yield from ((f"{way}[{index}]", value) for index, value in enumerate(itertools.islice(list(thing), ITEMS)))


def _attributes(way: str, thing: object) -> Iterator[tuple[str, object]]:
    """Also those that the class has a value for, which the first change replaces in the object."""
    kinds = [kind for kind in reversed(type(thing).__mro__) if _is_users(kind.__module__)]
    held = {name: value for kind in kinds for name, value in _members(kind) if isinstance(value, _PLAIN)}
    held |= getattr(thing, "__dict__", {})
    if not hasattr(type(thing), "set_epoch"):  # else a resume sets again what depends on the epoch
        yield from ((f"{way}.{name}", value) for name, value in held.items())
    yield way, type(thing)


def _members(kind: type) -> Iterator[tuple[str, object]]:
    for name, value in list(vars(kind).items()):
        if isinstance(value, staticmethod | classmethod):
            yield name, value.__func__
        elif isinstance(value, property):
            yield name, value.fget
        elif not name.startswith("__") or isinstance(value, types.FunctionType):
            yield name, value


def _variables(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """What a function of the user's keeps outside of its calls."""
    code = function.__code__
    if not _is_users_file(code.co_filename):
        return
    name = function.__qualname__.rpartition("<locals>.")[2]
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{name}(): {variable}", cell.cell_contents
        except ValueError:  # empty
            continue
    yield from ((f"{name}(): a default", each) for each in function.__defaults__ or ())
    yield from (
        (f"{name}(): {each}", function.__globals__[each]) for each in _globals(code) if each in function.__globals__
    )
    yield from ((f"{name}.{each}", value) for each, value in vars(function).items())


@functools.lru_cache(maxsize=4096)
def _globals(code: types.CodeType) -> tuple[str, ...]:
    """Names of globals that a function, or one inside it, reads or sets."""
    own = [each.argval for each in dis.get_instructions(code) if each.opname.endswith("_GLOBAL")]
    inner = [name for each in code.co_consts if isinstance(each, types.CodeType) for name in _globals(each)]
    return tuple(dict.fromkeys([*own, *inner]))


def _functions_in(values: Any) -> Iterator[object]:
    for value in list(values):
        for each in _several(value):
            if isinstance(each, types.FunctionType | types.MethodType | functools.partial):
                yield each


def _several(value: Any) -> list[Any]:
    if not isinstance(value, _CONTAINERS):
        return [value]
    return [*itertools.islice(list(value.values() if isinstance(value, dict) else value), ITEMS)]


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (
        type(value) in (list, tuple, dict) and all(isinstance(each, _PLAIN) for each in _several(value))
    )


@functools.lru_cache(maxsize=4096)
def _kind(of: type) -> object:
    """What a walk does with the objects of a class."""
    known = (_PLAIN, _CONTENTS, _CONTAINERS, nn.Module, functools.partial, types.MethodType, types.FunctionType, type)
    found = next((kind for kind in known if issubclass(of, kind)), None)
    return found or (_USERS if issubclass(of, _USERS) or _is_users(of.__module__) else None)


def _digest(value: Any) -> _Digest:
    hashed, elsewhere = xxhash.xxh3_64(), list[torch.Tensor]()
    if isinstance(value, Generator):
        value = state_of(value)
    elif isinstance(value, itertools.count):
        value = repr(value)
    elif isinstance(value, DTensor):
        value = value.to_local()
    add_batch(hashed, value, on_device=elsewhere)
    for each in elsewhere:  # reading it would wait for the device
        hashed.update(f"{each.data_ptr()} {each._version}".encode())
    return _Digest(hashed.hexdigest())


@functools.lru_cache(maxsize=4096)
def _is_users(module: str) -> bool:
    """Whether the user's own code defines it, and not a package that is installed."""
    if module.partition(".")[0] in ("dalsegno", "builtins", *sys.stdlib_module_names) and module != "__main__":
        return False
    return _is_users_file(getattr(sys.modules.get(module), "__file__", None) or "<input>")


_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]|^<frozen ")
_LIBRARIES = str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))


@functools.lru_cache(maxsize=4096)
def _is_users_file(path: str) -> bool:
    return not (_INSTALLED.search(path) or path.startswith(_LIBRARIES))
