"""What ``use`` may name: the built-in callbacks, those that installed packages offer, and ``module:Class``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dalsegno import callbacks
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.events.callback import Callback

from .names import find_named

GROUP = "dalsegno.callbacks"
"""The group of entry points under which a package offers its callbacks."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A callback that can be used by its bare name."""

    name: str
    origin: str
    """``built-in``, or the package that offers it."""
    _load: Callable[[], Any]

    def load(self) -> Callable[..., Any]:
        """The class, or the function that makes one.

        Raises:
            ConfigurationError: if the package that offers it cannot be imported, or offers something else.
        """
        try:
            made = self._load()
        except Exception as error:
            raise ConfigurationError(
                f"{self.name!r}, offered by {self.origin}, cannot be imported: {type(error).__name__}: {error}"
            ) from error
        if not callable(made):
            raise ConfigurationError(f"{self.name!r}, offered by {self.origin}, is a {type(made).__name__}, no class")
        return made  # type: ignore[no-any-return]


def entries() -> list[Entry]:
    """Every callback with a bare name: the built-in ones, then those of packages."""
    return [*_builtins(), *(_offered(entry) for entry in sorted(entry_points(group=GROUP), key=lambda each: each.name))]


def find_callback(use: str) -> Callable[..., Any]:
    """The class that ``use`` names: a bare name, or ``module:Class``.

    Raises:
        UnknownName: if there is none; the message names the nearest.
        ConfigurationError: if it cannot be imported, or two packages offer the same name.
    """
    if ":" in use:
        return find_named(use, "class", "my_package.hooks:Beat")  # type: ignore[no-any-return]
    found = [offer for offer in entries() if offer.name == use]
    if not found:
        raise UnknownName("callback", use, {offer.name for offer in entries()})
    if len(found) > 1:
        origins = " and ".join(offer.origin for offer in found)
        raise ConfigurationError(f"{use!r} is offered by {origins}; say which as module:Class")
    return found[0].load()


def _builtins() -> Iterator[Entry]:
    for name in sorted(callbacks.__all__):
        found = getattr(callbacks, name)
        if isinstance(found, type) and issubclass(found, Callback):
            yield Entry(name, "built-in", lambda found=found: found)  # type: ignore[misc]


def _offered(entry: EntryPoint) -> Entry:
    return Entry(entry.name, entry.dist.name if entry.dist else entry.module, entry.load)
