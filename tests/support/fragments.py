"""Blocks of Python on a page that are parts of a program: checked against today's names and signatures, and run.

A page takes names for granted (``model``, ``train``, the built-in callbacks) and leaves arguments out
(``ds.Trainer(..., callbacks=[…])``). :func:`scene` has these names, and :func:`run` fills in what is left out.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import dalsegno as ds
from dalsegno import callbacks
from dalsegno.data import ResumableSampler
from dalsegno.testing import TinyRegression, tiny_regression_data

from .pages import FEW

BUILTINS = {name: getattr(callbacks, name) for name in callbacks.__all__}


def blocks(page: Path) -> list[str]:
    """The page's blocks of Python, in order."""
    return blocks_of(page.read_text(encoding="utf-8"))


def blocks_of(text: str) -> list[str]:
    """The blocks of Python in a part of a page, in order."""
    fences = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [code for language, code in fences if language == "python"]


def mismatches(codes: list[str]) -> Iterator[str]:
    """Each use of dalsegno in the blocks of a page that no longer fits: an unknown name, or wrong arguments."""
    trees = [ast.parse(code) for code in codes]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    known: dict[str, Any] = {**BUILTINS, "ds": ds, "trainer": ds.Trainer, "run": ds.Run}
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            known.pop(node.name, None)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("dalsegno"):
            for alias in node.names:
                known.pop(alias.asname or alias.name, None)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dalsegno"):
            exec(ast.unparse(node), known)  # our own page; ImportError if there is no such name
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = known.get(node.value.id)
            if owner is not None and not hasattr(owner, node.attr):
                yield f"{ast.unparse(node)} does not exist"
        elif isinstance(node, ast.Call) and (wrong := _wrong_arguments(node, known)):
            yield f"{ast.unparse(node)}: {wrong}"


def _wrong_arguments(call: ast.Call, known: dict[str, Any]) -> str:
    """Why the call does not fit the signature of what it calls; empty if it does, or calls something unknown."""
    owner = known.get(call.func.value.id) if _is_method(call.func) else None
    target = getattr(owner, call.func.attr, None) if owner else known.get(getattr(call.func, "id", ""))
    if isinstance(target, property) or not callable(target):
        return ""
    signature = inspect.signature(target.__init__ if isinstance(target, type) else target)
    bound = isinstance(target, type) or isinstance(owner, type)
    given = [None] * bound + [None for each in call.args if not _is_left_out(each)]
    named = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    is_part = any(_is_left_out(each) for each in call.args) or len(named) < len(call.keywords)
    try:
        (signature.bind_partial if is_part else signature.bind)(*given, **named)
    except TypeError as error:
        return str(error)
    return ""


def _is_method(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)


def _is_left_out(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Starred) or (isinstance(argument, ast.Constant) and argument.value is Ellipsis)


def scene() -> dict[str, Any]:
    """The names that pages take for granted."""
    data = tiny_regression_data(40)
    model = TinyRegression()
    args = ds.TrainingArguments("runs/scene", max_steps=FEW, use_cpu=True)
    samples = ("train", "valid", "data", "dataset", "web", "code", "books", "my_part_of_the_data")
    functions = ("upload", "note", "plot")
    return {
        **BUILTINS,
        **dict.fromkeys(samples, data),
        **dict.fromkeys(functions, print),
        "ds": ds,
        "torch": torch,
        "np": np,
        "Path": Path,
        "StatefulDataLoader": StatefulDataLoader,
        "ResumableSampler": ResumableSampler,
        "DistributedSampler": DistributedSampler,
        "model": model,
        "Model": TinyRegression,
        "MyModel": TinyRegression,
        "args": args,
        "trainer": ds.Trainer(model, args, train_dataset=data),
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loader": DataLoader(data, batch_size=4),
        "compute": lambda model, batch: model(**batch),
        "validate": lambda model: 0.5,
        "rank": 0,
        "world_size": 1,
        "prompts": ["the dog"],
        "writer": callbacks.ResumableSummaryWriter(),
        "UploadSamples": ds.Callback,
    }


class _FilledIn(ast.NodeTransformer):
    """``ds.Trainer(..., callbacks=[…])`` gets the scene's model, settings and data."""

    def visit_Call(self, call: ast.Call) -> ast.Call:
        self.generic_visit(call)
        if any(_is_left_out(each) for each in call.args):
            call.args = [ast.Name("model", ast.Load()), ast.Name("args", ast.Load())]
            call.keywords.append(ast.keyword("train_dataset", ast.Name("train", ast.Load())))
        return call


def run(code: str, variables: dict[str, Any]) -> None:
    """Run a block with these variables, as our own page has it."""
    tree = ast.fix_missing_locations(_FilledIn().visit(ast.parse(code)))
    exec(compile(tree, "page", "exec"), variables)
