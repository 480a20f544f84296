"""Pictures: what is in them, read back from matplotlib, and what is refused."""

from __future__ import annotations

import re
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from analysis.drawn import MadeUpLog
from analysis.series import NAN, falling, series, with_values
from dalsegno.analysis import (
    ParameterSeries,
    Restart,
    Tail,
    View,
    plot_heatmap,
    plot_logs,
    sketch_logs,
)
from dalsegno.analysis.plotting.curves import panels
from dalsegno.errors import ConfigurationError, NotFound, UnknownName

TAIL = Tail(Path("train.jsonl.0001"), tuple({"global_step": step, "loss": 2.5} for step in (4010, 4020, 4030)))


def killed() -> MadeUpLog:
    """A thousand records, ten evaluations, two restarts and a rollback."""
    evaluation = series([3.0 - 0.1 * index for index in range(10)], [*range(1000, 10001, 1000)], "eval_loss")
    restarts = [Restart(4000, 4030, 2), Restart(6000, 6100, None)]
    return MadeUpLog("killed", falling(), evaluation, restarts=restarts, tails=[TAIL])


def axes_of(picture: Any) -> list[Axes]:
    found: list[Axes] = picture.figure.axes
    return found


def legend(axes: Axes) -> list[str]:
    found = axes.get_legend()
    return [text.get_text() for text in found.get_texts()] if found else []


def test_one_run_with_all_that_belongs_to_it() -> None:
    (axes,) = axes_of(plot_logs([killed()]))
    assert axes.get_title(loc="left") == "killed"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss")
    logged = "as logged (strong: mean of 10)"
    assert legend(axes) == ["loss", "eval_loss", logged, "lost, then repeated", "restart", "rollback"]
    verticals = [line.get_xdata()[0] for line in axes.lines if list(line.get_ydata()) == [0, 1]]
    assert verticals == [4000, 6000]


def test_nothing_shows_before_it_happens() -> None:
    """The strong line rises at the bad batch, not before; what was set is drawn as it was set, however it is named."""
    loss = series([2.0] * 100 + [9.0] + [2.0] * 299)
    rates = [series([1e-3] * 285 + [1e-4] * 115, name=name) for name in ("learning_rate", "train/lr", "lr-AdamW/pg1")]
    measured = series([0.5] * 400, name="lrelu_norm")
    log = MadeUpLog("spiked", loss, *rates, measured)
    for view in (View(), View(smooth=48)):
        drawn = [row[0].curves[0] for row in panels([log], log.metrics(), view, compare=False)]
        assert drawn[0].smoothed is not None
        assert np.flatnonzero(drawn[0].smoothed > 2)[0] == 100
        assert [curve.smoothed is None for curve in drawn] == [False, True, True, True, False]
        assert [curve.window for curve in drawn[1:4]] == [1, 1, 1]


def test_side_by_side_and_over_each_other() -> None:
    logs = [killed(), MadeUpLog("other", falling(seed=1))]
    beside = axes_of(plot_logs(logs))
    assert [axes.get_title(loc="left") for axes in beside] == ["killed", "other"]
    assert beside[0].get_ylim() == beside[1].get_ylim()
    (over,) = axes_of(plot_logs(logs, compare=True))
    assert over.get_title(loc="left") == "killed and other"
    assert legend(over)[:2] == ["killed", "other"]


@pytest.mark.parametrize("compare", [True, False])
def test_many_runs_of_long_names_are_all_told_within_the_picture(compare: bool) -> None:
    names = [f"sweep-{'x' * 50}-{number}" for number in range(20)]
    logs = [MadeUpLog(name, falling(300), restarts=[Restart(1000, 1000, 2)]) for name in names]
    picture = plot_logs(logs, compare=compare)
    figure = picture.figure
    figure.draw_without_rendering()
    page = figure.bbox
    texts = [axes.title for axes in axes_of(picture)] + [axes._left_title for axes in axes_of(picture)]  # type: ignore[attr-defined]
    for text in [*texts, *(text for legend in figure.legends for text in legend.get_texts())]:
        box = text.get_window_extent()
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, text
    assert all(axes.get_position().height > 0.03 for axes in axes_of(picture))
    if compare:
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()][:20] == names
        looks = {(line.get_color(), str(line._unscaled_dash_pattern)) for line in legend.get_lines()[:20]}  # type: ignore[attr-defined]
        assert len(looks) == 20


