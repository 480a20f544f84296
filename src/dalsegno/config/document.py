"""A configuration as it is read: tables, and where each thing in them stands."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dalsegno.errors import ConfigurationError, NotFound, UnknownName
from dalsegno.logs.values import from_json
from dalsegno.system.extras import how_to_install

Source = str | Path | Mapping[str, Any]
"""A TOML, YAML or JSON file, or what could stand in one, as a dict."""


class Document:
    """Tables of a file or a dict. What is set later is remembered with who set it, so that messages can say so."""

    def __init__(self, name: str, tables: Mapping[str, Any]) -> None:
        self.name = name
        self.tables: dict[str, Any] = copy.deepcopy(dict(tables))
        self._set: dict[tuple[str | int, ...], str] = {}

    @classmethod
    def read(cls, source: Source) -> Document:
        """
        Raises:
            NotFound: if there is no such file.
            ConfigurationError: if it is of another kind, or broken; the message has the line.
        """
        if isinstance(source, Mapping):
            return cls("the configuration", source)
        path = Path(source)
        if path.suffix not in _READERS:
            raise ConfigurationError(f"{path}: a configuration ends in {', '.join(_READERS)}")
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, IsADirectoryError) as error:
            raise NotFound(f"{path}: there is no such file") from error
        except ValueError as error:
            raise ConfigurationError(f"{path}: {error}") from error
        try:
            tables = _READERS[path.suffix](text)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{path}: {error}") from error
        if not isinstance(tables, dict):
            raise ConfigurationError(f"{path}: holds a {type(tables).__name__}; needs a table with names")
        return cls(str(path), tables)

    def place(self, *path: str | int) -> str:
        """Where something stands, for messages: in the file, or on the command line."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._set:
                return self._set[path[:length]]
        return f"{self.name}, {_dotted(path)}" if path else self.name

    def place_of(self, argument: str, *path: str | int, called: str = "") -> str:
        """Where an argument of the table at ``path`` is given: the table, unless it was set apart from it."""
        inside = (*path, argument)
        if inside in self._set:
            return self._set[inside]
        return f"{self.place(*path)} ({called})" if called else self.place(*path)

    def section(self, name: str) -> dict[str, Any]:
        """A table of the document; empty where there is none.

        Raises:
            ConfigurationError: if there is something else under that name.
        """
        table = self.tables.get(name, {})
        if not isinstance(table, dict):
            raise ConfigurationError(f"{self.place(name)}: is {table!r}; needs a table, [{name}]")
        return table

    def set(self, assignment: str, sections: Iterable[str]) -> None:
        """``key=value``: a dotted key and a TOML value; what is no TOML value is text.

        A callback is named by its class or its ``name``: ``callbacks.JsonLogger.run=baseline``.

        Raises:
            ConfigurationError: if it is no such thing; UnknownName for a key that leads nowhere.
        """
        key, equals, text = assignment.partition("=")
        words = key.strip().split(".")
        said = f"--set {assignment}"
        if not equals or not all(words):
            raise ConfigurationError(f"{said}: write it as key=value, such as args.max_steps=100")
        if words[0] not in sections:
            raise UnknownName(f"key in {said}:", words[0], sections)
        path: tuple[str | int, ...] = tuple(words)
        if words[0] == "callbacks":
            path = self._callback_path(words, said)
        table: Any = self.tables
        for word in path[:-1]:
            table = table.setdefault(word, {}) if isinstance(table, dict) else table[word]
            if not isinstance(table, (dict, list)):
                raise ConfigurationError(f"{said}: {word!r} is {table!r} and holds nothing else")
        table[path[-1]] = _toml_value(text)
        self._set[path] = said

    def callbacks(self) -> list[dict[str, Any]]:
        """The entries under ``callbacks``, in which ``"Name"`` is short for ``{use = "Name"}``.

        Raises:
            ConfigurationError: if something else stands there.
        """
        entries = self.tables.get("callbacks", [])
        if not isinstance(entries, list):
            raise ConfigurationError(f'{self.place("callbacks")}: needs a list, [{{use = "JsonLogger"}}, …]')
        for index, entry in enumerate(entries):
            if isinstance(entry, str):
                entries[index] = {"use": entry}
            elif not isinstance(entry, dict) or not isinstance(entry.get("use"), str):
                raise ConfigurationError(
                    f"{self.place('callbacks', index)}: is {entry!r}; needs "
                    '{use = "…"}, with the name of a callback and its arguments'
                )
        return entries

    def _callback_path(self, words: list[str], said: str) -> tuple[str | int, ...]:
        """``callbacks.Name.argument``, with the entry's index for its name; a new entry if there is none."""
        if len(words) < 3:
            raise ConfigurationError(f"{said}: name the callback and its argument, callbacks.JsonLogger.run=…")
        entries = self.callbacks()
        found = [index for index, entry in enumerate(entries) if words[1] in (entry.get("name"), short_name(entry))]
        if len(found) > 1:
            raise ConfigurationError(f"{said}: there are {len(found)} of that name; give them name=, and use it here")
        if not found:
            self.tables["callbacks"] = [*entries, {"use": words[1]}]
            found = [len(entries)]
            self._set["callbacks", found[0]] = said
        return ("callbacks", found[0], *words[2:])


def short_name(entry: Mapping[str, Any]) -> str:
    """The class that an entry uses, without its module."""
    return str(entry["use"]).rpartition(":")[2]


def _dotted(path: tuple[str | int, ...]) -> str:
    text = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in path)
    return text.removeprefix(".")


def _toml_value(text: str) -> Any:
    try:
        tables = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return tables["value"] if len(tables) == 1 else text


def _read_json(text: str) -> Any:
    return from_json(json.loads(text))


def _read_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigurationError(f"YAML is read with PyYAML (or write TOML): {how_to_install('yaml')}") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(str(error)) from error


_READERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".json": _read_json,
}
