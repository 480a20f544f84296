"""The benchmarks can be found; what they measure is not tested."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_list_names_the_benchmarks_that_exist() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {"events", "loop", "imports"} <= set(done.stdout.split())


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks", "evnets"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no benchmark 'evnets'; there are events, loop" in done.stderr