def test_many_runs_stand_in_several_lines_that_share_their_scales() -> None:
    logs = [
        MadeUpLog(f"run {number}", falling(seed=number), series([number + 1.0] * 5, name="x")) for number in range(6)
    ]
    drawn = [axes for axes in axes_of(plot_logs(logs, ["loss", "x"])) if axes.axison]
    assert [axes.get_title(loc="left") for axes in drawn] == [
        *(f"run {n}" for n in range(4)),
        *[""] * 4,
        "run 4",
        "run 5",
        "",
        "",
    ]
    losses, others = drawn[:4] + drawn[8:10], drawn[4:8] + drawn[10:]
    assert len({axes.get_ylim() for axes in losses}) == len({axes.get_ylim() for axes in others}) == 1
    assert others[0].get_ylim()[1] > 6


def test_each_run_has_its_own_name_for_the_loss() -> None:
    logs = [MadeUpLog("a", falling(50)), MadeUpLog("b", series([1.0, 2.0], name="train_loss"), loss="train_loss")]
    ((panel,),) = panels(logs, None, View(), compare=True)
    assert (panel.y_label, [curve.metric for curve in panel.curves]) == ("loss", ["loss", "train_loss"])
    assert [row[0].metric for row in zip(*panels(logs, None, View(), compare=False), strict=True)] == [
        "loss",
        "train_loss",
    ]


def test_no_spike_is_lost_and_nan_is_seen() -> None:
    calm = falling(100_000)
    values = calm.values.copy()
    values[54_321] = 77.0
    values[60_000:60_010] = NAN
    (axes,) = axes_of(plot_logs([MadeUpLog("a", with_values(calm, values))]))
    assert max(np.nanmax(line.get_ydata()) for line in axes.lines) == 77.0
    assert sum(len(line.get_xdata()) for line in axes.lines) < 20_000
    assert "not finite" in legend(axes)
    (cross,) = [line for line in axes.lines if line.get_marker() == "x"]
    assert list(cross.get_xdata()) == [600_010]


@pytest.mark.parametrize("values", [[2.0], [NAN, 2.0, NAN, 3.0, 3.0]])
def test_a_value_without_neighbours_is_a_dot(values: list[float]) -> None:
    log = MadeUpLog("a", series(values))
    (axes,) = axes_of(plot_logs([log]))
    (dot,) = [line for line in axes.lines if line.get_marker() == "."]
    assert list(dot.get_ydata()) == [2.0]
    assert sketch_logs([log]).count("•") == 1


def test_outliers_may_be_left_outside_and_that_is_said() -> None:
    calm = falling()
    values = calm.values.copy()
    values[500] = 1000.0
    log = MadeUpLog("a", with_values(calm, values))
    (wide,), (narrow,) = axes_of(plot_logs([log])), axes_of(plot_logs([log], view=View(ignore_outliers=True)))
    assert wide.get_ylim()[1] > 1000
    assert narrow.get_ylim()[1] < 10
    (note,) = [text.get_text() for text in narrow.texts]
    assert re.fullmatch(r"not shown: \d+ above(, \d+ below)?", note)


@pytest.mark.parametrize(
    ("x", "label", "last"),
    [
        ("step", "step", 10_000),
        ("epoch", "epoch", 100),
        ("time", "hours since the first record", 5 * 9990 / 3600),
        ("tokens", "tokens", 640_000),
    ],
)
def test_what_runs_to_the_right(x: Any, label: str, last: float) -> None:
    tokens = series([64.0 * step for step in range(10, 10_001, 10)], name="tokens")
    log = MadeUpLog("a", falling(), tokens, restarts=[Restart(5000, 5000, 2)])
    ((panel,),) = panels([log], None, View(x=x), compare=False)
    assert panel.x_label == label
    assert panel.curves[0].x[-1] == pytest.approx(last)
    assert panel.marks[0].x == pytest.approx(last / 2, rel=0.01)


