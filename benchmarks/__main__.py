"""The table: ``python -m benchmarks [--list] [--small] [--json FILE] [NAME…]``.

Each benchmark is measured in a process of its own, so that none feels what another has left behind. Its rows are
printed as soon as it is measured, and written to FILE in place of its former ones. The status is 1 if a figure
is impossible or a benchmark failed.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from . import results
from .row import Row, table

NAMES = (
    "events",
    "loop",
    "long_run",
    "dialects",
    "imports",
    "save",
    "standstill",
    "memory",
    "commands",
    "control",
    "planning",
    "ranks",
    "layouts",
    "switches",
    "load",
    "resume_data",
    "rewind",
    "list_checkpoints",
    "logs",
    "plots",
    "observers",
    "launch",
    "back",
    "diloco",
    "callbacks",
)
"""Modules of this package, in the table's order. Each has a ``run() -> list[Row]``, and in ``SMALL`` the arguments of
its small form."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What dalsegno takes, beside its peers.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which to run: {', '.join(NAMES)}; all if none is given"
    )
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--small", action="store_true", help="only see that each still runs; the figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows, machine and versions to FILE")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(NAMES))
        return 0
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    if options.json and options.small:
        parser.error("the figures of --small mean nothing; leave out --json")
    if options.json:
        try:
            results.read(options.json)
            options.json.parent.mkdir(parents=True, exist_ok=True)
        except (results.NotResults, OSError) as error:  # now, and not when the first benchmark is through
            parser.error(str(error))
    names = options.names or NAMES
    measure = _measure_here if options.small or len(names) == 1 else _measure_in_a_process
    rows: list[Row] = []
    for name in names:
        machine, began = results.machine(), time.perf_counter()
        try:
            measured = measure(name, options.small)
        except Exception as error:  # one that breaks keeps no other from being measured
            traceback.print_exc()
            measured = [Row.failed(name, error)]
        print(f"\n{name}: {time.perf_counter() - began:.0f} s\n{table(measured)}", flush=True)
        if options.json:
            results.add(options.json, name, measured, machine)
        rows += measured
    return 1 if any(row.has_failed or (row.is_impossible and not options.small) for row in rows) else 0


def _measure_here(name: str, small: bool) -> list[Row]:
    module = importlib.import_module(f"benchmarks.{name}")
    rows: list[Row] = module.run(**module.SMALL if small else {})
    return rows


def _measure_in_a_process(name: str, _: bool) -> list[Row]:
    """
    Raises:
        CalledProcessError: if the process ends without rows.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        words = [sys.executable, "-m", "benchmarks", name, "--json", str(path)]
        done = subprocess.run(words, stdout=subprocess.DEVNULL, check=False)
        if not path.exists():
            done.check_returncode()
        return results.rows_of(path, name)


if __name__ == "__main__":
    sys.exit(main())
