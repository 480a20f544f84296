"""Callbacks by the name under ``use``: built-in ones, those of installed packages, and ``module:Class``.

A lookup imports the module: the only code that a configuration can cause to run.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dalsegno import callbacks
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.events.callback import Callback

GROUP = "dalsegno.callbacks"
"""Entry-point group under which a package provides callbacks."""


@dataclass(frozen=True, slots=True)
class NamedCallback:
    """A callback that can be used by its short name."""

    name: str
    origin: str
    """``built-in``, or the package that provides it."""
    _load: Callable[[], Any]

    def load(self) -> Callable[..., Any]:
        """The class, or a function that builds the callback. Raises ConfigurationError if it cannot be imported from
        its package, or is not callable."""
        try:
            made = self._load()
        except Exception as error:
            raise ConfigurationError(
                f"{self.name!r}, provided by {self.origin}, cannot be imported: {type(error).__name__}: {error}"
            ) from error
        if not callable(made):
            raise ConfigurationError(
                f"{self.name!r}, provided by {self.origin}, is a {type(made).__name__}, not a class"
            )
        return made  # type: ignore[no-any-return]


def named_callbacks() -> list[NamedCallback]:
    """Every callback with a short name: built-in ones, then those of packages."""
    return [*_builtins(), *(_provided(each) for each in sorted(entry_points(group=GROUP), key=lambda each: each.name))]


def find_callback(use: str) -> Callable[..., Any]:
    """The class that ``use`` names: a short name, or ``module:Class``. Raises UnknownName for an unknown name; suggests
    the nearest. Raises ConfigurationError if it cannot be imported, or two packages provide the same name."""
    if ":" in use:
        return find_named(use, "class", "my_package.hooks:Beat")  # type: ignore[no-any-return]
    found = [entry for entry in named_callbacks() if entry.name == use]
    if not found:
        raise UnknownName("callback", use, {entry.name for entry in named_callbacks()})
    if len(found) > 1:
        origins = " and ".join(entry.origin for entry in found)
        raise ConfigurationError(f"{use!r} is provided by {origins}; name one of them as module:Class")
    return found[0].load()


def _builtins() -> Iterator[NamedCallback]:
    for name in sorted(callbacks.__all__):
        found = getattr(callbacks, name)
        if isinstance(found, type) and issubclass(found, Callback):
            yield NamedCallback(name, "built-in", lambda found=found: found)  # type: ignore[misc]


def _provided(entry: EntryPoint) -> NamedCallback:
    return NamedCallback(entry.name, entry.dist.name if entry.dist else entry.module, entry.load)


def find_named(text: str, what: str, example: str) -> Any:
    """The callable ``module:name`` at the top level of a module. Raises ConfigurationError if ``text`` is not
    ``module:name``, or the module cannot be imported. Raises UnknownName if the module has no callable of that name;
    suggests the nearest.

    Args:
        what: kind of object, for error messages.
        example: valid ``text``, for error messages.
    """
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise ConfigurationError(f"{text!r}: name the {what} as module:name, such as {example}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigurationError(
                f"no module {error.name!r}, neither in the current directory nor installed"
            ) from error
        raise ConfigurationError(f"{module_name}: cannot be imported\n{traceback.format_exc()}") from error
    found = {key: value for key, value in vars(module).items() if callable(value)}
    if name not in found:
        raise UnknownName(f"{what} of {module_name}", name, found)
    return found[name]