def test_time_of_a_short_run_is_in_minutes() -> None:
    ((panel,),) = panels([MadeUpLog("a", falling(100))], None, View(x="time"), compare=False)
    assert panel.x_label == "minutes since the first record"
    assert panel.curves[0].x[-1] == pytest.approx(5 * 990 / 60)


def test_time_of_a_trial_is_in_seconds() -> None:
    ((panel,),) = panels([MadeUpLog("a", falling(3))], None, View(x="time"), compare=False)
    assert panel.x_label == "seconds since the first record"
    assert panel.curves[0].x[-1] == pytest.approx(5 * 20)


@pytest.mark.parametrize("perplexity", [False, True])
@pytest.mark.parametrize("log", [False, True])
def test_the_largest_numbers_leave_room_around_them(log: bool, perplexity: bool, tmp_path: Path) -> None:
    values = [1.0, 705.0, 2.0] if perplexity else [1.0, 1.7e308, 3e-308, -1.7e308]
    runs, view = [MadeUpLog("a", series(values))], View(log=log, perplexity=perplexity)
    plot_logs(runs, view=view).save(tmp_path / "plot.png")
    assert "× not finite" in sketch_logs(runs, view=view)


def test_a_logarithmic_scale_of_nothing(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    picture = plot_logs([MadeUpLog("a", series([-1.0, -2.0]))], view=View(log=True))
    picture.save(tmp_path / "plot.png")
    assert axes_of(picture)[0].get_yscale() == "log"
    assert not recwarn.list


def test_what_lies_outside_is_counted_where_one_looks() -> None:
    values = np.full(100, 2.0)
    values[[10, 50]] = 9.0
    (axes,) = axes_of(plot_logs([MadeUpLog("a", series(values))], view=View(xlim=(300, None), ylim=(0, 5))))
    assert [text.get_text() for text in axes.texts] == ["not shown: 1 above"]


def test_perplexity_is_of_losses_only() -> None:
    log = MadeUpLog("a", series([0.0, 1.0, 2.0]), series([5.0, 5.0, 5.0], name="grad_norm"))
    (first,), (second,) = panels([log], ["loss", "grad_norm"], View(perplexity=True), compare=False)
    assert first.curves[0].values.tolist() == pytest.approx([1.0, np.e, np.e**2])
    assert (first.y_label, second.y_label) == ("perplexity", "gradient norm")
    assert second.curves[0].values.tolist() == [5.0, 5.0, 5.0]


def test_other_programs_names_of_evaluation() -> None:
    log = MadeUpLog(
        "a", series([2.0], name="train/loss"), series([3.0], name="val/loss"), series([1.0], name="val/acc")
    )
    ((panel,),) = panels([log], ["train/loss"], View(), compare=False)
    assert [curve.metric for curve in panel.curves] == ["train/loss", "val/loss"]


@pytest.mark.parametrize(
    "view",
    [
        View(log=True),
        View(xlim=(100, None), ylim=(None, 5)),
        View(smooth=1),
        View(smooth=10_000),
        View(log=True, ylim=(1, 9)),
    ],
)
@pytest.mark.parametrize("values", [[], [NAN], [NAN, NAN, NAN], [1.0], [2.0] * 30, [-1.0, 0.0, 1.0], [1e30, 1e-30]])
def test_odd_values_are_drawn_on_every_paper(values: list[float], view: View, tmp_path: Path) -> None:
    log = MadeUpLog("a", series(values))
    plot_logs([log], view=view).save(tmp_path / "a.png")
    for colours in (True, False):
        assert sketch_logs([log, log], view=view, compare=True, width=50, colours=colours)


def test_kinds_of_files(tmp_path: Path) -> None:
    picture = plot_logs([killed()])
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    for suffix, begin in begins.items():
        assert picture.save(tmp_path / f"a.{suffix}").read_bytes().startswith(begin)
    assert picture._repr_png_().startswith(begins["png"])
    with pytest.raises(ConfigurationError, match=r"a\.bmp: must end in \.png, \.svg, \.pdf"):
        picture.save(tmp_path / "a.bmp")


def test_refusals() -> None:
    log = MadeUpLog("a", falling(), clock=False)
    with pytest.raises(UnknownName, match="unknown metric 'lss'; did you mean 'loss'"):
        plot_logs([log], ["lss"])
    with pytest.raises(NotFound, match="no metric in empty"):
        plot_logs([MadeUpLog("empty")])
    for x in ("epoch", "time", "tokens"):
        with pytest.raises(ConfigurationError, match=f"x is '{x}', and a does not log it"):
            plot_logs([log], view=View(x=x))
    for view, what in [
        ({"x": "day"}, "unknown x of View 'day'"),
        ({"smooth": 0}, "smooth is 0"),
        ({"xlim": (2, 1)}, "xlim is"),
    ]:
        with pytest.raises(ConfigurationError, match=what):
            View(**view)  # type: ignore[arg-type]


@pytest.mark.parametrize(("module", "draw"), [("matplotlib", plot_logs), ("plotille", sketch_logs)])
def test_what_is_not_installed_is_named_with_its_extra(module: str, draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == module else find_spec(name, *rest)

    monkeypatch.setattr(util, "find_spec", without)
    with pytest.raises(ConfigurationError, match=rf"needs {module}, .* pip install 'dalsegno\[analysis\]'"):
        draw([killed()])


def test_in_a_terminal() -> None:
    text = sketch_logs([killed()], width=72)
    lines = text.split("\n")
    assert lines[0] == "killed: loss"
    assert max(map(len, lines)) <= 72
    assert lines[-1] == "━━ loss  o eval_loss  ⡇ restart  ⡇ rollback"
    assert "\x1b[" not in text
    assert "\x1b[38;2;0;114;178m" in sketch_logs([killed()], colours=True)
    both = sketch_logs([killed(), MadeUpLog("other", falling(seed=1))], compare=True)
    assert both.split("\n")[-1].startswith("a killed  b other")


def parameters(values: Any) -> ParameterSeries:
    values = np.array(values, np.float64)
    names = tuple(f"blocks.{index}.weight" for index in range(values.shape[1]))
    return ParameterSeries("grad_norm", "a run", names, np.arange(1, len(values) + 1) * 100, values)


def test_a_heatmap() -> None:
    picture = plot_heatmap(parameters([[1.0, 0.1, 0.01], [2.0, NAN, 0.0]]), r"blocks\.[12]")
    axes, bar = axes_of(picture)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["blocks.1.weight", "blocks.2.weight"]
    assert axes.get_title(loc="left") == "a run: gradient norm of each parameter"
    assert axes.get_xlim() == (50, 250)
    assert bar.get_ylabel() == "gradient norm (log scale)"
    assert np.ma.filled(axes.collections[0].get_array(), -1.0).tolist() == [[0.1, -1.0], [0.01, -1.0]]
    axes, bar = axes_of(plot_heatmap(parameters([[1.0, 0.1], [0.0, NAN]]), log=False))
    assert (bar.get_ylabel(), bar.get_yscale(), bar.get_ylim()) == ("gradient norm", "linear", (0.0, 1.0))
    assert np.ma.filled(axes.collections[0].get_array(), -1.0).tolist() == [[1.0, 0.0], [0.1, -1.0]]


def test_heatmaps_of_little(tmp_path: Path) -> None:
    for values in ([[1.0]], [[0.0], [NAN]], [[5.0, 5.0]], [[NAN]]):
        for log in (True, False):
            plot_heatmap(parameters(values), log=log).save(tmp_path / "a.png")
    with pytest.raises(NotFound, match=r"no parameter of a run matches 'head'; its parameters include blocks\.0"):
        plot_heatmap(parameters([[1.0]]), "head")
    with pytest.raises(ConfigurationError, match="not a regular expression"):
        plot_heatmap(parameters([[1.0]]), "(")
    with pytest.raises(NotFound, match="no records yet"):
        plot_heatmap(parameters(np.empty((0, 2))))
