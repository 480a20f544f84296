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
import os
import re
import sys
import sysconfig
import time
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import timedelta
from decimal import Decimal
from enum import Enum
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
from dalsegno.data.digests import LARGE, add_batch
from dalsegno.data.generators import OBJECTS, Generator, is_shared, state_of
from dalsegno.errors import first_few
from dalsegno.events.adapters import CallbackAdapter
from dalsegno.events.callback import Callback
from dalsegno.stateful.component import TensorHolder, held_attributes, is_stateful, own_attributes

logger = logging.getLogger("dalsegno")

SHARE = 0.003
"""Fraction of the training time that witnessing may take."""

FIRST = 3
"""Steps and saves that are witnessed in any case."""

ITEMS = 64
"""Items of a container that are looked at; of a longer one, also its length."""

_LONGEST = 300
"""Letters of a path that is followed."""

_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None), Enum, Decimal, timedelta, frozenset)
_CONTENTS = (torch.Tensor, np.ndarray, itertools.count, *get_args(Generator))
_CONTAINERS = (dict, list, tuple, set, deque)
_USERS = (Optimizer, LRScheduler, types.SimpleNamespace)
"""Or of a class of the user's."""
_STRUCTURE = "the structure of "
_OF_CLASS = "[of the class]"
_COUNT = "[count]"
_FUNCTIONS = (functools.partial, types.MethodType, types.FunctionType)
_USES = ("_GLOBAL", "_DEREF", "STORE_ATTR")
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
        self._counts: dict[str, tuple[int, int]] = {}  # of metrics: before and after the first step, which updated them
        self._looks = self._said = 0
        self._is_first_step = True
        self._cost, self._last = 0.0, time.perf_counter()  # seconds that a look takes; when the last one ended

    def begin(self) -> dict[str, str]:
        """What is there before the leg's first step is the script's. Returns digests of its tensors, arrays and
        generators, except those on a device: each leg should begin with the same."""
        self._known, self._looks, self._said, self._names = self._values(), 0, 0, set()
        self._is_first_step = True
        return {way: each.contents for way, each in self._known.items() if isinstance(each, _Digest) and each.is_read}

    def expect(self, names: Iterable[str]) -> None:
        """What a leg before this one has changed: this one need not find it again, unless it is saved now."""
        self._names |= {way.partition("[")[0] for way in self._known} & {*names}
        self._said = len(self._names)

    def found(self) -> list[str]:
        """What the last look knew."""
        return sorted(self._names)

    def end_first_step(self) -> None:
        """What the leg's first step sets, the next leg's sets again, but for the structure of a model, into which the
        checkpoint is loaded before; what changes after it, too, is found then. New attributes are made by each leg,
        items may be of a state."""
        if self._is_first_step:
            values = self._values()
            counts = {way: (self._known.get(way, value), value) for way, value in values.items() if _COUNT in way}
            self._counts = {way: (before, after) for way, (before, after) in counts.items() if before != after}
            known = {way for way in self._known if not way.startswith(_STRUCTURE)}
            self._known |= {way: value for way, value in values.items() if way in known or "[" in way}
            self._is_first_step = False

    def names(self) -> list[str]:
        """What training has changed since the first step."""
        began, known = time.perf_counter(), self._known
        if values := {way: each for way, each in self._values().items() if way in known or "[" in way}:
            lost = [way for way, each in values.items() if way in known and self._is_lost(way, known[way], each)]
            self._names |= {way.partition("[")[0] for way in lost}
            self._known = {way: each for way, each in known.items() if "[" not in way} | values
        self._looks += 1
        self._last = time.perf_counter()
        self._cost = self._last - began
        return self.found()

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
                first_few(names, 5),
                self._advice(),
                extra={NOT_EXACT: True},
            )

    def _advice(self) -> str:
        for each in self._callbacks():
            lost = tuple(
                sorted(name.removeprefix(f"{each.key}.") for name in self._names if name.startswith(f"{each.key}."))
            )
            if lost and isinstance(each, CallbackAdapter) and not any("." in name for name in lost):
                kind = type(each.__wrapped__).__name__
                name = "" if each.key == kind else f", name={each.key!r}"
                return (
                    "Give the class state_dict and load_state_dict, or name what to save: "
                    f"dalsegno.adapt({kind}(…){name}, state={lost!r})"
                )
        if any(name.startswith(_STRUCTURE) for name in self._names):
            return (
                "Build the model so before training begins, or call it on a batch: another cannot load the checkpoint"
            )
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

    def _is_lost(self, way: str, before: Any, value: Any) -> bool:
        """Not if an object or an item was made only now, as in a cache, nor the time; nor if a metric is updated by
        evaluations only, or has been reset, perhaps for one update."""
        if _COUNT in way:
            return value not in self._counts.get(way, (value,))
        is_made_now = before is None and way.endswith("]") and not way.endswith(_OF_CLASS)
        if is_made_now or isinstance(before, _Digest) != isinstance(value, _Digest) or _is_same(before, value):
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
    is_read: bool
    """Not if it is on a device: then it tells of changes, not of the contents."""


