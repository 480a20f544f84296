"""What the commands print of logs that real runs have left, killed, diverged and sound: kept in tests/golden/logs."""

from __future__ import annotations

import pytest

from golden.logs.printed import COMMANDS, PRINTED, printed


@pytest.mark.parametrize("name", COMMANDS)
def test_printed_as_kept(name: str) -> None:
    kept = (PRINTED / f"{name}.txt").read_text()
    assert printed(COMMANDS[name]) == kept, "look at it, then run: python tests/golden/logs/printed.py"


def test_nothing_is_kept_that_no_command_prints() -> None:
    assert {path.stem for path in PRINTED.iterdir()} == set(COMMANDS)
