"""Whether a value fits a type annotation: the one place that walks an annotation.

:func:`checker_of` compiles an annotation to a function that returns the value, or raises :class:`Mismatch` with the
path to the first part that does not fit. :class:`Rules` say how scalars are taken, and in which words: a saved state
has to fit as it is, the values of a file are converted, a setting may be a number of NumPy.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, MutableSequence, Sequence, Set
from inspect import Parameter
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, ForwardRef, Literal, NotRequired, ParamSpec, TypeVar, Union, get_args, get_origin

from dalsegno.errors import ConfigurationError, UnknownName, expect_known

Form = Any
"""A type annotation."""

P = ParamSpec("P")
T = TypeVar("T")


class ConstructorSignature:
    """``__signature__`` of a class whose ``__new__`` takes any argument: that of its ``__init__``, for notebooks."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        return signature.replace(parameters=[*signature.parameters.values()][1:])


Checker = Callable[[Any], Any]

UNCHECKED = (Any, object, Parameter.empty)
LISTS: dict[Any, Callable[[list[Any]], Any]] = {
    **dict.fromkeys((list, Sequence, MutableSequence, Iterable, Collection), list),
    tuple: tuple,
    set: set,
    Set: set,
    frozenset: frozenset,
}
TABLES = (dict, Mapping, MutableMapping)


@dataclasses.dataclass(frozen=True, slots=True)
class Must:
    """A further condition on a value: its description, and a predicate on a value of the right type.

    If ``fits`` raises, the value does not fit.
    """

    words: str
    fits: Callable[[Any], object]


class Mismatch(Exception):
    """A part of a value does not fit.

    Attributes:
        value: that part.
        complaint: what is wrong with it; empty if it has another type than ``wanted``.
        wanted: the valid type, in words.
        path: keys to that part, from the inside out; that in a converted table in a tuple.
    """

    def __init__(self, value: object, wanted: str = "", complaint: str = "") -> None:
        super().__init__(complaint or wanted)
        self.value, self.wanted, self.complaint = value, wanted, complaint
        self.path: list[object] = []


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """How values of one origin are checked.

    Attributes:
        scalar: makes the checker of a class.
        converts: a list may become a tuple or set, a table a dataclass.
        listing: what precedes the values of a ``Literal`` in a complaint; empty: they are the valid type.
        describe: an annotation in words, where values are converted.
        hint: what to add to the complaint about a value, which is of none of these types.
    """

    scalar: Callable[[Any], Checker]
    converts: bool = False
    listing: str = ""
    describe: Callable[[Form], str] = str
    hint: Callable[[object, Sequence[Any]], str] = lambda value, kinds: ""


def plain(form: Form) -> Form:
    """The annotation behind ``NotRequired``, ``NewType`` and aliases."""
    while True:
        origin: Any = get_origin(form)
        if origin is NotRequired:
            form = get_args(form)[0]
        elif hasattr(form, "__supertype__"):
            form = form.__supertype__
        elif type(form).__name__ == "TypeAliasType":
            form = form.__value__
        else:
            return form


def checker_of(form: Form, rules: Rules) -> Checker:
    """Compile ``form``. One that cannot be resolved accepts any value."""
    form = plain(form)
    kind: Any = get_origin(form) or form
    inner = get_args(form)
    if kind in UNCHECKED or isinstance(kind, (str, ForwardRef, TypeVar)):
        return lambda value: value
    if kind is Annotated:
        return _narrowed(checker_of(inner[0], rules), [each for each in inner[1:] if isinstance(each, Must)])
    if kind in (Union, types.UnionType):
        return _one_of(inner, rules)
    if kind is Literal:
        return _literal(inner, rules)
    if typing.is_typeddict(kind) or (dataclasses.is_dataclass(kind) and isinstance(kind, type)):
        return _record(kind, rules)
    if kind in TABLES and (inner or rules.converts):
        return _table(form, inner or (Any, Any), rules)
    if kind in LISTS and (inner or rules.converts):
        return _list(form, kind, inner, rules)
    return rules.scalar(type(None) if kind is None else kind)


def _narrowed(check_type: Checker, further: list[Must]) -> Checker:
    def check(value: Any) -> Any:
        value = check_type(value)
        for must in further:
            try:
                fits = must.fits(value)
            except Exception as error:
                raise Mismatch(value, must.words) from error
            if not fits:
                raise Mismatch(value, must.words)
        return value

    return check if further else check_type


def _literal(allowed: tuple[Any, ...], rules: Rules) -> Checker:
    def check(value: Any) -> Any:
        for each in allowed:
            if type(value) is type(each) and value == each:
                return each
        listed = f"{rules.listing}{', '.join(map(repr, allowed))}{rules.hint(value, [type(allowed[0])])}"
        raise Mismatch(value, words, listed if rules.listing else "")

    words = " or ".join(map(repr, allowed))
    return check