_Variable = tuple[int, str]
"""Of a cell; or of a module, and the name."""


class _Walk:
    """One walk, breadth first."""

    def __init__(self, saved: Collection[object]) -> None:
        modules = [each for thing in saved if isinstance(thing, nn.Module) for each in thing.modules()]
        tensors = [each for module in modules for each in (*module._parameters.values(), *module._buffers.values())]
        groups = [each for thing in saved if isinstance(thing, Optimizer) for each in thing.param_groups]
        self._saved = {id(each) for each in (*saved, *modules, *tensors, *groups)} | {*_inside(saved)}
        self._set: set[_Variable] = set()  # by functions
        self._read: list[tuple[str, _Variable, object]] = []  # numbers and texts

    def leaves(self, roots: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
        """Plain values, and digests of others, each once and by its shortest path."""
        waiting: deque[tuple[str, Any]] = deque(roots.items())
        seen: dict[int, object] = {}  # keeps the objects alive, so that no id is reused
        while waiting:
            way, thing = waiting.popleft()
            if len(way) > _LONGEST:
                continue
            kind = _kind(thing)
            if kind is _PLAIN:
                yield way, thing
            elif id(thing) not in seen:
                seen[id(thing)] = thing
                if kind is _CONTENTS:
                    if id(thing) not in self._saved and (contents := _contents(thing)) is not None:
                        yield way, contents
                else:
                    room = max(0, OBJECTS - len(seen) - len(waiting))
                    waiting.extend(itertools.islice(self._parts(way, thing, kind), room))
        yield from ((way, value) for way, variable, value in self._read if variable in self._set)

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
            yield from self._variables(thing)
        elif kind is type:
            if _is_users(thing.__module__):
                yield from ((f"{thing.__name__}.{name}{_OF_CLASS}", value) for name, value in _members(thing))
                yield from ((way, base) for base in thing.__bases__)
        elif id(thing) in self._saved:
            yield from self._beside_state(way, thing)
        elif kind is _USERS:
            yield from _attributes(way, thing)
        elif "." not in way and kind is not types.ModuleType:  # such as a callback around functions of the user's
            yield from ((way, each) for each in _functions_in(list(own_attributes(thing).values())))

    def _of_module(self, way: str, module: nn.Module) -> Iterator[tuple[str, object]]:
        held, is_saved = vars(module), id(module) in self._saved
        has_said = _sets_again(type(module)) or type(module).get_extra_state is not nn.Module.get_extra_state
        is_users = any(_is_users(kind.__module__) for kind in type(module).__mro__) and not has_said
        for name, value in list(held.items()):
            # Small ones are among the flags of the run, which are saved.
            if name in _OF_MODULE or (is_saved and (issubclass(type(value), torch.Tensor) or _is_plain(value))):
                continue
            if is_users or _kind(value) in _FUNCTIONS:
                yield f"{way}.{name}", value
        if not is_saved and _is_metric(type(module)):
            yield from _counts(way, held)
        tensors = {**module._parameters, **module._buffers}
        if is_saved:
            persistent = [name for name in tensors if name not in held.get("_non_persistent_buffers_set", ())]
            yield f"{_STRUCTURE}{way}", " ".join([*persistent, *module._modules])
            yield from ((f"{way}.{name}", each) for name, each in module._modules.items())
        else:
            yield from ((f"{way}[{name}]", each) for name, each in (*tensors.items(), *module._modules.items()))
        hooks = [held.get(name) for name in _HOOKS]
        hooks += [getattr(each, "_backward_hooks", None) for each in tensors.values()]
        yield from ((way, each) for of_one in hooks if of_one for each in list(of_one.values()))
        yield way, type(module)

    def _variables(self, function: types.FunctionType) -> Iterator[tuple[str, object]]:
        """What a function of the user's keeps outside of its calls. A number or a text counts if a function sets it;
        the loop around sets its own again."""
        code, names = function.__code__, function.__globals__
        if not _is_users_file(code.co_filename):
            return
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        outside = {each: (id(cells[each]), "") for each in _names(code, "_DEREF") if each in cells}
        outside |= {each: (id(names), each) for each in _names(code, "_GLOBAL") if each in names}
        is_set = (*_names(code, "STORE_DEREF"), *_names(code, "STORE_GLOBAL"))
        self._set |= {outside[each] for each in is_set if each in outside}
        called = function.__qualname__.rpartition("<locals>.")[2]
        for name, variable in outside.items():
            try:
                value = cells[name].cell_contents if name in cells else names[name]
            except ValueError:  # empty
                continue
            if _kind(value) is _PLAIN:
                self._read.append((f"{called}(): {name}", variable, value))
            else:
                yield f"{called}(): {name}", value
        yield from ((f"{called}(): a default", each) for each in function.__defaults__ or ())
        yield from ((f"{called}.{name}", value) for name, value in vars(function).items())

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


def _inside(containers: Iterable[Any], depth: int = 0) -> Iterator[int]:
    """What the containers among these contain, as far as a walk would look at it, by ``id``."""
    for each in containers:
        if _kind(each) is _CONTAINERS and depth < 8:
            yield from (id(part) for part in _several(each) if _kind(part) is not _PLAIN)
            yield from _inside(_several(each), depth + 1)


def _items(way: str, thing: Any) -> Iterator[tuple[str, object]]:
    if isinstance(thing, dict):  # of a cache, items may move
        items = enumerate(_first(dict.items(thing)))
        yield from (
            (f"{way}[{key!r}]" if type(key) in _PLAIN else f"{way}[{number}]", value) for number, (key, value) in items
        )
    else:
        first = _first(_iterate(thing))
        if not any(_is_of_a_step(each) for each in first):
            yield f"{way}[len]", int(_builtin(thing).__len__(thing))  # without a method of the user's
        if not isinstance(thing, set):
            yield from ((f"{way}[{index}]", value) for index, value in enumerate(first))


def _first(items: Iterable[Any]) -> list[Any]:
    """Without a copy of a long container."""
    return list(itertools.islice(items, ITEMS))


def _iterate(container: Any) -> Iterator[Any]:
    """Without methods of the user's."""
    base = _builtin(container)
    items: Iterator[Any] = iter(dict.values(container)) if base is dict else base.__iter__(container)
    return items


def _builtin(container: object) -> Any:
    return next(each for each in _CONTAINERS if issubclass(type(container), each))


def _attributes(way: str, thing: object) -> Iterator[tuple[str, object]]:
    """Also those that the class has a value for, which the first change replaces in the object."""
    kinds = [kind for kind in reversed(type(thing).__mro__) if _is_users(kind.__module__)]
    held = {name: value for kind in kinds for name, value in _members(kind) if _kind(value) is _PLAIN}
    held |= held_attributes(thing)
    theirs = _of_libraries(type(thing))  # type: ignore[arg-type]
    if not _sets_again(type(thing)):
        yield from ((f"{way}.{name}", value) for name, value in held.items() if name not in theirs)
    elif _is_metric(type(thing)):
        yield from _counts(way, held)
    yield way, type(thing)


def _counts(way: str, held: Mapping[str, object]) -> list[tuple[str, object]]:
    return [(f"{way}{_COUNT}.{name}", value) for name, value in held.items() if type(value) is int]


@functools.lru_cache(maxsize=4096)
def _of_libraries(kind: type) -> frozenset[str]:
    """Attributes that bases of a class set, if these are not the user's: a thread's, a progress bar's."""
    bases = [each for each in kind.__mro__ if not _is_users(each.__module__) and not issubclass(each, _USERS)]
    methods = [each for base in bases for _, each in _members(base) if isinstance(each, types.FunctionType)]
    return frozenset(name for method in methods for name in _names(method.__code__, "STORE_ATTR"))


def _sets_again(kind: type) -> bool:
    """Whether a resume sets again what depends on the epoch, or each evaluation what it counts."""
    return hasattr(kind, "set_epoch") or _is_metric(kind)


def _is_metric(kind: type) -> bool:
    return hasattr(kind, "reset") and hasattr(kind, "compute")


def _members(kind: type) -> Iterator[tuple[str, object]]:
    for name, value in list(vars(kind).items()):
        if isinstance(value, staticmethod | classmethod):
            yield name, value.__func__
        elif isinstance(value, property):
            yield name, value.fget
        elif not name.startswith("__") or isinstance(value, types.FunctionType):
            yield name, value


def _names(code: types.CodeType, use: str) -> list[str]:
    """Names that a function, or one inside it, reads or sets by instructions that end so."""
    return list(dict.fromkeys(name for instruction, name in _uses(code) if instruction.endswith(use)))


@functools.lru_cache(maxsize=4096)
def _uses(code: types.CodeType) -> tuple[tuple[str, str], ...]:
    found = [(each.opname, each.argval) for each in dis.get_instructions(code) if each.opname.endswith(_USES)]
    inner = [use for each in code.co_consts if isinstance(each, types.CodeType) for use in _uses(each)]
    return tuple(dict.fromkeys([*found, *inner]))


def _functions_in(values: Any) -> Iterator[object]:
    for value in list(values):
        for each in _several(value):
            if _kind(each) in _FUNCTIONS:
                yield each


def _several(value: Any) -> list[Any]:
    return _first(_iterate(value)) if _kind(value) is _CONTAINERS else [value]


def _is_plain(value: object) -> bool:
    several = _several(value) if type(value) in (list, tuple, dict) else [value]
    return all(_kind(each) is _PLAIN for each in several)


def _kind(thing: object) -> object:
    """What a walk does with it. Not ``isinstance``, which asks a proxy for its class."""
    return _kind_of_class(type(thing))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def _kind_of_class(of: type) -> object:
    known = (_PLAIN, _CONTENTS, _CONTAINERS, nn.Module, *_FUNCTIONS, type, types.ModuleType)
    found = next((kind for kind in known if issubclass(of, kind)), None)
    return found or (_USERS if issubclass(of, _USERS) or _is_users(of.__module__) else None)


def _contents(thing: Any) -> _Digest | None:
    """None if they belong to the process or to a step, or a tensor is of a kind that cannot be read."""
    try:
        is_passing = _is_of_a_step(thing) or (isinstance(thing, Generator) and is_shared(thing))
        return None if is_passing else _digest(thing)
    except Exception:
        return None


def _digest(value: Any) -> _Digest:
    hashed, elsewhere = xxhash.xxh3_64(), list[torch.Tensor]()
    if isinstance(value, Generator):
        value = state_of(value)
    elif isinstance(value, itertools.count):
        value = repr(value)
    elif isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor | np.ndarray):
        value = _thinned(value)
    add_batch(hashed, value, on_device=elsewhere)
    for each in elsewhere:  # reading it would wait for the device
        hashed.update(f"{each.data_ptr()} {each._version}".encode())
    return _Digest(hashed.hexdigest(), not elsewhere)


