"""What a file imports, wherever in the file it does so: read once in a process, and in those forked from it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@cache
def imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in _statements(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements, at any depth: an import is never part of an expression."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        yield node
        for inner in ("body", "orelse", "finalbody", "handlers", "cases"):
            todo += getattr(node, inner, ())
