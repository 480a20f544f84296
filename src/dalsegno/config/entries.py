"""Callbacks from their entries in a configuration: all of them checked first, then all of them built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dalsegno.callbacks import default_callbacks
from dalsegno.errors import ConfigurationError, DalsegnoError
from dalsegno.events.adapters import adapt
from dalsegno.events.callback import Callback
from dalsegno.events.registration import check_callbacks

from .document import Document, Source
from .error_context import error_context
from .registry import find_callback
from .signature import signature_of

_OWN_KEYS = ("use", "enabled", "name", "dialect")
_TAKEN_BY_CONSTRUCTORS = ("name", "dialect")


@dataclass(frozen=True, slots=True)
class Entry:
    """One callback that a configuration names, with arguments that fit."""

    use: str
    make: Callable[..., Any]
    name: str | None
    """Set on the callback, where its constructor does not take one itself."""
    dialect: str | None
    """For :func:`dalsegno.adapt`, where it is said."""
    enabled: bool
    arguments: dict[str, Any]
    settings: dict[str, Any]
    """The arguments as they were written, and the defaults of the others."""
    place: str

    def build(self) -> Any:
        """The callback; what its constructor complains of has the entry's place."""
        try:
            with error_context(self.place):
                made = self.make(**self.arguments)
                if self.dialect is not None:
                    return adapt(made, self.dialect, name=self.name)
        except Exception as error:
            if not isinstance(error, DalsegnoError):
                error.add_note(f"raised while building {self.place}")
            raise
        if self.name is not None:
            made.name = self.name
        return made

    def resolved(self) -> dict[str, Any]:
        """The entry with every argument that it leaves to its default."""
        own = {"name": self.name, "dialect": self.dialect, "enabled": None if self.enabled else False}
        return {"use": self.use} | {key: value for key, value in own.items() if value is not None} | self.settings


class Disabled(Callback):
    """Listens to nothing, and takes the place of the default callback whose key it has."""

    makes_wishes = False

    def __init__(self, key: str) -> None:
        self.name = key


def load_callbacks(source: Source | Sequence[Mapping[str, Any] | str]) -> list[Callback]:
    """The callbacks that a TOML, YAML or JSON file names under ``callbacks``, or a list of such entries.

    An entry is ``{use = "DivergenceDetector", patience = 5}``: the name of a built-in callback, one that an installed
    package offers, or ``module:Class``; and the arguments of its constructor. ``enabled = false`` leaves it out, a
    default one too.

    Raises:
        NotFound: if there is no such file.
        ConfigurationError: for an argument that does not fit, and what else cannot work. The message says in which
            entry. Everything is checked before the first callback is built.
        UnknownName: for a name that nobody knows; the message names the nearest.
    """
    document = Document.read(source if isinstance(source, str | Path | Mapping) else {"callbacks": list(source)})
    return build_callbacks(read_entries(document), document.name)


def read_entries(document: Document) -> list[Entry]:
    """The document's callbacks, checked; raises as :func:`load_callbacks`."""
    return [_read(document, index, entry) for index, entry in enumerate(document.callbacks())]


def build_callbacks(entries: Iterable[Entry], document: str) -> list[Callback]:
    """Those that are enabled, and what takes the place of a default one that is not."""
    enabled = [entry.build() for entry in entries if entry.enabled]
    keys = {getattr(callback, "key", None) for callback in enabled}
    unwanted = {entry.make.__name__ for entry in entries if not entry.enabled}
    defaults = {callback.key for callback in default_callbacks()}
    with error_context(document):
        return check_callbacks([*(Disabled(key) for key in sorted(defaults & unwanted - keys)), *enabled])


def _read(document: Document, index: int, table: Mapping[str, Any]) -> Entry:
    def place(argument: str) -> str:
        return document.place_of(argument, "callbacks", index, called=table["use"])

    use, enabled = table["use"], table.get("enabled", True)
    if not isinstance(enabled, bool):
        raise ConfigurationError(f"{place('enabled')}: enabled={enabled!r}; needs true or false")
    with error_context(place("use")):
        make = find_callback(use)
        signature = signature_of(make)
    own = [key for key in _OWN_KEYS if key not in signature or key not in _TAKEN_BY_CONSTRUCTORS]
    said = {key: table.get(key) if key in own else None for key in _TAKEN_BY_CONSTRUCTORS}
    for key, value in said.items():
        if not isinstance(value, str | None):
            raise ConfigurationError(f"{place(key)}: {key}={value!r}; needs a text")
    written = {key: value for key, value in table.items() if key not in own}
    arguments = signature.check(written, place)
    return Entry(
        use=use,
        make=make,
        name=said["name"],
        dialect=said["dialect"],
        enabled=enabled,
        arguments=arguments,
        settings=signature.defaults() | written,
        place=place(""),
    )
