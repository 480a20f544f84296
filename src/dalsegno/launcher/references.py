"""References: classes and functions by their importable name, ``module:name``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from dalsegno.errors import ConfigurationError

_REMEDY = "define it at the top level of a module that the ranks can import, or launch with start='fork'"


def reference_to(thing: Any, where: str) -> str:
    """The name under which another process finds this class or function: ``module:outer.inner``.

    Args:
        where: what refers to it, for the message.

    Raises:
        ConfigurationError: if no import leads to it: a lambda, something inside a function, in a notebook or on
            standard input.
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise ConfigurationError(f"{where}: a {type(thing).__name__} cannot be sent to other processes; {_REMEDY}")
    if "<lambda>" in name:
        raise ConfigurationError(f"{where}: a lambda has no name that another process could import; {_REMEDY}")
    if "<locals>" in name:
        raise ConfigurationError(f"{where}: {name} is defined inside a function; {_REMEDY}")
    if module == "__main__" and not main_is_importable():
        raise ConfigurationError(f"{where}: {name} is defined in a notebook or on standard input; {_REMEDY}")
    for path in (name, f"{name}.function"):  # a function that ds.on decorates is an attribute of the callback
        reference = f"{module}:{path}"
        try:
            if resolve(reference) is thing:
                return reference
        except (ImportError, AttributeError):
            continue
    raise ConfigurationError(f"{where}: {module}.{name} is not what is found under that name; {_REMEDY}")


def resolve(reference: str) -> Any:
    """Import what :func:`reference_to` named.

    Raises:
        ImportError, AttributeError: if it is not there.
    """
    module, _, path = reference.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def main_is_importable() -> bool:
    """Whether multiprocessing can import the program in another process: it is a file or a module."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or Path(getattr(main, "__file__", "")).is_file()
