"""Compare two checkpoints: tensors that differ and by how much, states side by side.

Both are verified first.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dalsegno.cli.arguments import place
from dalsegno.cli.tables import Column, number, print_json, print_table

from .arguments import add_json

if TYPE_CHECKING:
    from dalsegno.checkpoint.inspect.difference import StateDifference, TensorDifference

EXIT_STATUSES = {1: "the checkpoints differ"}


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", type=place, help="checkpoint, or run directory for its newest one")
    parser.add_argument("second", metavar="B", type=place, help="checkpoint or run directory to compare with A")
    parser.add_argument("--tensors", action="store_true", help="compare tensors only: model, optimizer")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if one of them does not exist.
        DamagedCheckpoint: if one of them fails verification.
    """
    from dalsegno.checkpoint.inspect.difference import TensorDifference, state_differences, tensor_differences
    from dalsegno.checkpoint.inspect.listing import newest_verified

    first, second = newest_verified(arguments.first), newest_verified(arguments.second)
    found = [*tensor_differences(first, second), *([] if arguments.tensors else state_differences(first, second))]
    tensors = [_tensor_row(each) for each in found if isinstance(each, TensorDifference)]
    states = [_state_row(each) for each in found if not isinstance(each, TensorDifference)]
    if arguments.json:
        print_json({"first": str(first.path), "second": str(second.path), "tensors": tensors, "states": states})
    else:
        print(f"A: {first.path}\nB: {second.path}")
        _print(tensors, states)
    return 1 if found else 0


def _tensor_row(found: TensorDifference) -> dict[str, Any]:
    differing, total = found.count or (None, None)
    return {
        "tensor": found.name,
        "first": found.forms[0],
        "second": found.forms[1],
        "differing": differing,
        "elements": total,
        "max_abs": found.max_abs,
        "max_rel": found.max_rel,
    }


def _state_row(found: StateDifference) -> dict[str, Any]:
    one, other = (_plain(value) for value in found.values)
    return {"component": found.component, "path": found.path, "first": one, "second": other}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _print(tensors: list[dict[str, Any]], states: list[dict[str, Any]]) -> None:
    if not tensors and not states:
        print("Nothing differs.")
    if tensors:
        print()
        print_table(
            [
                Column("tensor", "tensor"),
                Column("differing", "differing", number, right=True),
                Column("elements", "of", number, right=True),
                Column("max_abs", "max abs", number, right=True),
                Column("max_rel", "max rel", number, right=True),
                Column("first", "A"),
                Column("second", "B"),
            ],
            tensors,
        )
    if states:
        print()
        columns = [Column("component", "component"), Column("path", "value")]
        print_table([*columns, Column("first", "A"), Column("second", "B")], states)
