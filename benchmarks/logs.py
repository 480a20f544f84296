"""Logs of a million and of ten million records, read: seconds beside other readers, and memory beside the columns."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import polars as pl

import dalsegno as ds
from dalsegno.analysis.follow import Follower

from .peers import PeerMissing, ask
from .processes import peak_memory_of, seconds_of
from .row import Row, count, duration, three_digits
from .timing import figure, in_turns, ratio

RECORDS = 1_000_000
MANY = 10_000_000
FEW = 1_000
ROUNDS = 5
EVERY = 1_000
"""Records of training for each one of an evaluation."""

SMALL = {"records": 20_000, "many": 50_000, "rounds": 1}
"""Of ``run``: with these it takes a second or so, and measures nothing."""

OF_POLARS = 1.5
"""Of the time that Polars alone takes. The rest shows that nothing was dropped: quotation marks are counted, texts and
steps looked at."""

COLUMNS = 7
"""Numbers of each record that a summary is about: time, step, epoch, loss, gradient norm, learning rate, tokens."""

DALSEGNO = str(Path(sys.executable).with_name("dalsegno"))


def run(records: int = RECORDS, many: int = MANY, rounds: int = ROUNDS) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=Path.cwd()) as directory:  # /tmp may be memory
        folder = Path(directory)
        small, long, longest = folder / "few.jsonl", folder / "train.jsonl", folder / "many.jsonl"
        write_log(small, FEW)
        write_log(long, records)
        rows = [*_frame(long, small, records, rounds), *_processes(small, long, records, rounds)]
        write_log(longest, many)
        return [*rows, _memory(small, longest, many, rounds), *_tail(longest, rounds)]


def write_log(path: Path, records: int) -> None:
    """What JsonLogger writes in a long run: a header, training, evaluations."""
    dice = np.random.default_rng(0)
    with path.open("w") as file:
        file.write('{"timestamp": 1.7e9, "kind": "header", "run": "long"}\n')
        for begin in range(1, records + 1, 100_000):
            steps = range(begin, min(begin + 100_000, records + 1))
            numbers = zip(
                steps, dice.normal(3, 0.1, len(steps)).tolist(), dice.random(len(steps)).tolist(), strict=True
            )
            file.writelines(_line(step, loss, norm) for step, loss, norm in numbers)


def _line(step: int, loss: float, norm: float) -> str:
    begin = f'{{"timestamp": {1.7e9 + step * 0.37:.2f}, "global_step": {step}, "epoch": {step / 1e5:.5f}, '
    if step % EVERY == 0:
        return f'{begin}"kind": "eval", "eval_loss": {loss}}}\n'
    return f'{begin}"loss": {loss}, "grad_norm": {norm:.9f}, "learning_rate": 0.0003, "tokens": {step * 8192}}}\n'


def _frame(long: Path, small: Path, records: int, rounds: int) -> list[Row]:
    """Polars leaves out what it has not seen among the first hundred lines, here the evaluations; we do not."""
    what = f"open a log of {count(records)} records, {long.stat().st_size // 10**6} MB, to a frame"
    measures: dict[str, Callable[[], object]] = {
        "ours": lambda: ds.open_log(long).frame(),
        "polars": lambda: pl.read_ndjson(long),
    }
    seconds = in_turns({name: _timed(measure) for name, measure in measures.items()}, rounds)
    times = ratio(seconds["ours"], seconds["polars"])
    ours = duration(median(seconds["ours"]))
    peer = f"polars.read_ndjson {duration(median(seconds['polars']))}"
    rows = [Row(what, ours, peer, f"{times:.2f} ×", f"≤ {OF_POLARS:.2f} ×", times <= OF_POLARS, times.spread)]
    try:
        others = [ask("logs", str(long), str(small)) for _ in range(rounds)]
    except PeerMissing as missing:
        return [*rows, Row(what, ours, str(missing))]
    for name in others[0]:
        theirs = median(each[name] for each in others)
        rows.append(Row(what, ours, f"{name} {duration(theirs)}", f"{median(seconds['ours']) / theirs:.2f} ×"))
    return rows


def _processes(small: Path, long: Path, records: int, rounds: int) -> list[Row]:
    numpy = ("python -c 'import numpy'", [sys.executable, "-c", "import numpy"])
    read = f"import polars; polars.read_ndjson({str(long)!r})"
    polars = ("a process that does polars.read_ndjson and no more", [sys.executable, "-c", read])
    commands = {
        f"dalsegno logs summary, {count(records)} records, whole process": (["summary", str(long)], polars, 1.0),
        f"dalsegno logs summary, {FEW:,} records, whole process": (["summary", str(small)], numpy, 0.25),
        "dalsegno logs --help, whole process": (["--help"], numpy, 0.25),
    }
    measures = {what: seconds_of([DALSEGNO, "logs", *words]) for what, (words, _, _) in commands.items()}
    measures |= {name: seconds_of(command) for name, command in (numpy, polars)}
    seconds = in_turns(measures, rounds)
    rows = []
    for what, (_, (peer, _), limit) in commands.items():
        ours, times = median(seconds[what]), ratio(seconds[what], seconds[peer])
        theirs = f"{peer}: {duration(median(seconds[peer]))}"
        rows.append(
            Row(what, duration(ours), theirs, f"{times:.2f} ×", f"≤ {duration(limit)}", ours <= limit, times.spread)
        )
    return rows


_SUMMARY = """
import sys
import polars
import dalsegno as ds
ds.open_log(sys.argv[1]).summary()
"""


def _memory(small: Path, longest: Path, many: int, rounds: int) -> Row:
    """The highest resident memory of a process that sums it up, over that of one that sums up a short log."""
    usual = median(peak_memory_of(_SUMMARY, str(small)) for _ in range(rounds))
    used = peak_memory_of(_SUMMARY, str(longest)) - usual
    needed = COLUMNS * many * 8
    return Row(
        f"memory for a summary of {count(many)} records, {longest.stat().st_size / 1e9:.1f} GB",
        f"{used / 1e6:.0f} MB",
        f"the {COLUMNS} columns that it is about: {needed / 1e6:.0f} MB",
        f"{three_digits(used / needed)} ×",
        "≤ 3 ×",
        used <= 3 * needed,
    )


def _tail(longest: Path, rounds: int) -> list[Row]:
    what = f"the last 10 records of a log of {longest.stat().st_size / 1e9:.1f} GB"
    command = [DALSEGNO, "logs", "tail", str(longest)]
    measures = {
        "ours": _timed(lambda: Follower(ds.open_log(longest).source).last(10)),
        "whole": seconds_of(command),
        "tail": seconds_of(["tail", "-n", "10", str(longest)]),
    }
    seconds = {name: figure(each) for name, each in in_turns(measures, rounds).items()}
    ours, whole = seconds["ours"], seconds["whole"]
    peer = f"tail -n 10, whole process: {duration(seconds['tail'])}"
    return [
        Row(what, duration(ours), peer, "", f"≤ {duration(0.1)}", ours <= 0.1, ours.spread),
        Row(f"{what}, whole process", duration(whole), peer, spread=whole.spread),
    ]


def _timed(measure: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        began = time.perf_counter()
        measure()
        return time.perf_counter() - began

    return timed
