"""The benchmarks can be found and run; what they measure is not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import warm

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


ALL_SMALL = """
import sys

if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    from benchmarks import processes
    from benchmarks.__main__ import main
    from support import warm

    processes.run = warm.run
    sys.exit(main(["--small"]))
"""


def test_each_runs_in_its_small_form(tmp_path: Path) -> None:
    """All after one another in one process; programs that a restart is measured with are forked here."""
    (tmp_path / "small.py").write_text(ALL_SMALL)
    done = warm.run([tmp_path / "small.py", ROOT / "tests"], folder=ROOT, env=with_benchmarks())
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("|") and "for reference" not in line]
    assert "not measured" not in "".join(line.split("|")[2] for line in rows)


def with_benchmarks() -> dict[str, str]:
    """An environment in which they can be imported."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


PEAKS = """
from benchmarks.processes import peak_memory_of

held = b"x" * (300 << 20)
print(peak_memory_of(""), peak_memory_of("held = b'x' * (100 << 20)"))
"""


def test_the_peak_memory_of_a_process_is_not_its_parents() -> None:
    done = subprocess.run([sys.executable, "-c", PEAKS], cwd=ROOT, capture_output=True, text=True, check=True)
    nothing, hundred = map(int, done.stdout.split())
    assert nothing < 100 << 20
    assert 90 << 20 < hundred - nothing < 110 << 20  # the kernel counts pages in batches


ROWS = """
import sys
from pathlib import Path
from benchmarks import __main__ as main, results
from benchmarks.row import Row

sound = Row("sound", "1 s", "2 s", "0.50 ×", "≤ 1 ×", True)
nothing = Row("nothing", "0 MB", "80 MB", "0.0 ×", "≤ 3 ×", True)
made = {"sound": [sound], "nothing": [sound, nothing]}
main._measure_here = lambda name, small: made[sys.argv[1]]
status = main.main(["loop", "--json", "rows.json"])
assert sys.argv[1] == "none" or results.rows_of(Path("rows.json"), "loop")[0] == sound
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("rows", "status", "met"), [("sound", 0, "yes"), ("nothing", 1, "IMPOSSIBLE"), ("none", 1, "failed: KeyError")]
)
def test_a_row_whose_figure_is_impossible_fails_and_so_does_a_benchmark_that_raises(
    rows: str, status: int, met: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.py").write_text(ROWS)
    done = warm.run(["rows.py", rows], folder=tmp_path, env=with_benchmarks())
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines()[-1].rstrip(" |").endswith(met), done.stdout
    result = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["benchmarks"]["loop"]
    assert result["machine"]["cores"] > 0 and {"torch", "dalsegno", "python"} <= set(result["versions"])


def test_results_collect_in_a_file_and_a_benchmark_replaces_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.row import Row

    from benchmarks import __main__ as program
    from benchmarks import results

    file = tmp_path / "new" / "rows.json"
    for ratio, name in (("1.0 ×", "loop"), ("2.0 ×", "save"), ("3.0 ×", "loop")):
        row = Row(name, "1 s", "1 s", ratio)
        monkeypatch.setattr(program, "_measure_here", lambda name, small, row=row: [row])
        assert program.main([name, "--json", str(file)]) == 0
    assert list(results.read(file)) == ["loop", "save"]
    assert [row.ratio for name in ("loop", "save") for row in results.rows_of(file, name)] == ["3.0 ×", "2.0 ×"]
    assert [path.name for path in file.parent.iterdir()] == ["rows.json"]

    monkeypatch.setattr(program, "_measure_here", None)  # nothing is measured
    (tmp_path / "else.json").write_text("[1]")
    for words, reason in (
        (["loop", "--json", str(tmp_path / "else.json")], "does not contain results of benchmarks"),
        (["loop", "--small", "--json", str(file)], "leave out --json"),
    ):
        with pytest.raises(SystemExit):
            program.main(words)
        assert reason in capsys.readouterr().err
    assert (tmp_path / "else.json").read_text() == "[1]"


def test_a_ratio_knows_how_far_its_rounds_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.row import Row, table
    from benchmarks.timing import ratio

    ours, theirs = [2.0, 4.4, 8.0, 16.0, 40.0], [1.0, 2.0, 4.0, 8.0, 16.0]
    times = ratio(ours, theirs)  # of the rounds 2, 2.2, 2, 2, 2.5
    assert (times, times.spread) == (2.0, pytest.approx(0.05))
    assert ratio(ours[:3], theirs[:3]).spread is None
    row = Row("what", "2 s", "peer: 1 s", "2 ×", "≤ 1 ×", False, times.spread)
    assert "| ± 5 %  |" in table([row]).splitlines()[-1]


@pytest.mark.parametrize(
    ("ratio", "impossible"), [("", False), ("0.01 ×", False), ("0 ×", True), ("-1.2 ×", True), ("nan ×", True)]
)
def test_ratios_that_nothing_can_have(ratio: str, impossible: bool) -> None:
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks.row import Row
    finally:
        sys.path.remove(str(ROOT))
    assert Row("what", "1 s", "1 s", ratio).is_impossible is impossible
