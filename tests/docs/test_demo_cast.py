"""The animation of the demo: what its script makes of a terminal's output; and it shows what the program prints."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from dalsegno.cli.demo import story

ROOT = Path(__file__).parents[2]
CAST = ROOT / "docs" / "images" / "demo-cast.svg"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_images_demo", ROOT / "docs" / "images" / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def texts(svg: str) -> list[str]:
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return [element.text or "" for element in found]


def test_a_line_is_redrawn_in_place(script: ModuleType) -> None:
    written = [(0.0, "leg 1  "), (1.0, "\r\x1b[K 10/20"), (2.0, "\r\x1b[K 20/20\r\nkilled <&>\r\n")]
    shown = script.lines(written)
    assert [(line.row, line.text.strip(), line.begin, line.end) for line in shown] == [
        (0, "leg 1", 0.0, 1.0),
        (0, "10/20", 1.0, 2.0),
        (0, "20/20", 2.0, float("inf")),
        (1, "killed <&>", 2.0, float("inf")),
    ]
    assert [text.strip() for text in texts(script.draw(shown))] == ["leg 1", "10/20", "20/20", "killed <&>"]


def test_long_waits_are_shortened(script: ModuleType) -> None:
    times = [at for at, _ in script.shorten([(0.0, "a"), (0.3, "b"), (900.0, "c")])]
    assert times == pytest.approx([0.0, script.SECONDS / 3, script.SECONDS])


def test_it_is_small_and_shows_what_the_demo_prints() -> None:
    assert CAST.stat().st_size < 300_000
    shown = "\n".join(texts(CAST.read_text(encoding="utf-8")))
    printed = re.findall(r'_print\(f?"(?:\\n)?([^"{\\]+)', inspect.getsource(story.tell))
    assert len(printed) > 4
    assert [text for text in printed if text.strip() not in shown] == []
    assert "killed with SIGKILL between steps" in shown and "killed with SIGKILL while saving step" in shown
