"""The table: ``python -m benchmarks [--list] [--small] [NAME…]``."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback

from .row import Row, table

NAMES = (
    "events",
    "loop",
    "dialects",
    "imports",
    "save",
    "standstill",
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
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(NAMES))
        return 0
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    rows: list[Row] = []
    broken = 0
    for name in options.names or NAMES:
        began = time.perf_counter()
        try:
            module = importlib.import_module(f"benchmarks.{name}")
            rows += module.run(**module.SMALL if options.small else {})
        except Exception as error:  # one that breaks keeps no other from being measured
            traceback.print_exc()
            rows.append(Row(name, f"failed: {type(error).__name__}", ""))
            broken += 1
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    print(table(rows))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
