"""Commands that show records: show, tail, diff, export."""

from __future__ import annotations

import argparse
import io
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno import analysis
from dalsegno.cli.command import JSON, argument, command, expect_directory_of, flag, one_of, option
from dalsegno.cli.console import (
    Column,
    complain,
    fitted,
    in_words,
    number,
    print_json,
    print_table,
    texts,
    visible,
    visible_lines,
)
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.logs.values import is_number

from .arguments import FORCE, STEP_KEY, expect_free, metric_names, run_paths

if TYPE_CHECKING:
    from dalsegno.analysis.follow import Cut
    from dalsegno.logs.values import Record

ALWAYS = ("run", "timestamp", "kind", "global_step", "epoch")
"""Fields of a record that are not metrics."""
KINDS = ("train", "eval", "final", "user", "sync", "save")


@command(
    run_paths(several_runs=False),
    option("--step", metavar="A:B", default=":", help="steps A to B, both included, either optional; default: all"),
    metric_names(),
    option("--where", metavar="CONDITION", help="only records that satisfy the condition; default: all"),
    argument(
        "--kind", choices=KINDS, metavar="KIND", help=f"only records of this kind: {', '.join(KINDS)}; default: all"
    ),
    JSON,
    statuses={1: "no record matches"},
)
def show(arguments: argparse.Namespace) -> int:
    """Show records of a run, selected by step, kind, metric or condition.

        dalsegno logs show runs/a --step 100:200 --metrics loss,grad_norm
        dalsegno logs show runs/a --where "loss > 3 and step >= 500"

    A condition compares a field with a number or a string by < <= > >= == or !=; combine conditions with and, or, not
    and parentheses. With --json: one record per line.
    """
    from dalsegno.analysis.where import parse_condition

    first, last = _step_range(arguments.step)
    holds, compared = parse_condition(arguments.where) if arguments.where else (lambda record: True, [])
    log = analysis.open_log(arguments.run_path, arguments.step_key)
    chosen = arguments.metrics
    table = None if arguments.json else RecordTable(chosen, several=len(log) > 1)
    shown = count = 0
    low, high = math.inf, -math.inf
    seen: dict[str, None] = {}
    for record in log.records(arguments.kind):
        seen.update(dict.fromkeys(record))
        step = record["global_step"]
        count, low, high = count + 1, min(low, step), max(high, step)
        if not first <= step <= last or not holds(record):
            continue
        if chosen and not any(name in record for name in chosen):
            continue
        shown += 1
        if table is not None:
            table.print(record)
        elif chosen:
            print_json({name: value for name, value in record.items() if name in (*ALWAYS, *chosen)}, indent=None)
        else:
            print_json(record, indent=None)
    for name in (*(chosen or ()), *(compared if not shown else ())):
        if name not in seen and name not in ALWAYS:
            raise UnknownName(f"metric of {log.name}", name, [name for name in seen if name not in ALWAYS])
    if not shown:
        known = f"{count:,}, of steps {low:,} to {high:,}" if count else "none"
        of_kind = f" of kind {arguments.kind}" if arguments.kind else ""
        complain(f"no record of {log.name} matches; records{of_kind} in the log: {known}")
    if log.skipped:
        complain(f"skipped {log.skipped.count:,}: {log.skipped}")
    return 0 if shown else 1


def _step_range(text: str) -> tuple[float, float]:
    """First and last step of ``A:B``, ``A:``, ``:B`` or ``A``."""
    first, colon, last = text.partition(":")
    try:
        begin = int(first) if first else -math.inf
        return begin, (int(last) if last else math.inf) if colon else begin
    except ValueError:
        raise ConfigurationError(f"--step {text}: write steps as 100:200, 100:, :200 or 100") from None


WIDE = 56
"""Width of a run's column in a file or pipe, in characters."""


