"""The page about a GPU has a result of each check."""

from __future__ import annotations

from . import device


def test_the_page_has_each_check() -> None:
    rows = [line.split(" | ")[0].removeprefix("| ") for line in device.PAGE.read_text().splitlines()]
    assert rows[-len(device.CHECKS) :] == [*device.CHECKS], "run `make gpu` on a machine with a GPU"
