"""Kill a run before each file operation of a rollback, resume it, and compare: ``make rollbacks``.

The run goes back twice. It is killed before each operation of these rollbacks. Then it is killed once the first one is
decided, and the next leg, which completes it, before each of its operations until then.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from dalsegno.system import filesystem
from dalsegno.testing import FaultPlan, compare_runs, start_ranks
from dalsegno.training.rollback import RECOVERIES
from support.rolling import twice_bad

Operation = tuple[str, str]
"""Its kind, and its path relative to the run's directory."""


def train(output_dir: Path, plan: FaultPlan | None) -> list[Operation]:
    """Train to the end, unless ``plan`` kills the process. Returns all operations."""
    seen: list[Operation] = []
    if plan is not None:
        plan.arm()
    else:
        filesystem.watcher = lambda kind, path: seen.append((kind, str(path).removeprefix(f"{output_dir}/")))
    twice_bad(output_dir, save_in_background=False).train()
    return seen


def leg(output_dir: Path, count: int | None = None) -> list[Operation] | None:
    """Run a leg, killed before operation number ``count``. None: it was killed."""
    plan = None if count is None else FaultPlan(operation="any", count=count)
    (outcome,) = start_ranks(train, 1, output_dir, plan).wait()
    if outcome.was_killed:
        return None
    assert outcome.exit_code == 0, outcome.error
    return list(outcome.value)


def of_rollbacks(operations: Sequence[Operation]) -> range:
    """Numbers, from 1, of the operations from the first rollback's decision to the records after the last one."""
    lines = [number for number, (_, path) in enumerate(operations, 1) if path == RECOVERIES]
    return range(lines[0], lines[-1] + 6)


def differences(folder: Path, *, every: int = 1, say: Callable[[str], None] = lambda line: None) -> list[str]:
    """Kill at every ``every``-th place. Returns the places whose run came out different, each with a table."""
    whole = leg(folder / "reference")
    assert whole is not None
    decided = whole.index(("fsync", RECOVERIES)) + 2
    assert leg(folder / "decided", decided) is None
    completing = leg(folder / "decided")
    assert completing is not None
    done = completing.index(("fsync", RECOVERIES)) + 2
    kills = [([number], whole[number - 1]) for number in of_rollbacks(whole)]
    kills += [([decided, number], completing[number - 1]) for number in range(1, done + 1)]
    found = []
    for number, (counts, (kind, path)) in enumerate(kills[::every]):
        output_dir = folder / f"killed-{number}"
        for count in counts:
            assert leg(output_dir, count) is None, f"the run ended before its operation {count}"
        leg(output_dir)
        comparison = compare_runs(folder / "reference", output_dir)
        where = f"killed {'' if len(counts) == 1 else 'twice, '}before {kind} {path} in {output_dir}"
        say(f"{'same     ' if comparison.identical else 'DIFFERENT'} {where}")
        if not comparison.identical:
            found.append(f"{where}\n{comparison.table()}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a run before each file operation of its rollbacks.")
    parser.add_argument("--every", type=int, default=1, help="only before every n-th operation")
    every = parser.parse_args().every
    with tempfile.TemporaryDirectory(prefix="dalsegno-rollbacks-") as folder:
        found = differences(Path(folder), every=every, say=print)
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