@command(
    run_paths(),
    flag("-f", "--follow", help="keep printing new records until Ctrl-C"),
    option("-n", "--lines", metavar="N", default=10, help="last records to print"),
    metric_names(),
    option("--interval", metavar="SECONDS", default=0.2, help="time between two reads with -f"),
    JSON,
)
def tail(arguments: argparse.Namespace) -> int:
    """Show the last records of runs side by side, and with -f new ones as they are logged.

    With -f, a log that is rewound because its run resumed from a checkpoint is followed from there, and one that
    continues in another file, in that file; stop with Ctrl-C. With --json: one record per line.
    """
    from dalsegno.analysis.follow import Follower

    if arguments.lines < 0:
        raise ConfigurationError(f"-n {arguments.lines}: must be at least 0")
    if not arguments.interval > 0:
        raise ConfigurationError(f"--interval {arguments.interval}: must be a positive number of seconds")
    logs = analysis.open_logs(arguments.runs, arguments.step_key)
    show = partial(_print_news, logs) if arguments.json else _SideBySide(logs, arguments.metrics).print_news
    followers = [Follower(log.source, log.path if log.path.is_dir() else None) for log in logs]
    show([follower.last(arguments.lines) for follower in followers])
    while arguments.follow:
        time.sleep(arguments.interval)
        show([follower.new() for follower in followers])
    return 0


def _print_news(logs: Sequence[analysis.TrainingLog], of_runs: Sequence[Sequence[Record | Cut]]) -> None:
    for log, of_run in zip(logs, of_runs, strict=True):
        for news in of_run:
            record = news if isinstance(news, dict) else {"kind": "cut", "global_step": news.step}
            print_json({"run": log.name, **record}, indent=None)
    sys.stdout.flush()


class _SideBySide:
    """One column per run; records read at the same time share a line."""

    def __init__(self, logs: Sequence[analysis.TrainingLog], metrics: Sequence[str] | None) -> None:
        self._metrics = metrics
        self._live = sys.stdout.isatty()
        self._alone = len(logs) == 1
        columns = shutil.get_terminal_size().columns if self._live else WIDE * len(logs)
        self._width = columns // len(logs)
        if not self._alone:
            self._print([log.name for log in logs])

    def print_news(self, of_runs: Sequence[Sequence[Record | Cut]]) -> None:
        cells = [[text for news in of_run if (text := self._as_text(news))] for of_run in of_runs]
        for row in zip_longest(*cells, fillvalue=""):
            self._print(row)

    def _as_text(self, news: Record | Cut) -> str:
        """Empty for a record that has none of the metrics."""
        if not isinstance(news, dict):
            return "-- log replaced --" if news.step is None else f"-- back to step {news.step:,} --"
        if self._metrics and not any(name in news for name in self._metrics):
            return ""
        return as_words(news, self._metrics)

    def _print(self, cells: Sequence[str]) -> None:
        room = self._width - 2
        if self._live and not self._alone:
            cells = [fitted(cell, room) for cell in cells]
        elif not self._alone and sum(map(bool, cells)) > 1 and any(len(cell) > room for cell in cells):
            for place, cell in enumerate(cells):  # each on its own line, so that its column still names its run
                self._print([*[""] * place, cell])
            return
        print("  ".join(cell.ljust(room) for cell in cells).rstrip(), flush=True)


NARROW = 10
"""Least width of a column, in characters."""


class RecordTable:
    """Prints one line per record, and a header before the first."""

    def __init__(self, metrics: Sequence[str] | None, *, several: bool) -> None:
        """``metrics``: columns; None: the metrics of the first record, as many as fit a terminal, and all others as
        ``name value`` at the end of the line."""
        self._metrics = metrics
        self._rest = metrics is None
        self._several = several
        self._begun = False
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    def print(self, record: Mapping[str, Any]) -> None:
        if not self._begun:
            self._begin(record)
        run = [str(record["run"]).ljust(NARROW)] if self._several else []
        cells = [*run, record["kind"].ljust(5), f"{record['global_step']:,}".rjust(9), _cell(record, "epoch", 8)]
        if not self._rest or any(name in record for name in self._metrics or ()):
            cells += [_cell(record, name, _width_of(name)) for name in self._metrics or ()]
        if self._rest:
            words = in_words(_others(record, self._metrics or ()))
            print(fitted("  ".join([*cells, words]).rstrip(), self._width))
        else:
            print("  ".join(cells).rstrip())

    def _begin(self, record: Mapping[str, Any]) -> None:
        self._begun = True
        run = ["run".ljust(NARROW)] if self._several else []
        head = [*run, "kind".ljust(5), "step".rjust(9), "epoch".rjust(8)]
        if self._metrics is None:
            end, self._metrics = len("  ".join(head)), []
            for name in (name for name, value in _others(record, ()).items() if is_number(value)):
                end += _width_of(name) + 2
                if self._width is None or end + 2 <= self._width:  # two characters are left for " …"
                    self._metrics.append(name)
        print("  ".join([*head, *(visible(name).rjust(NARROW) for name in self._metrics)]).rstrip())


