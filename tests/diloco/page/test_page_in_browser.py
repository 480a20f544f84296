"""The live page of a DiLoCo server in a real browser: it follows rounds, and asks for a token that it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.diloco import DiLoCoServer
from diloco.scenes import all_together, rules, train_by_hand
from support.chromium import PROGRAM, Chromium

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here (Debian's package: chromium)")

ROWS = "[...document.querySelectorAll('#{} tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
FORM = "document.getElementById('token')"


def test_the_page_follows_a_run(tmp_path: Path) -> None:
    with DiLoCoServer(tmp_path / "outer", 2, rules=rules(2)) as server, Chromium(tmp_path / "profile") as browser:

        def train(steps: int) -> None:
            all_together(
                [lambda number=number: train_by_hand(server, number, steps, sync_every=2) for number in (0, 1)]
            )

        browser.open(f"{server.address}/")
        browser.wait(f"!{FORM}.hidden && document.querySelector('main').hidden")
        browser.run(f"document.getElementById('token-field').value = {server.token!r}, {FORM}.requestSubmit()")
        browser.wait("document.getElementById('range').textContent === 'no round yet'")
        train(4)
        rounds = browser.wait(f"{ROWS.format('rounds')}.length === 2 && {ROWS.format('rounds')}")
        assert [(row[0], row[2], row[4]) for row in rounds] == [("2", "2", "0"), ("1", "2", "0")]
        workers = browser.wait(
            f"{ROWS.format('workers')}.every((row) => row[1] === 'left') && {ROWS.format('workers')}"
        )
        assert [(row[0], row[2]) for row in workers] == [("w0", "2"), ("w1", "2")]
        facts = browser.run("document.querySelector('.facts').innerText.replace(/\\s+/g, ' ')")
        assert "mode synchronous" in facts
        assert "workers 2 of 2" in facts
        assert browser.run("location.hash") == ""
        assert not any(server.token in url for url in browser.requests())
