"""On the simulated accelerator: what its late work would break, and that no wait of the program is without a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dalsegno as ds
from dalsegno.errors import RankFailed
from dalsegno.testing import run_ranks

from . import jobs
from .accelerator import build, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="the simulated accelerator needs a C++ compiler")
WAITING = re.compile(
    r"(?<!self)\.synchronize\(\)|event\.record\(|\.query\(\)|non_blocking=|wait_event|wait_stream|record_stream|record_event"
)


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build()


@pytest.mark.parametrize("name", jobs.CHECKS)
def test_check(tmp_path: Path, name: str) -> None:
    run_ranks(jobs.check, 1, name, tmp_path)


@pytest.mark.parametrize("number", range(len(jobs.WAITS)), ids=lambda number: jobs.WAITS[number].where.__qualname__)
def test_a_wait_that_is_left_out_is_noticed(tmp_path: Path, number: int) -> None:
    with pytest.raises(RankFailed):
        run_ranks(jobs.check, 1, jobs.WAITS[number].noticed_by, tmp_path, number)


def test_no_other_line_waits() -> None:
    package = Path(ds.__file__).parent
    found = [line for path in package.rglob("*.py") for line in path.read_text().splitlines() if WAITING.search(line)]
    unknown = [line for line in found if not any(wait.line in line for wait in jobs.WAITS)]
    assert not unknown, "leave each out in WAITS too, and name the check that notices it"


def test_the_page_lists_each_line() -> None:
    page = (Path(__file__).parents[2] / "docs" / "why" / "simulated.md").read_text()
    rows = [line.split("` | `") for line in page.splitlines() if line.startswith("| `")]
    assert [(shown.removeprefix("| `"), rest.partition("`")[0]) for shown, rest in rows] == [
        (wait.shown, wait.where.__qualname__) for wait in jobs.WAITS
    ]
