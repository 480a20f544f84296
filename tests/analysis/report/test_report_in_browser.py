"""A report in a real browser: its curves are drawn, hovered, toggled, zoomed, smoothed, and printed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dalsegno.analysis import open_logs, write_report
from dalsegno.analysis.series import trailing_mean
from support.chromium import PROGRAM, Chromium

GOLDEN = Path(__file__).parents[2] / "golden" / "logs"
LOSSES = 3 + np.random.default_rng(0).normal(size=20_000) / 10
HOSTILE = "</script><script>document.title='owned'</script>"

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here (Debian's package: chromium)")

PATHS = "[...document.querySelectorAll('figure[data-metric=loss] path[data-run]')]"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """With the report of two golden runs and of a long one that has a hostile name."""
    folder = tmp_path_factory.mktemp("browser")
    logs = folder / "long" / "logs"
    logs.mkdir(parents=True)
    with (logs / "train.jsonl").open("w") as file:
        for step, value in enumerate(LOSSES.tolist(), start=1):
            record = {"timestamp": 1.7e9 + step, "global_step": step, "epoch": step / 1e4, "loss": value}
            file.write(json.dumps(record | {"grad_norm": 1.0, "learning_rate": 1e-3}) + "\n")
    runs = open_logs([GOLDEN / "killed", GOLDEN / "pair-b", folder / "long"])
    runs[2].name = HOSTILE
    report = write_report(runs, folder / "report.html")
    with Chromium(folder / "profile") as browser:
        browser.open(report)
        browser.look(1000, 1200)
        yield browser
        assert browser.complaints() == []


@pytest.fixture(autouse=True)
def as_it_was(browser: Chromium) -> Iterator[None]:
    yield
    browser.run("view.axis = 'step'; view.smooth = 2; view.log = false; view.hidden.clear(); zoom(null)")


def box(browser: Chromium) -> tuple[float, float, float, float]:
    """Of the loss's chart, in pixels of the window: left, top, width, height."""
    script = "document.querySelector('figure[data-metric=loss] svg')"
    browser.run(f"{script}.scrollIntoView({{block: 'center'}})")
    found = browser.run(
        f"(({{left, top, width, height}}) => [left, top, width, height])({script}.getBoundingClientRect())"
    )
    return tuple(found)  # type: ignore[return-value]


def drawn_runs(browser: Chromium) -> set[str]:
    return set(browser.run(f"{PATHS}.map((path) => path.dataset.run)"))


def test_the_curves_are_there_and_nothing_ran_that_should_not(browser: Chromium) -> None:
    assert drawn_runs(browser) == {"0", "1", "2"}
    assert browser.run("document.title") != "owned"
    names = browser.run("[...document.querySelectorAll('#runs button')].map((button) => button.textContent)")
    assert names == ["killed", "pair-b", HOSTILE]
    assert browser.run("document.querySelectorAll('figure[data-metric=loss] .mark').length") == 3
    assert browser.run("document.querySelectorAll('.heat canvas').length") == 6
    shown = browser.run(
        "[...document.querySelectorAll('figure')].filter((each) => !each.hidden).map((each) => each.dataset.metric)"
    )
    assert shown == ["loss", "grad_norm", "learning_rate"]


def test_hovering_tells_the_values(browser: Chromium) -> None:
    left, top, width, height = box(browser)
    browser.run("zoom([0, 40])")
    browser.mouse("mouseMoved", left + width * 0.55, top + height / 2)
    tip: str = browser.run("document.querySelector('figure[data-metric=loss] .tip:not([hidden])').innerText")
    assert tip.startswith("step 2")
    assert "\nkilled: 0." in tip and "\npair-b: " in tip and f"\n{HOSTILE}: " in tip and "killed, eval_loss: " in tip
    browser.mouse("mouseMoved", left + width / 2, top - 200)
    assert browser.run("document.querySelector('figure[data-metric=loss] .tip').hidden")


def test_a_run_is_toggled(browser: Chromium) -> None:
    for pressed, runs in (("false", {"0", "2"}), ("true", {"0", "1", "2"})):
        browser.run("document.querySelectorAll('#runs button')[1].click()")
        assert browser.run("document.querySelectorAll('#runs button')[1].getAttribute('aria-pressed')") == pressed
        assert drawn_runs(browser) == runs


def test_a_chart_is_toggled(browser: Chromium) -> None:
    chart = "document.querySelector('figure[data-metric=tokens], figure[data-metric=max_grad_norm]')"
    name: Any = browser.run(f"{chart}.dataset.metric")
    for hidden in (False, True):
        browser.run(
            f"[...document.querySelectorAll('#metrics button')].find((each) => each.textContent === {name!r}).click()"
        )
        assert browser.run(f"{chart}.hidden") == hidden


