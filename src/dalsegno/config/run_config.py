"""RunConfig: a run from a configuration: the function that builds the trainer, its settings and callbacks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dalsegno.args import TrainingArguments, answers
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.events.callback import Callback
from dalsegno.logs.values import to_json

from .document import Document, Source
from .entries import CallbackEntry, build_callbacks, read_entries
from .error_context import error_context
from .names import find_named
from .record import SINCE, ConfigRecord
from .signature import signature_of

SECTIONS = ("trainer", "args", "factory", "callbacks")
EXAMPLE = "def build(args, callbacks, …): return dalsegno.Trainer(model, args, callbacks=callbacks, …)"
_HANDED_OVER = ("args", "callbacks")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A run described by a file::

        trainer = "my_training:build"    # build(args, callbacks, **factory) returns the trainer

        [args]                           # TrainingArguments
        [factory]                        # further arguments of build
        [[callbacks]]                    # use = "…", and arguments

    :meth:`read` checks the whole file and builds nothing.
    """

    source: str
    trainer: str
    args: TrainingArguments
    factory: dict[str, Any]
    entries: list[CallbackEntry]
    settings: dict[str, Any]
    """The whole configuration with every default, as in ``config.json``."""
    _build: Callable[..., Any]

    @classmethod
    def read(cls, source: Source, overrides: Iterable[str] = ()) -> RunConfig:
        """Read a TOML, YAML or JSON file or a dict; ``overrides`` are ``key=value``, as for ``--set``.

        Raises:
            NotFound: if the file does not exist.
            ConfigurationError: for an invalid value; the message gives its location.
            UnknownName: for an unknown name; suggests the nearest.
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
        """Every setting as JSON, which :meth:`read` accepts."""
        return json.dumps(to_json(self.settings), indent=2, allow_nan=False)

    def callbacks(self) -> list[Callback]:
        """Build the callbacks, and one that writes the settings to the run's ``config.json``."""
        return [*build_callbacks(self.entries, self.source), ConfigRecord(self.settings)]

    def build(self) -> Any:
        """Build the trainer.

        Raises:
            ConfigurationError: if the function returns something else, or a trainer without the callbacks.
        """
        callbacks = self.callbacks()
        trainer = self._build(args=self.args, callbacks=callbacks, **self.factory)
        if not callable(getattr(trainer, "train", None)):
            raise ConfigurationError(f"{self.trainer} returned a {type(trainer).__name__}, not a trainer")
        present = getattr(trainer, "callbacks", callbacks)
        for callback in callbacks:
            if callback not in present:
                raise ConfigurationError(
                    f"{self.trainer} returned a trainer without the callbacks it was given; write it as {EXAMPLE}"
                )
        return trainer


def _find_build(document: Document) -> tuple[str, Callable[..., Any]]:
    name = document.tables.get("trainer")
    if not isinstance(name, str):
        given = "is missing" if name is None else f"is {name!r}"
        raise ConfigurationError(
            f"{document.location('trainer')}: {given}; name the function that builds the trainer, "
            'trainer = "my_training:build"'
        )
    with error_context(document.location("trainer")):
        return name, find_named(name, "function", "my_training:build")


def _read_factory(document: Document, build: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checked arguments of the function beside args and callbacks; and as settings, with the defaults."""
    with error_context(document.location("trainer")):
        signature = signature_of(build)
        for name in _HANDED_OVER:
            if name not in signature and not signature.takes_others:
                raise ConfigurationError(f"has no argument {name}=; write it as {EXAMPLE}")
    for name in _HANDED_OVER:
        signature.pop(name, None)
    written = document.section("factory")
    if wrong := [name for name in _HANDED_OVER if name in written]:
        raise ConfigurationError(f"{document.location('factory', wrong[0])}: has its own section; remove it here")
    arguments = signature.check(written, lambda name: document.argument_location(name, "factory"))
    return arguments, signature.defaults() | written


def _read_args(document: Document) -> TrainingArguments:
    written = document.section("args")
    signature = signature_of(TrainingArguments)
    arguments = signature.check(
        written, lambda name: document.argument_location(name, "args"), answers(signature, "Trainer")
    )
    with error_context(document.location("args")):
        return TrainingArguments(**arguments)
