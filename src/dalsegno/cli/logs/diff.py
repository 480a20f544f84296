"""Compare two logs record by record, wall-clock fields aside.

A run that was killed and resumed has the same records as an uninterrupted one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.cli.tables import Column, print_json, print_table
from dalsegno.errors import ConfigurationError

from .arguments import add_json, add_step_key

if TYPE_CHECKING:
    from dalsegno.analysis import RecordDifference, TrainingLog
    from dalsegno.logs.values import Record

EXIT_STATUSES = {1: "the logs differ"}

SHOWN = 10


def describe(parser: argparse.ArgumentParser) -> None:
    for name, metavar in (("first", "A"), ("second", "B")):
        parser.add_argument(name, metavar=metavar, type=Path, help="run directory or log file")
    add_step_key(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing, stop at the first difference")
    parser.add_argument(
        "-n",
        "--most",
        type=int,
        default=SHOWN,
        metavar="N",
        help="print at most N differing records; default: %(default)s",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no such log.
        ConfigurationError: for a directory of several runs.
    """
    from dalsegno.analysis import diff_records, open_log
    from dalsegno.analysis.names import make_names_unique

    first, second = (open_log(path, arguments.step_key) for path in (arguments.first, arguments.second))
    for log in (first, second):
        if len(log) > 1:
            raise ConfigurationError(f"{log.path} contains {len(log)} runs; name the one to compare")
    make_names_unique((first, second))
    found = diff_records(_with_header(first), _with_header(second))
    if arguments.quiet:
        return 1 if any(True for _ in found) else 0
    shown = list(islice(found, max(1, arguments.most)))
    more = sum(1 for _ in found)
    rows = [row for difference in shown for row in _rows(difference)]
    if arguments.json:
        print_json({"identical": not shown, "differing_records": len(shown) + more, "differences": rows})
    elif shown:
        columns = [Column("step", "step", right=True), Column("kind", "kind"), Column("field", "field")]
        print_table([*columns, Column("first", first.name), Column("second", second.name)], rows)
        count = len(shown) + more
        differ = "record differs" if count == 1 else "records differ"
        print(f"{count:,} {differ}" + (f"; the first {len(shown)} are shown" if more else ""))
    else:
        print("No record differs.")
    return 1 if shown else 0


def _with_header(log: TrainingLog) -> Iterator[Record]:
    if log.header:
        yield {"kind": "header", **log.header}
    yield from log.records()


def _rows(difference: RecordDifference) -> list[dict[str, Any]]:
    where = {"step": difference.step, "kind": difference.kind}
    if difference.only_in is not None:
        here = {"first": "the record", "second": "the record"}
        return [{**where, "field": None, **here, ("second" if difference.only_in == "first" else "first"): "missing"}]
    return [
        {**where, "field": field.field, "first": _exact(field.first), "second": _exact(field.second)}
        for field in difference.fields
    ]


def _exact(value: Any) -> Any:
    """A printable value with all its digits."""
    return value if isinstance(value, (str, int, float)) or value is None else repr(value)
