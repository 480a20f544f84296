"""Commands on what a checkpoint contains: show, diff."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dalsegno.cli.command import DIR, JSON, argument, command, flag, place
from dalsegno.cli.console import Column, numbers, print_json, print_table, sizes, texts, visible
from dalsegno.errors import expect_known

if TYPE_CHECKING:
    from dalsegno.checkpoint import Checkpoint
    from dalsegno.checkpoint.difference import Difference


@command(
    DIR,
    argument(
        "--component",
        metavar="KEY",
        action="append",
        help="show only this component, say callbacks.JsonLogger; may be repeated; default: all",
    ),
    flag("--full", help="do not shorten lists and strings"),
    JSON,
    statuses={1: "a file of the checkpoint cannot be read"},
)
def show(arguments: argparse.Namespace) -> int:
    """Show the contents of a checkpoint: components, their states as JSON, and every tensor.

    Long lists and strings in a state are shortened, unless --json or --full is given. Nothing is verified: see
    'dalsegno checkpoints verify'. Of a checkpoint with missing files, the rest is shown.
    """
    from dalsegno.checkpoint.json_view import readable_states, shortened
    from dalsegno.checkpoint.listing import newest

    checkpoint = newest(arguments.place)
    components = checkpoint.manifest.components
    expect_known("component", arguments.component or (), components)
    keys = arguments.component or list(components)
    problems: list[str] = []
    states = {key: each for key, each in readable_states(checkpoint, problems).items() if key in keys}
    tensors = _tensors(checkpoint, keys, problems)
    if arguments.json:
        print_json({**_as_json(checkpoint, states, tensors), "problems": problems})
    else:
        if not arguments.full:
            states = {key: [shortened(state) for state in each] for key, each in states.items()}
        _print_contents(checkpoint, states, tensors, problems)
    return 1 if problems else 0


def _tensors(checkpoint: Checkpoint, keys: Sequence[str], problems: list[str]) -> list[dict[str, Any]]:
    from dalsegno.checkpoint.json_view import readable_tensors

    rows = []
    for name, each in readable_tensors(checkpoint, problems).items():
        if name.startswith(tuple(f"{key}." for key in keys)):
            spans = [piece["bytes"] for piece in each["pieces"]]
            size = None if None in spans else sum(end - begin for begin, end in spans)
            rows.append({"name": name, "dtype": each["dtype"], "shape": each["shape"], "bytes": size})
            rows[-1]["pieces"] = each["pieces"]
    return rows


def _as_json(checkpoint: Checkpoint, states: dict[str, list[Any]], tensors: list[dict[str, Any]]) -> dict[str, Any]:
    its = checkpoint.manifest
    return {
        "path": str(checkpoint.path),
        "step": its.step,
        "saved": its.created,
        "ranks": its.world_size,
        "torch": its.torch,
        "dalsegno": its.dalsegno,
        "metrics": dict(its.metrics),
        "best": its.best,
        "files": {name: {"size": file.size, "xxh3": file.xxh3} for name, file in its.files.items()},
        "components": {
            key: {
                "class": its.components[key].class_name,
                "version": its.components[key].version,
                "scope": its.components[key].scope,
                "states": each,
            }
            for key, each in states.items()
        },
        "tensors": tensors,
    }


def _print_contents(
    checkpoint: Checkpoint, states: dict[str, list[Any]], tensors: list[dict[str, Any]], problems: Sequence[str]
) -> None:
    def show(line: str = "") -> None:
        print(visible(line))  # the contents are not verified

    its = checkpoint.manifest
    show(str(checkpoint.path))
    made_by = f"{its.world_size} rank(s) with dalsegno {its.dalsegno}, torch {its.torch}"
    show(f"step {its.step}, saved {its.created} by {made_by}")
    if its.metrics:
        show(", ".join(f"{name} {value:.5g}" for name, value in its.metrics.items()) + (" (best)" if its.best else ""))
    for key, each in states.items():
        record = its.components[key]
        show()
        show(f"{key}  {record.class_name}, {record.scope}, version {record.version}")
        for rank, state in enumerate(each):
            title = f"  rank {rank}: " if len(each) > 1 else "  "
            first, *rest = json.dumps(state, indent=2, ensure_ascii=False).split("\n")
            for line in (title + first, *(f"  {line}" for line in rest)):
                show(line)
    if tensors:
        print()
        columns = texts(name="tensor", dtype="dtype", shape="shape")
        print_table([*columns, *sizes(bytes="size"), Column("pieces", "where", _where)], tensors)
    if problems:
        show()
    for problem in problems:
        show(problem)


def _where(pieces: list[dict[str, Any]]) -> str:
    spans = [(each["file"], each["bytes"]) for each in pieces]
    return ", ".join(f"{file}:{f'{span[0]}-{span[1]}' if span else '?'}" for file, span in spans) or "not saved"


@command(
    argument("first", metavar="A", type=place, help="checkpoint, or run directory for its newest one"),
    argument("second", metavar="B", type=place, help="checkpoint or run directory to compare with A"),
    flag("--tensors", help="compare tensors only: model, optimizer"),
    JSON,
    statuses={1: "the checkpoints differ"},
)
def diff(arguments: argparse.Namespace) -> int:
    """Compare two checkpoints: tensors that differ and by how much, states side by side.

    Both are verified first.
    """
    from dalsegno.checkpoint.difference import state_differences, tensor_differences
    from dalsegno.checkpoint.listing import newest_verified

    first, second = newest_verified(arguments.first), newest_verified(arguments.second)
    found = [*tensor_differences(first, second), *([] if arguments.tensors else state_differences(first, second))]
    tensors = [_tensor_row(each) for each in found if each.is_tensor]
    states = [_state_row(each) for each in found if not each.is_tensor]
    if arguments.json:
        print_json({"first": str(first.path), "second": str(second.path), "tensors": tensors, "states": states})
        return 1 if found else 0
    print(f"A: {first.path}\nB: {second.path}")
    if not found:
        print("Nothing differs.")
    if tensors:
        print()
        counts = numbers(differing="differing", elements="of", max_abs="max abs", max_rel="max rel")
        print_table([*texts(tensor="tensor"), *counts, *texts(first="A", second="B")], tensors)
    if states:
        print()
        print_table(texts(component="component", path="value", first="A", second="B"), states)
    return 1 if found else 0


def _tensor_row(found: Difference) -> dict[str, Any]:
    differing, total = found.count or (None, None)
    return {
        "tensor": found.name,
        "first": found.values[0],
        "second": found.values[1],
        "differing": differing,
        "elements": total,
        "max_abs": found.max_abs,
        "max_rel": found.max_rel,
    }


def _state_row(found: Difference) -> dict[str, Any]:
    one, other = (each if isinstance(each, bool | int | float | str | None) else str(each) for each in found.values)
    return {"component": found.component, "path": found.path, "first": one, "second": other}
