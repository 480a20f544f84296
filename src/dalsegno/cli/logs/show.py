"""Show records of a run, selected by step, kind, metric or condition.

    dalsegno logs show runs/a --step 100:200 --metrics loss,grad_norm
    dalsegno logs show runs/a --where "loss > 3 and step >= 500"

A condition compares a field with a number or a string by < <= > >= == or !=; combine conditions with and, or, not and
parentheses. With --json: one record per line.
"""

from __future__ import annotations

import argparse
import math
import sys

from dalsegno.cli.tables import print_json_line
from dalsegno.errors import ConfigurationError, UnknownName

from .arguments import add_json, add_metrics, add_runs

EXIT_STATUSES = {1: "no record matches"}

ALWAYS = ("run", "timestamp", "kind", "global_step", "epoch")
KINDS = ("train", "eval", "final", "user", "sync")


def describe(parser: argparse.ArgumentParser) -> None:
    add_runs(parser, several=False)
    parser.add_argument(
        "--step", metavar="A:B", default=":", help="steps A to B, both included, either optional; default: all"
    )
    add_metrics(parser)
    parser.add_argument("--where", metavar="CONDITION", help="only records that satisfy the condition; default: all")
    kinds = f"only records of this kind: {', '.join(KINDS)}; default: all"
    parser.add_argument("--kind", choices=KINDS, metavar="KIND", help=kinds)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no log.
        ConfigurationError: for invalid steps or an invalid condition.
        UnknownName: for a metric in ``--metrics`` or the condition that no record has.
    """
    from dalsegno.analysis import open_log
    from dalsegno.analysis.where import parse_condition

    from .records import RecordTable

    first, last = _steps(arguments.step)
    holds = parse_condition(arguments.where) if arguments.where else None
    log = open_log(arguments.run_path, arguments.step_key)
    chosen = arguments.metrics
    table = None if arguments.json else RecordTable(chosen, several=len(log) > 1)
    shown = 0
    seen: dict[str, None] = {}
    for record in log.records(arguments.kind):
        seen.update(dict.fromkeys(record))
        if not first <= record["global_step"] <= last or (holds is not None and not holds(record)):
            continue
        if chosen and not any(name in record for name in chosen):
            continue
        shown += 1
        if table is not None:
            table.print(record)
        elif chosen:
            print_json_line({name: value for name, value in record.items() if name in (*ALWAYS, *chosen)})
        else:
            print_json_line(record)
    for name in (*(chosen or ()), *(holds.names if holds and not shown else ())):
        if name not in seen and name not in ALWAYS:
            raise UnknownName(f"metric of {log.name}", name, [name for name in seen if name not in ALWAYS])
    if log.skipped:
        print(f"dalsegno: skipped {log.skipped.count:,}: {log.skipped}", file=sys.stderr)
    return 0 if shown else 1


def _steps(text: str) -> tuple[float, float]:
    """First and last step of ``A:B``, ``A:``, ``:B`` or ``A``."""
    first, colon, last = text.partition(":")
    try:
        begin = int(first) if first else -math.inf
        return begin, (int(last) if last else math.inf) if colon else begin
    except ValueError:
        raise ConfigurationError(f"--step {text}: write steps as 100:200, 100:, :200 or 100") from None