def as_words(record: Mapping[str, Any], metrics: Sequence[str] | None) -> str:
    """A record as ``step 120  loss 3.21  epoch 0.5``."""
    chosen = _others(record, ()) if metrics is None else {name: record[name] for name in metrics if name in record}
    kind = "" if record.get("kind", "train") == "train" else f"{record['kind']}  "
    epoch = f"  epoch {number(record['epoch'])}" if is_number(record.get("epoch")) else ""
    return f"{kind}step {record['global_step']:,}  {in_words(chosen)}{epoch}"


def _width_of(name: str) -> int:
    return max(len(visible(name)), NARROW)


def _others(record: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in (*ALWAYS, *names)}


def _cell(record: Mapping[str, Any], name: str, width: int) -> str:
    value = record.get(name)
    text = "" if value is None else number(value) if is_number(value) else visible(str(value))
    return text.rjust(width)


@command(
    argument("first", metavar="A", type=Path, help="run directory or log file"),
    argument("second", metavar="B", type=Path, help="run directory or log file"),
    STEP_KEY,
    flag("-q", "--quiet", help="print nothing, stop at the first difference"),
    option("-n", "--most", metavar="N", default=10, help="print at most N differing records"),
    JSON,
    statuses={1: "the logs differ"},
)
def diff(arguments: argparse.Namespace) -> int:
    """Compare two logs record by record, wall-clock fields aside.

    A run that was killed and resumed has the same records as an uninterrupted one.
    """
    from dalsegno.analysis.folder import make_names_unique

    first, second = (analysis.open_log(path, arguments.step_key) for path in (arguments.first, arguments.second))
    for log in (first, second):
        if len(log) > 1:
            raise ConfigurationError(f"{log.path} contains {len(log)} runs; name the one to compare")
    make_names_unique((first, second))
    found = analysis.diff_records(_with_header(first), _with_header(second))
    if arguments.quiet:
        return 1 if any(True for _ in found) else 0
    shown = list(islice(found, max(1, arguments.most)))
    more = sum(1 for _ in found)
    rows = [row for difference in shown for row in _difference_rows(difference)]
    if arguments.json:
        print_json({"identical": not shown, "differing_records": len(shown) + more, "differences": rows})
    elif shown:
        columns = texts(kind="kind", field="field", first=first.name, second=second.name)
        print_table([Column("step", "step", right=True), *columns], rows)
        count = len(shown) + more
        differ = "record differs" if count == 1 else "records differ"
        print(f"{count:,} {differ}" + (f"; the first {len(shown)} are shown" if more else ""))
    else:
        print("No record differs.")
    return 1 if shown else 0


def _with_header(log: analysis.TrainingLog) -> Iterator[Record]:
    if log.header:
        yield {"kind": "header", **log.header}
    yield from log.records()


def _difference_rows(difference: analysis.RecordDifference) -> list[dict[str, Any]]:
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


TARGETS = ("csv", "parquet", "json", "tensorboard")


@command(
    run_paths(several_runs=False),
    one_of(
        argument("--to", choices=TARGETS, help="output format"),
        argument("--json", dest="to", action="store_const", const="json", help="short for --to json"),
        required=True,
    ),
    option("-o", "--output", metavar="PATH", help="output file, for tensorboard a directory; default: standard output"),
    FORCE,
)
def export(arguments: argparse.Namespace) -> int:
    """Export a log as CSV, Parquet, JSON or TensorBoard event files.

    A directory of runs is exported as a whole: with a column "run", for TensorBoard into a subdirectory for each run.
    Without -o, CSV and JSON go to standard output.
    """
    from dalsegno.analysis.export import export_log

    output: Path | None = arguments.output
    if output is None and arguments.to in ("parquet", "tensorboard"):
        raise ConfigurationError(f"--to {arguments.to} needs -o: it cannot be printed")
    if output is not None:
        expect_directory_of(output)
        if arguments.to != "tensorboard":
            expect_free(output, arguments)
    log = analysis.open_log(arguments.run_path, arguments.step_key)
    if output is None and sys.stdout.isatty():
        printed = io.BytesIO()
        export_log(log, arguments.to, printed)
        print(visible_lines(printed.getvalue().decode(errors="replace")), end="")
    else:
        export_log(log, arguments.to, sys.stdout.buffer if output is None else output)
    if output is not None:
        print(f"wrote {output}")
    if log.skipped:
        complain(f"skipped {log.skipped.count:,}: {log.skipped}")
    return 0
