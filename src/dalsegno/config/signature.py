"""What a class or a function can be given: names, annotations, defaults, and what its docstring says of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from dalsegno.errors import ConfigurationError, UnknownName

from .docstrings import argument_docs
from .error_context import error_context
from .type_hints import hints_of
from .values import Misfit, coerce, describe

_PLAIN = (bool, int, float, str, type(None))
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Argument:
    """One that can be given by its name."""

    name: str
    annotation: Any
    default: Any
    doc: str
    """What the docstring says of it; empty where it says nothing."""

    @property
    def required(self) -> bool:
        return self.default is Parameter.empty


class Signature(dict[str, Argument]):
    """The arguments by their names, in their order."""

    def __init__(self, arguments: list[Argument], others: Any, unnamed: str | None) -> None:
        """``others``: the annotation of ``**kwargs``, ``Parameter.empty`` if there are none; ``unnamed``: a required
        parameter that has no name to be given by."""
        super().__init__((argument.name, argument) for argument in arguments)
        self.others = others
        self.takes_others = others is not Parameter.empty
        self._unnamed = unnamed

    def defaults(self) -> dict[str, Any]:
        """Of the arguments that have one, as far as a file could hold it."""
        return {each.name: each.default for each in self.values() if isinstance(each.default, _PLAIN)}

    def check(
        self, given: Mapping[str, Any], place: Callable[[str], str], meant: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """``given`` as the annotations want it; ``place`` says where an argument of that name stands.

        ``meant``: other words for names that there are.

        Raises:
            UnknownName: for a name that is none of them; the message names the nearest.
            ConfigurationError: for a value that does not fit, and for one that is missing.
        """
        for name in given:
            if name not in self and not self.takes_others:
                with error_context(place(name)):
                    raise UnknownName("argument", name, self, meant)
        if self._unnamed is not None:
            raise ConfigurationError(f"{place('')}: its parameter {self._unnamed!r} cannot be given by name")
        for argument in self.values():
            if argument.required and argument.name not in given:
                raise ConfigurationError(
                    f"{place(argument.name)}: {argument.name}= is missing; needs {describe(argument.annotation)}"
                )
        return {name: self._fitting(name, value, place(name)) for name, value in given.items()}

    def _fitting(self, name: str, value: Any, place: str) -> Any:
        try:
            return coerce(value, self[name].annotation if name in self else self.others)
        except Misfit as misfit:
            raise ConfigurationError(f"{place}: {name}{misfit}") from misfit


def signature_of(made: Callable[..., Any]) -> Signature:
    """Of a class's constructor, or of a function.

    Raises:
        ConfigurationError: for something built in, whose signature cannot be seen.
    """
    function = _constructor(made) if isinstance(made, type) else made
    if function is None:
        return Signature([], Parameter.empty, None)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise ConfigurationError(f"{made!r}: nobody can see what it takes") from error
    if isinstance(made, type):
        parameters = parameters[1:]
    hints, docs = hints_of(function), argument_docs(made)
    named = [
        Argument(each.name, hints.get(each.name, Any), each.default, docs.get(each.name, ""))
        for each in parameters
        if each.kind in _NAMED
    ]
    others = [hints.get(each.name, Any) for each in parameters if each.kind is Parameter.VAR_KEYWORD]
    unnamed = [
        each.name for each in parameters if each.kind is Parameter.POSITIONAL_ONLY and each.default is Parameter.empty
    ]
    return Signature(named, others[0] if others else Parameter.empty, unnamed[0] if unnamed else None)


def _constructor(made: type) -> Callable[..., Any] | None:
    for name in ("__init__", "__new__"):
        function = getattr(made, name)
        if function is not getattr(object, name):
            return function  # type: ignore[no-any-return]
    return None
