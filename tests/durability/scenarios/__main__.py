"""``python -m durability.scenarios``: try all scenarios."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import durability.scenarios

from .scenario import SCENARIOS, outcomes, write


def main() -> int:
    parser = argparse.ArgumentParser(description=(durability.scenarios.__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="only scenarios with one of these in their names; default: all")
    parser.add_argument("--write", action="store_true", help="write what has been shown to shown.json")
    options = parser.parse_args()
    silent = 0
    for name in SCENARIOS:
        if options.names and not any(part in name for part in options.names):
            continue
        with tempfile.TemporaryDirectory(prefix="dalsegno-scenarios-") as folder:
            found = outcomes(name, Path(folder))
        for way, trial in found.items():
            silent += trial.verdict == "different"
            words = trial.words.partition("\n")[0].replace(f"{folder}/", "")
            print(f"{trial.verdict:10} {name}, {way}{f': {words}' if words else ''}", flush=True)
        if options.write:
            write({name: {way: str(trial.verdict) for way, trial in found.items()}})
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
