"""When to save: at steps, at epochs, by the clock, at a new best metric, at the end; joined, and as text."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dalsegno as ds
from dalsegno.checkpoint.listing import Summaries
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.policies.triggers import SaveTrigger, save_trigger
from dalsegno.testing import run_ranks, tiny_regression_data
from support.listeners import Listener
from support.small import small_trainer
from support.stopping import save_by_the_clock

whole = st.integers(0, 9)
times = st.one_of(st.integers(0, 9), st.floats(0, 1e6))
listed = st.lists(st.integers(1, 99), min_size=1).map(lambda steps: ds.AtSteps(*steps))
occasions = st.one_of(
    st.builds(ds.Every, whole, whole, times, times), listed, st.just(ds.OnBest()), st.just(ds.AtEnd())
)
joined = st.lists(occasions, min_size=1, max_size=4).map(save_trigger)


@given(joined, joined, st.integers(1, 100))
def test_joined_occasions_are_due_when_either_is(one: SaveTrigger, other: SaveTrigger, number: int) -> None:
    both = one | other
    assert both.at_step(number) == (one.at_step(number) or other.at_step(number))
    assert both.at_epoch(number) == (one.at_epoch(number) or other.at_epoch(number))
    assert both.on_best == (one.on_best or other.on_best)
    assert both.interval_s == min(one.interval_s, other.interval_s)
    assert bool(both) == (bool(one) or bool(other))


@given(joined, st.integers(0, 100))
def test_nothing_is_due_before_the_next_step(when: SaveTrigger, step: int) -> None:
    following = when.next_step(step)
    assert following > step
    assert not any(when.at_step(each) for each in range(step + 1, int(min(following, 200))))
    assert following == math.inf or when.at_step(int(following))


@dataclass(frozen=True, slots=True, repr=False)
class SavesFibonacci(SaveTrigger):
    """A trigger of the user's own, which only knows whether a step is due."""

    def at_step(self, step: int) -> bool:
        return step in (1, 2, 3, 5, 8)


def test_a_trigger_of_the_users_own_is_asked_at_each_step(tmp_path: Path) -> None:
    small_trainer(tmp_path, max_steps=9, save=SavesFibonacci(), save_steps=500).train()
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert saved == [f"step-{step:08d}" for step in (1, 2, 3, 5, 8, 9)]


def test_listed_steps_are_saved_and_no_others(tmp_path: Path) -> None:
    small_trainer(tmp_path, max_steps=9, save="AtSteps(2, 3, 7)", save_steps=500).train()
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert saved == [f"step-{step:08d}" for step in (2, 3, 7, 9)]  # and the run's end


@given(joined)
def test_occasions_are_read_as_they_are_written(when: SaveTrigger) -> None:
    assert save_trigger(str(when)) == when


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("Every(step=5)", UnknownName, "unknown argument of Every 'step'; did you mean 'steps'?"),
        ("Every(steps=-5)", ConfigurationError, "Every(steps=-5): needs an integer, 0 (never) or more"),
        ("Every(minutes=inf)", ConfigurationError, "Every(minutes=inf): needs a number, 0 (never) or more"),
        ("Every(steps=ten)", ConfigurationError, "Every(steps='ten'): needs an integer, 0 (never) or more"),
        (
            "every 5 steps",
            ConfigurationError,
            "'every 5 steps' is not a rule; write for example Every(…)",
        ),
        ("AtSteps()", ConfigurationError, "AtSteps(): needs integers of at least 1"),
        ("AtSteps(5, x)", ConfigurationError, "AtSteps(5, 'x'): needs integers of at least 1"),
        ("AtSteps(step=5)", ConfigurationError, "unknown argument of AtSteps 'step'"),
        (
            5,
            ConfigurationError,
            "5 is not a save trigger; use Every(…), AtSteps(…), OnBest(), AtEnd(), or a list of several",
        ),
        ([ds.Latest(5)], ConfigurationError, "Latest(count=5) is not a save trigger"),
    ],
)
def test_what_is_no_occasion(tmp_path: Path, given: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        ds.TrainingArguments(tmp_path, save=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [{"save_steps": 100}, {"save_strategy": "epoch"}])
def test_given_in_two_ways(tmp_path: Path, other: dict[str, Any]) -> None:
    text = r"save=Every\(steps=5\), and save_steps= or save_strategy= too; give only one"
    with pytest.raises(ConfigurationError, match=text):
        ds.TrainingArguments(tmp_path, save=ds.Every(steps=5), **other)


def test_as_arguments(tmp_path: Path) -> None:
    assert str(ds.TrainingArguments(tmp_path, save_steps=7).saving) == "Every(steps=7)"
    assert str(ds.TrainingArguments(tmp_path, save_strategy="epoch").saving) == "Every(epochs=1)"
    assert not ds.TrainingArguments(tmp_path, save_strategy="no").saving
    args = ds.TrainingArguments(tmp_path, save=[ds.Every(steps=5), "Every(minutes=2)"], load_best_model_at_end=True)
    assert args.to_dict()["save"] == "Every(steps=5) | Every(minutes=2)"
    assert str(args.saving) == "Every(steps=5) | Every(minutes=2) | OnBest()"
    with pytest.raises(ConfigurationError, match=r"save=OnBest\(\) needs evaluations; see eval_steps"):
        ds.TrainingArguments(tmp_path, save=ds.OnBest(), eval_steps=0)


SAVES = {
    "steps": (ds.Every(steps=4), {4, 8, 12}),
    "steps and epochs": ("Every(steps=4) | Every(epochs=1)", {4, 5, 8, 10, 12}),
    "two intervals": ([ds.Every(steps=4), ds.Every(steps=6)], {4, 6, 8, 12}),
    "new bests": (ds.OnBest(), {2, 4, 8, 12}),
    "the end": (ds.AtEnd(), {12}),
    "never": (ds.Every(), set[int]()),
}


@pytest.mark.parametrize("name", SAVES)
def test_what_is_saved(tmp_path: Path, name: str) -> None:
    """Twelve steps, five an epoch. The evaluation is best at steps 2, 4 and 8."""
    save, expected = SAVES[name]
    losses = {2: 3.0, 4: 2.0, 6: 2.0, 8: 1.0, 10: float("nan"), 12: 5.0}

    def decide(ctx: ds.EvaluateContext) -> None:
        ctx.metrics["eval_loss"] = losses[ctx.state.global_step]

    trainer = small_trainer(
        tmp_path,
        Listener({"on_evaluate": decide}),
        parts={"eval_dataset": tiny_regression_data(4, seed=1)},
        save_steps=500,
        save=save,
        eval_steps=2,
        max_steps=12,
    )
    trainer.train()
    assert {entry.step for entry in Summaries().of(tmp_path / "checkpoints")} == expected


def test_by_the_clock_of_rank_zero(tmp_path: Path) -> None:
    """Both ranks save at one step, and not before the time is up."""
    first, second = run_ranks(save_by_the_clock, 2, tmp_path)
    assert first == second
    steps, seconds = first
    assert len(steps) >= 2
    assert seconds[1] - seconds[0] > 0.09