def test_dragging_zooms_and_a_double_click_goes_back(browser: Chromium) -> None:
    left, top, width, height = box(browser)
    before = browser.run(f"{PATHS}.map((path) => path.getAttribute('d'))")
    button = {"button": "left", "clickCount": 1}
    browser.mouse("mousePressed", left + width * 0.3, top + height / 2, **button)
    browser.mouse("mouseMoved", left + width * 0.5, top + height / 2, button="left")
    assert browser.run("document.querySelectorAll('figure[data-metric=loss] .zoom').length") == 1
    browser.mouse("mouseReleased", left + width * 0.5, top + height / 2, **button)
    low, high = browser.run("view.range")
    assert 3000 < low < 7000 < high < 12_000
    assert browser.run("document.getElementById('reset').disabled") is False
    assert browser.run(f"{PATHS}.map((path) => path.getAttribute('d'))") != before
    for count in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            browser.mouse(kind, left + width / 2, top + height / 2, button="left", clickCount=count)
    assert browser.run("view.range") is None
    assert browser.run(f"{PATHS}.map((path) => path.getAttribute('d'))") == before


def test_smoothing_is_the_mean_of_what_was_logged(browser: Chromium) -> None:
    curve = "data.charts[0].curves.find((curve) => curve.run === 2)"
    means = np.array(browser.run(f"smoothed({curve})"))
    size, width = -(-len(LOSSES) // len(means)), round(0.01 * len(means))
    assert len(means) > 500 and width > 1
    at = np.array(browser.run(f"{curve}.meanSteps"))
    assert at.tolist() == [*range(size, len(LOSSES), size), len(LOSSES)]
    expected = trailing_mean(LOSSES, size * width)[at - 1]
    np.testing.assert_allclose(means[:-1], expected[:-1], rtol=1e-5)
    rate = "data.charts.find((chart) => chart.metric === 'learning_rate').curves.find((curve) => curve.run === 2)"
    assert browser.run(f"[smoothed({rate}), {rate}.setting]") == [None, True]
    browser.run("view.smooth = 0; redraw()")
    assert browser.run(f"smoothed({curve})") is None


@pytest.mark.parametrize(("low", "high"), [(0.1, 0.1 + 2**-55), (-1e300, -1e300)])
def test_values_that_differ_in_their_last_bits_have_ticks(browser: Chromium, low: float, high: float) -> None:
    assert 1 <= browser.run(f"ticks({low!r}, {high!r}, 5).length") <= 20


def test_other_axes_and_the_log_scale(browser: Chromium) -> None:
    options = browser.run("[...document.querySelectorAll('#axis option')].map((option) => option.value)")
    assert options[:3] == ["step", "epoch", "time"]
    assert browser.run("view.axis = 'epoch', place(2, 10_000)") == pytest.approx(1.0, rel=1e-3)
    assert browser.run("view.axis = 'time', place(2, 3601)") == pytest.approx(1.0, rel=1e-3)
    for axis in options:
        browser.run(f"view.axis = {axis!r}; view.log = true; redraw()")
        assert browser.run(f"{PATHS}.every((path) => !path.getAttribute('d').includes('NaN'))"), axis


def test_on_a_phone_in_the_dark_and_on_paper(browser: Chromium, tmp_path: Path) -> None:
    browser.look(390, 844, phone=True, dark=True)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 31)"
    assert browser.paper().startswith(b"%PDF")
    browser.look(690, 1000, dark=True, printed=True)  # A4 between its margins
    assert browser.run("document.documentElement.scrollWidth") <= 690
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("getComputedStyle(document.querySelector('.controls')).display") == "none"
    browser.look(1000, 1200)
    assert browser.run("document.documentElement.scrollWidth") <= 1000


def test_of_many_curves_those_near_the_pointer_are_told(tmp_path: Path) -> None:
    """And the box stays within the window."""
    runs = []
    for number in range(30):
        logs = tmp_path / f"run-{number}" / "logs"
        logs.mkdir(parents=True)
        lines = [json.dumps({"global_step": step, "loss": float(number)}) for step in (1, 2)]
        (logs / "train.jsonl").write_text("\n".join(lines) + "\n")
        runs.append(logs.parent)
    with Chromium(tmp_path / "profile") as browser:
        browser.open(write_report(open_logs(runs), tmp_path / "report.html"))
        browser.look(1000, 1200)
        left, top, width, height = box(browser)
        browser.mouse("mouseMoved", left + width / 2, top + height * 0.1)
        tip: str = browser.run("document.querySelector('.tip:not([hidden])').innerText")
        assert browser.complaints() == []
    step, nearest, *others = tip.split("\n")
    assert step.startswith("step ")
    assert nearest.startswith(("run-28:", "run-29:"))
    assert (len(others), others[-1]) == (12, "and 18 more")
