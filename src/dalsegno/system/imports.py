"""What is imported only when it is used: the modules of public names, and optional dependencies."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os.path
import sys
from collections.abc import Callable

from dalsegno.errors import ConfigurationError


@functools.cache
def homes_of(package: str) -> dict[str, str]:
    """The names that the source of a package imports for type checkers alone, each with its module."""
    import ast  # which whatever is imported next needs, too

    source = sys.modules[package].__loader__.get_source(package)  # type: ignore[union-attr]
    blocks = [node.body for node in ast.parse(source).body if isinstance(node, ast.If)]
    found: dict[str, str] = {}
    for node in (node for block in blocks for node in block if isinstance(node, ast.ImportFrom)):
        home = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        found |= {alias.name: home for alias in node.names}
    return found


def lazy_exports(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package (PEP 562), which imports names under ``TYPE_CHECKING``.

    A name whose module has been deleted is not an attribute of the package, and not listed. A module that cannot be
    imported raises an ImportError.
    """

    def exists(home: str) -> bool:
        # os.path, since importing pathlib takes longer than the rest of ``import dalsegno``
        top, *inner = home.split(".")
        path = os.path.join(sys.modules[top].__path__[0], *inner)  # noqa: PTH118
        return os.path.isdir(path) or os.path.isfile(f"{path}.py")  # noqa: PTH112, PTH113

    def find(name: str) -> object:
        home = homes_of(package).get(name)
        if home is None or not exists(home):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(home)
        except AttributeError as error:  # which ``from package import name`` would report as a name that is missing
            raise ImportError(f"{home} cannot be imported: AttributeError: {error}") from error
        found = getattr(module, name)
        setattr(sys.modules[package], name, found)
        return found

    return find, lambda: sorted(name for name, home in homes_of(package).items() if exists(home))


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
