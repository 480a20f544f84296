"""What is imported only when it is used: the modules of public names, and optional dependencies."""

from __future__ import annotations

import importlib
import importlib.util
import os.path
import sys
from collections.abc import Callable, Iterable, Mapping

from dalsegno.errors import ConfigurationError


def lazy_exports(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package (PEP 562).

    A name whose module has been deleted is not an attribute of the package, and not listed. A module that cannot be
    imported raises an ImportError.

    Args:
        package: its ``__name__``.
        homes: the names of each of its modules.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def exists(home: str) -> bool:
        # os.path, since importing pathlib takes longer than the rest of ``import dalsegno``
        path = os.path.join(sys.modules[package].__path__[0], *home.split("."))  # noqa: PTH118
        return os.path.isdir(path) or os.path.isfile(f"{path}.py")  # noqa: PTH112, PTH113

    def find(name: str) -> object:
        if name not in home_of or not exists(home_of[name]):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            home = importlib.import_module(f".{home_of[name]}", package)
        except AttributeError as error:  # which ``from package import name`` would report as a name that is missing
            raise ImportError(f"{package}.{home_of[name]} cannot be imported: AttributeError: {error}") from error
        found = getattr(home, name)
        setattr(sys.modules[package], name, found)
        return found

    return find, lambda: sorted(name for name, home in home_of.items() if exists(home))


def how_to_install(extra: str | None = None) -> str:
    """The commands that install dalsegno's dependencies, and ``extra``, for the end of a message."""
    of_extra = f"[{extra}]" if extra else ""
    return f"in a clone of dalsegno, pip install -e '.{of_extra}'; from an index, pip install 'dalsegno{of_extra}'"


def require_extra(extra: str | None, module: str, what: str) -> None:
    """
    Raises ConfigurationError if ``module`` is not installed; on a machine without torch, which dalsegno would bring, it
    names the module alone.

    Args:
        extra: that includes the module; None: dalsegno itself does.
        module: a module of the library.
        what: the task that needs it, as the subject of a sentence: "plotting".
    """
    if importlib.util.find_spec(module) is None:
        how = how_to_install(extra) if importlib.util.find_spec("torch") else f"pip install {module}"
        raise ConfigurationError(f"{what} needs {module}, which is not installed; {how}")