def _one_of(members: tuple[Any, ...], rules: Rules) -> Checker:
    checkers = [checker_of(each, rules) for each in members]
    tables = [check for each, check in zip(members, checkers, strict=True) if dataclasses.is_dataclass(plain(each))]

    def check(value: Any) -> Any:
        if type(value) in members and rules.converts:
            return value
        if rules.converts and isinstance(value, Mapping) and len(tables) == 1:
            return tables[0](value)
        mismatches = []
        for each in checkers:
            try:
                return each(value)
            except Mismatch as mismatch:
                mismatches.append(mismatch)
        deepest = max(mismatches, key=lambda mismatch: (len(mismatch.path), bool(mismatch.complaint)))
        if deepest.path or (deepest.complaint and not rules.converts):  # it is of this member's type, but for a part
            raise deepest
        wanted = dict.fromkeys(mismatch.wanted for mismatch in mismatches)
        words = " or ".join(map(rules.describe, members) if rules.converts else wanted)
        raise Mismatch(value, words + rules.hint(value, members))

    return check


def _later(form: Form, rules: Rules) -> Checker:
    """The checker of a field, made when a value needs it: a dataclass may contain itself."""
    made = functools.cache(lambda: checker_of(form, rules))
    return lambda value: made()(value)


def _record(kind: Any, rules: Rules) -> Checker:
    """Of a TypedDict or a dataclass: a dict of its fields, from which the dataclass is made."""
    if typing.is_typeddict(kind):
        forms = typing.get_type_hints(kind, include_extras=True)
        optional = {name for name, form in forms.items() if get_origin(form) is NotRequired}
    else:
        own, missing = [each for each in dataclasses.fields(kind) if each.init], dataclasses.MISSING
        optional = {each.name for each in own if (each.default, each.default_factory) != (missing, missing)}
        hints = hints_of(kind.__init__) if rules.converts else typing.get_type_hints(kind, include_extras=True)
        forms = {each.name: hints.get(each.name, Any) for each in own}
    is_table = rules.converts and not typing.is_typeddict(kind)
    of_field = _later if is_table else checker_of
    checkers = {name: of_field(form, rules) for name, form in forms.items()}
    keys = ", ".join(checkers)

    def check(value: Any) -> Any:
        if is_table and isinstance(value, kind):
            return value
        if not isinstance(value, Mapping if is_table else dict):
            raise Mismatch(value, rules.describe(kind) if is_table else f"a dict with the keys {keys}")
        for name in value:
            if name not in checkers:
                unknown = (
                    str(UnknownName(f"key for {kind.__name__}:", name, checkers))
                    if is_table
                    else (f"has the unknown key {short_repr(name)}; its keys must be {keys}")
                )
                raise Mismatch(value, complaint=unknown)
        for name in checkers:
            if name not in optional and name not in value:
                lacks = f"{kind.__name__} needs {name}" if is_table else f"has no {name!r}; its keys must be {keys}"
                raise Mismatch(value, complaint=lacks)
        found = {name: _inside(checkers[name], each, name) for name, each in value.items()}
        try:
            return found if typing.is_typeddict(kind) else kind(**found)
        except ConfigurationError as error:
            raise Mismatch(value, complaint=str(error)) from error

    return check


def _table(form: Form, inner: tuple[Any, ...], rules: Rules) -> Checker:
    check_key, check_item = (checker_of(each, rules) for each in inner)

    def key_of(key: Any) -> Any:
        try:
            return check_key(key)
        except Mismatch as mismatch:
            if not rules.converts:
                raise
            complaint = mismatch.complaint or f"needs {mismatch.wanted}"
            raise Mismatch(key, complaint=f"as a key, {complaint}") from None

    def check(value: Any) -> Any:
        if not isinstance(value, Mapping if rules.converts else dict):
            raise Mismatch(value, rules.describe(form) if rules.converts else "a dict")
        return {
            key_of(key): _inside(check_item, each, (key,) if rules.converts else key) for key, each in value.items()
        }

    return check


