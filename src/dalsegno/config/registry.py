"""Callbacks from the entries of a configuration: all entries are checked before the first callback is built."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from dalsegno import callbacks
from dalsegno.callbacks import default_callbacks
from dalsegno.config.document import Document, Source, error_context
from dalsegno.config.signature import signature_of
from dalsegno.errors import ConfigurationError, DalsegnoError, UnknownName, expect_known
from dalsegno.events.adapters import adapt
from dalsegno.events.callback import Callback
from dalsegno.events.registration import check_callbacks
from dalsegno.stateful.annotations import check_types

_OWN_KEYS = ("use", "enabled", "name", "dialect")
_TAKEN_BY_CONSTRUCTORS = ("name", "dialect")


@dataclass(frozen=True, slots=True)
class CallbackEntry:
    """One callback of a configuration, with checked arguments."""

    use: str
    make: Callable[..., Any]
    name: str | None
    """Set on the callback if its constructor has no such argument."""
    dialect: str | None
    """Argument of :func:`dalsegno.adapt`, if given."""
    enabled: bool
    arguments: dict[str, Any]
    settings: dict[str, Any]
    """The arguments as written in the file, and the defaults of the others."""
    location: str

    def build(self) -> Any:
        """Build the callback; errors of its constructor name the entry's location."""
        try:
            with error_context(self.location):
                made = self.make(**self.arguments)
                if self.dialect is not None:
                    return adapt(made, self.dialect, name=self.name)
        except Exception as error:
            if not isinstance(error, DalsegnoError):
                error.add_note(f"raised while building {self.location}")
            raise
        if self.name is not None:
            made.name = self.name
        return made

    def resolved(self) -> dict[str, Any]:
        """The entry with the defaults of the arguments it leaves out."""
        own = {"name": self.name, "dialect": self.dialect, "enabled": None if self.enabled else False}
        return {"use": self.use} | {key: value for key, value in own.items() if value is not None} | self.settings


class Disabled(Callback):
    """Handles no event, and replaces the default callback of the same key."""

    sets_control_flags = False

    def __init__(self, key: str) -> None:
        self.name = key


@check_types
def load_callbacks(source: Source | Sequence[Any]) -> list[Callback]:
    """Build the callbacks under ``callbacks`` in a TOML, YAML or JSON file, or of a list of such entries.

    An entry is ``{use = "DivergenceDetector", patience = 5}``: the name of a built-in callback, of one that an
    installed package provides, or ``module:Class``; and the arguments of its constructor. ``enabled = false`` leaves
    the callback out, a default one too.

    Raises:
        NotFound: if the file does not exist.
        ConfigurationError: for an argument of the wrong type or another invalid value; the message names the entry.
            Everything is checked before the first callback is built.
        UnknownName: for an unknown name; suggests the nearest.
    """
    document = Document.read(source if isinstance(source, str | Path | Mapping) else {"callbacks": list(source)})
    return build_callbacks(read_entries(document), document.name)


def read_entries(document: Document) -> list[CallbackEntry]:
    """The checked entries of a document; raises as :func:`load_callbacks`."""
    return [_read(document, index, entry) for index, entry in enumerate(document.callbacks())]


def build_callbacks(entries: Iterable[CallbackEntry], document: str) -> list[Callback]:
    """The enabled callbacks, and a :class:`Disabled` for each default one that is disabled."""
    enabled = [entry.build() for entry in entries if entry.enabled]
    keys = {getattr(callback, "key", None) for callback in enabled}
    unwanted = {entry.make.__name__ for entry in entries if not entry.enabled}
    defaults = {callback.key for callback in default_callbacks()}
    with error_context(document):
        return check_callbacks([*(Disabled(key) for key in sorted(defaults & unwanted - keys)), *enabled])


def _read(document: Document, index: int, table: Mapping[str, Any]) -> CallbackEntry:
    def location(argument: str) -> str:
        return document.argument_location(argument, "callbacks", index, called=table["use"])

    use, enabled = table["use"], table.get("enabled", True)
    if not isinstance(enabled, bool):
        raise ConfigurationError(f"{location('enabled')}: enabled={enabled!r}; needs true or false")
    with error_context(location("use")):
        make = find_callback(use)
        signature = signature_of(make)
    own = [key for key in _OWN_KEYS if key not in signature or key not in _TAKEN_BY_CONSTRUCTORS]
    given = {key: table.get(key) if key in own else None for key in _TAKEN_BY_CONSTRUCTORS}
    for key, value in given.items():
        if not isinstance(value, str | None):
            raise ConfigurationError(f"{location(key)}: {key}={value!r}; needs a string")
    written = {key: value for key, value in table.items() if key not in own}
    arguments = signature.check(written, location)
    return CallbackEntry(
        use=use,
        make=make,
        name=given["name"],
        dialect=given["dialect"],
        enabled=enabled,
        arguments=arguments,
        settings=signature.defaults() | written,
        location=location(""),
    )


# --- the registry: built-in callbacks, those of installed packages, and ``module:Class`` ----------------------------


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
        """The class, or a function that builds the callback."""
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
    own = {name: getattr(callbacks, name) for name in dir(callbacks)}
    classes = {name: each for name, each in own.items() if isinstance(each, type) and issubclass(each, Callback)}
    provided = sorted(entry_points(group=GROUP), key=lambda each: each.name)
    return [
        *(NamedCallback(name, "built-in", partial(classes.get, name)) for name in classes),
        *(NamedCallback(each.name, each.dist.name if each.dist else each.module, each.load) for each in provided),
    ]


def find_callback(use: str) -> Callable[..., Any]:
    """The class that ``use`` names: a short name, or ``module:Class``."""
    if ":" in use:
        return find_named(use, "class", "my_package.hooks:Beat")  # type: ignore[no-any-return]
    known = named_callbacks()
    found = [entry for entry in known if entry.name == use]
    if not found:
        raise UnknownName("callback", use, {entry.name for entry in known})
    if len(found) > 1:
        origins = " and ".join(entry.origin for entry in found)
        raise ConfigurationError(f"{use!r} is provided by {origins}; name one of them as module:Class")
    return found[0].load()


def find_named(text: str, what: str, example: str) -> Any:
    """The callable ``module:name`` at the top level of a module. ``what``: its kind, for error messages, as is
    ``example``, a valid ``text``."""
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
    expect_known(f"{what} of {module_name}", [name], found)
    return found[name]
