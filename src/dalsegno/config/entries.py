"""Callbacks from the entries of a configuration: all entries are checked before the first callback is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dalsegno.callbacks import default_callbacks
from dalsegno.config.document import error_context
from dalsegno.errors import ConfigurationError, DalsegnoError
from dalsegno.events.adapters import adapt
from dalsegno.events.callback import Callback
from dalsegno.events.registration import check_callbacks

from .document import Document, Source
from .registry import find_callback
from .signature import signature_of

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


def load_callbacks(source: Source | Sequence[Mapping[str, Any] | str]) -> list[Callback]:
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