def _list(form: Form, kind: Any, inner: tuple[Any, ...], rules: Rules) -> Checker:
    each_its_own = kind is tuple and bool(inner) and inner[1:] != (...,)
    checkers = [checker_of(each, rules) for each in inner if each is not ...] or [checker_of(Any, rules)]
    accepted = (list, tuple) if rules.converts else kind

    def check(value: Any) -> Any:
        if not isinstance(value, accepted):
            if rules.converts:
                if isinstance(kind, type) and isinstance(value, kind) and not isinstance(value, (str, bytes)):
                    return value
                raise Mismatch(value, rules.describe(form))
            raise Mismatch(value, f"a tuple of {len(checkers)}" if each_its_own else f"a {kind.__name__}")
        if each_its_own and len(value) != len(checkers):
            described = f"{len(checkers)} values, {', '.join(map(rules.describe, inner))}"
            raise Mismatch(value, described if rules.converts else f"a tuple of {len(checkers)}")
        of_each = checkers if each_its_own else checkers * len(value)
        found = [_inside(one, each, number) for number, (one, each) in enumerate(zip(of_each, value, strict=True))]
        return LISTS[kind](found)

    return check


def _inside(check: Checker, value: Any, key: object) -> Any:
    try:
        return check(value)
    except Mismatch as mismatch:
        mismatch.path.append(key)
        raise


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Name → annotation of a function, without those that cannot be resolved: one that only a type checker can resolve
    affects no other."""
    function = inspect.unwrap(function)
    module = sys.modules.get(getattr(function, "__module__", ""))
    names = getattr(function, "__globals__", vars(module) if module else {})
    resolved: dict[str, Any] = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            resolved |= typing.get_type_hints(alone, names, include_extras=True)
        except (NameError, AttributeError, TypeError, SyntaxError):
            continue
    return resolved


def check_types(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function: refuse an argument that its annotation excludes, by its type or as an unknown name.
    Looks into sequences, sets and the keys of mappings. Of a class, those of its constructor."""
    if isinstance(function, type):
        function.__init__ = check_types(function.__init__)  # type: ignore[misc]
        return function
    signature = inspect.signature(function)
    misfits = functools.cache(lambda: {name: _misfit(form) for name, form in hints_of(function).items()})
    called = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> T:
        for name, value in signature.bind(*args, **named).arguments.items():
            if name in misfits() and (misfit := misfits()[name](value)) is not None:
                form = plain(hints_of(function)[name])
                choices = [each for each in (form, *get_args(form)) if get_origin(each) is Literal]
                if choices and isinstance(value, str):
                    expect_known(f"{name} of {called}", [value], get_args(choices[0]))
                wanted = inspect.formatannotation(form)
                raise ConfigurationError(f"{called}({name}{misfit}): needs {wanted}")
        return function(*args, **named)

    return call


_WIDER: dict[Any, tuple[Any, Any]] = {
    bool: ((str, bytes), object),
    int: (bool, Integral),
    float: (bool, Real),
    Path: ((), os.PathLike),
    **dict.fromkeys((Sequence, list, tuple), ((str, bytes, Mapping), Iterable)),
    Iterable: ((str, bytes), Iterable),
}
"""Types that stand for wider ones: what is refused, and what is accepted."""


def _misfit(form: Form) -> Callable[[object], str | None]:
    """Of a value: the first part that the annotation excludes, as ``=7`` or ``[2]=7``; None if there is none."""
    form = plain(form)
    kind: Any = get_origin(form) or form
    inner = get_args(form)
    if kind is Annotated:
        return _misfit(inner[0])
    if kind in (Union, types.UnionType):
        members = [*map(_misfit, inner)]

        def in_each(value: object) -> str | None:
            found = [misfit for each in members if (misfit := each(value)) is not None]
            return max(found, key=lambda misfit: misfit[0] == "[") if len(found) == len(members) else None

        return in_each
    in_items = [_misfit(each) for each in inner if each is not ...] if kind in LISTS else []
    each_its_own = kind is tuple and bool(inner) and inner[1:] != (...,)
    refused, accepted = _WIDER.get(kind, ((), kind))

    def fits(value: object) -> bool:
        if kind is Literal:
            return any(type(value) is type(each) and value == each for each in inner)
        if kind is typing.BinaryIO:
            return hasattr(value, "write")
        is_any = not isinstance(accepted, type) or accepted.__module__ == "typing"
        return is_any or (isinstance(value, accepted) and not isinstance(value, refused))

    def misfit(value: object) -> str | None:
        given = value if in_items and isinstance(value, (Sequence, Set, Mapping)) else None
        if not fits(value) or (each_its_own and given is not None and len(given) != len(inner)):
            return f"={short_repr(value)}"
        found = ((number, in_items[number % len(in_items)](each)) for number, each in enumerate(given or ()))
        return next((f"[{number}]{part}" for number, part in found if part is not None), None)

    return misfit


_LONGEST_SHOWN = 60  # characters


def short_repr(value: Any) -> str:
    """A short text for a value of any size and content."""
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"  # printing its digits may take very long
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"a {type(value).__name__} of {value.dtype} {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
