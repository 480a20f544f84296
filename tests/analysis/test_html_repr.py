"""How a log shows itself in a notebook."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np

from analysis.drawn import MadeUpLog
from analysis.series import NAN, falling, series, with_values
from dalsegno.analysis import Restart
from dalsegno.analysis.notebook import cards, html_repr, svg_curve

HOSTILE = "<script>alert('a')</script>&\"'"


class Texts(HTMLParser):
    """The elements of a page, and its texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.elements.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_run() -> None:
    loss = falling()
    values = [*loss.values[:-1], NAN]
    page = Texts(html_repr(MadeUpLog("a", with_values(loss, values), restarts=[Restart(10, 20, 2)])))
    best = int(np.argmin(values[:-1]))
    shown = ["run", "a", "step", "10,000", "loss", "nan", "best loss"]
    assert page.texts[: len(shown)] == shown
    assert page.texts[len(shown)] == f"{values[best]:.5g} at step {10 * best + 10:,}"
    assert page.texts[len(shown) + 1 : len(shown) + 3] == ["restarts", "1"]
    assert page.elements.count("polyline") == 2


def test_names_are_only_text() -> None:
    for html in (html_repr(MadeUpLog(HOSTILE, falling())), cards([MadeUpLog(HOSTILE, falling())])):
        page = Texts(html)
        assert "script" not in page.elements
        assert HOSTILE in "".join(page.texts)
    assert "<script" not in svg_curve(series([1.0], name=HOSTILE))


def test_many_runs_and_runs_of_nothing() -> None:
    page = Texts(cards([MadeUpLog(f"run {number}", falling(20)) for number in range(40)] + [MadeUpLog("empty")]))
    assert page.elements.count("svg") == 30
    assert page.texts[-1] == "and 11 more"
    one = svg_curve(series([1.0]))
    (points,) = re.findall(r"points='([^']+)'", one)
    assert len(points.split()) == 2 and len(set(points.split())) == 1 and "stroke-linecap='round'" in one
    assert "none with a loss" in Texts(html_repr(MadeUpLog("empty"))).texts
    assert Texts(html_repr(MadeUpLog("a", series([NAN])))).elements.count("svg") == 0


def test_a_long_curve_is_a_small_picture_and_keeps_its_spike() -> None:
    calm = falling(300_000)
    values = calm.values.copy()
    values[123_456] = 500.0
    svg = svg_curve(with_values(calm, values))
    assert len(svg) < 60_000
    points = " ".join(re.findall(r"points='([^']+)'", svg))
    heights = [float(point.partition(",")[2]) for point in points.split()]
    assert min(heights) == 8.0, "the top edge"
