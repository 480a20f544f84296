"""The benchmarks can be found and run; what they measure is not tested."""

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


def test_each_runs_in_its_small_form() -> None:
    """All after one another in one process, as those that are measured."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--small"], cwd=ROOT, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert "not measured" not in "".join(line.split("|")[2] for line in printed[2:] if "for reference" not in line)


PEAKS = """
from benchmarks.processes import peak_memory_of

held = b"x" * (300 << 20)
print(peak_memory_of(""), peak_memory_of("held = b'x' * (100 << 20)"))
"""


def test_the_peak_memory_of_a_process_is_not_its_parents() -> None:
    done = subprocess.run([sys.executable, "-c", PEAKS], cwd=ROOT, capture_output=True, text=True, check=True)
    nothing, hundred = map(int, done.stdout.split())
    assert nothing < 100 << 20
    assert 100 << 20 <= hundred - nothing + (1 << 20) < 110 << 20
