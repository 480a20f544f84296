"""A whole run from a configuration: which function builds the trainer, with which settings and callbacks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dalsegno.args import MEANT, TrainingArguments
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.events.callback import Callback
from dalsegno.logs.values import to_json

from .document import Document, Source
from .entries import Entry, build_callbacks, read_entries
from .error_context import error_context
from .names import find_named
from .record import SINCE, ConfigRecord
from .signature import signature_of

SECTIONS = ("trainer", "args", "factory", "callbacks")
EXAMPLE = "def build(args, callbacks, …): return dalsegno.Trainer(model, args, callbacks=callbacks, …)"
_HANDED_OVER = ("args", "callbacks")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A run as a file describes it::

        trainer = "my_training:build"    # build(args, callbacks, **factory) returns the trainer

        [args]                           # TrainingArguments
        [factory]                        # further arguments of build
        [[callbacks]]                    # use = "…", and arguments

    Read it with :meth:`read`; then everything in it has been checked, and nothing is built.
    """

    source: str
    trainer: str
    args: TrainingArguments
    factory: dict[str, Any]
    entries: list[Entry]
    settings: dict[str, Any]
    """All of it with every default, as ``config.json`` keeps it."""
    _build: Callable[..., Any]

    @classmethod
    def read(cls, source: Source, overrides: Iterable[str] = ()) -> RunConfig:
        """From a TOML, YAML or JSON file or a dict; ``overrides`` are ``key=value``, as on the command line.

        Raises:
            NotFound: if there is no such file.
            ConfigurationError: for whatever cannot work; the message says where it stands.
            UnknownName: for a name that nobody knows; the message names the nearest.
        """
        document = Document.read(source)
        for assignment in overrides:
            document.set(assignment, SECTIONS)
        for key in document.tables:
            if key not in (*SECTIONS, SINCE):
                with error_context(document.name):
                    raise UnknownName("key", key, SECTIONS)
        trainer, build = _find_build(document)
        factory, factory_settings = _read_factory(document, build)
        args = _read_args(document)
        entries = read_entries(document)
        settings = {
            "trainer": trainer,
            "args": args.to_dict(),
            "factory": factory_settings,
            "callbacks": [entry.resolved() for entry in entries],
        }
        return cls(document.name, trainer, args, factory, entries, settings, build)

    def as_json(self) -> str:
        """Every setting, as :meth:`read` takes it."""
        return json.dumps(to_json(self.settings), indent=2, allow_nan=False)

    def callbacks(self) -> list[Callback]:
        """The callbacks, newly built, with one that keeps the settings in the run's ``config.json``."""
        return [*build_callbacks(self.entries, self.source), ConfigRecord(self.settings)]

    def build(self) -> Any:
        """The trainer, newly built.

        Raises:
            ConfigurationError: if what the function returns is no trainer, or does not have the callbacks.
        """
        callbacks = self.callbacks()
        trainer = self._build(args=self.args, callbacks=callbacks, **self.factory)
        if not callable(getattr(trainer, "train", None)):
            raise ConfigurationError(f"{self.trainer} returned a {type(trainer).__name__}, not a trainer")
        present = getattr(trainer, "callbacks", callbacks)
        for callback in callbacks:
            if callback not in present:
                raise ConfigurationError(
                    f"{self.trainer} built a trainer without the callbacks it was given: {EXAMPLE}"
                )
        return trainer


def _find_build(document: Document) -> tuple[str, Callable[..., Any]]:
    name = document.tables.get("trainer")
    if not isinstance(name, str):
        given = "is missing" if name is None else f"is {name!r}"
        raise ConfigurationError(
            f"{document.place('trainer')}: {given}; name the function that builds the trainer, "
            'trainer = "my_training:build"'
        )
    with error_context(document.place("trainer")):
        return name, find_named(name, "function", "my_training:build")


def _read_factory(document: Document, build: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments for the function beside args and callbacks, checked; and as settings, with the defaults."""
    with error_context(document.place("trainer")):
        signature = signature_of(build)
        for name in _HANDED_OVER:
            if name not in signature and not signature.takes_others:
                raise ConfigurationError(f"takes no {name}=; write it as {EXAMPLE}")
    for name in _HANDED_OVER:
        signature.pop(name, None)
    written = document.section("factory")
    if wrong := [name for name in _HANDED_OVER if name in written]:
        raise ConfigurationError(f"{document.place('factory', wrong[0])}: is given by its own section, not here")
    arguments = signature.check(written, lambda name: document.place_of(name, "factory"))
    return arguments, signature.defaults() | written


def _read_args(document: Document) -> TrainingArguments:
    written = document.section("args")
    arguments = signature_of(TrainingArguments).check(written, lambda name: document.place_of(name, "args"), MEANT)
    with error_context(document.place("args")):
        return TrainingArguments(**arguments)