def _is_of_a_step(thing: Any) -> bool:
    """Whether it is a tensor of a step's graph, such as an output that a hook keeps for the loss."""
    return issubclass(type(thing), torch.Tensor) and thing.grad_fn is not None


def _is_same(before: Any, value: Any) -> bool:
    """Or cannot be compared."""
    try:
        return bool(before == value or before != before)
    except Exception:  # a class of the user's that is a number or a text
        return True


def _thinned(value: Any) -> Any:
    """The first objects; and some rows, or columns, of a large view, which would be copied to be read."""
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return value.flat[:ITEMS]
    if isinstance(value, torch.Tensor):
        is_copied = value.layout == torch.strided and not value.is_nested and not value.is_contiguous()
    else:
        is_copied = not (value.flags.c_contiguous or value.flags.f_contiguous)
    if not is_copied or value.nbytes <= LARGE:
        return value
    axis = max(range(value.ndim), key=lambda each: value.shape[each])
    step = slice(None, None, -(-value.nbytes // LARGE))
    return (value.detach() if isinstance(value, torch.Tensor) else value)[(slice(None),) * axis + (step,)]


@functools.lru_cache(maxsize=4096)
def _is_users(module: object) -> bool:
    """Whether the user's own code defines it, and not a package that is installed."""
    if not isinstance(module, str):
        return False
    if module.partition(".")[0] in ("dalsegno", "builtins", *sys.stdlib_module_names) and module != "__main__":
        return False
    parents = itertools.accumulate(module.split("."), "{}.{}".format)  # one without a file is a part of a package
    files = [getattr(sys.modules.get(name), "__file__", None) for name in parents]
    return _is_users_file(next((file for file in reversed(files) if file), "<input>"))


_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]|^<frozen ")
_LIBRARIES = f"{Path(__file__).parents[1]}{os.sep}", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))


@functools.lru_cache(maxsize=4096)
def _is_users_file(path: str) -> bool:
    return not (_INSTALLED.search(path) or path.startswith(_LIBRARIES))
