"""The table: ``python -m benchmarks [--list] [--small] [--json FILE] [NAME…]``.

Each benchmark is measured in a process of its own, so that none feels what another has left behind. A row whose figure
is impossible, and a benchmark that fails, end the table with status 1.
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
    "dialects",
    "imports",
    "save",
    "standstill",
    "memory",
    "commands",
    "control",
    "planning",
    "layouts",
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows, machine and versions")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(NAMES))
        return 0
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    names = options.names or NAMES
    measure = _measure_here if options.small or len(names) == 1 else _measure_in_a_process
    rows: list[Row] = []
    for name in names:
        began = time.perf_counter()
        try:
            rows += measure(name, options.small)
        except Exception as error:  # one that breaks keeps no other from being measured
            traceback.print_exc()
            rows.append(Row.failed(name, error))
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    print(table(rows))
    if options.json:
        results.write(options.json, rows)
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
        return results.read(path)


if __name__ == "__main__":
    sys.exit(main())
