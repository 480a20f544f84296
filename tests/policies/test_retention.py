"""Which checkpoints stay: over random histories, and read as they are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dalsegno as ds
from dalsegno.checkpoint.listing import Summaries
from dalsegno.distributed.modes import modes_of
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.policies.retention import AnyRetention, CheckpointSummary, Retention, retention_of
from support.listeners import Listener
from support.resumed import stop_after
from support.stopping import stoppable_trainer

counts = st.integers(1, 6)
modes = st.sampled_from([None, "min", "max"])
listed = st.lists(st.integers(1, 25), min_size=1).map(lambda steps: ds.Steps(*steps))
best_rules = st.builds(ds.Best, counts, st.sampled_from(["loss", "eval_accuracy"]), modes)
rules = st.one_of(st.builds(ds.Latest, counts), best_rules, st.builds(ds.EveryNth, counts), listed)
joined = st.lists(rules, min_size=1, max_size=3).map(retention_of)
numbers = st.one_of(st.integers(-3, 3).map(float), st.sampled_from([float("nan"), float("inf")]))
metrics = st.dictionaries(st.sampled_from(["eval_loss", "eval_accuracy"]), numbers)
histories = st.lists(metrics, max_size=25).map(
    lambda saves: [CheckpointSummary(step, its, best=False) for step, its in enumerate(saves, start=1)]
)


def pruned(rule: Retention, history: list[CheckpointSummary]) -> set[int]:
    """What is left if the rule is asked after each save, and the newest is never deleted."""
    there: list[CheckpointSummary] = []
    for entry in history:
        there.append(entry)
        kept = rule(there) | {entry.step}
        there = [each for each in there if each.step in kept]
    return {entry.step for entry in there}


@given(joined, histories)
def test_it_does_not_matter_how_often_a_rule_is_asked(rule: Retention, history: list[CheckpointSummary]) -> None:
    """So a resumed run, whose rule sees only what is on disk, keeps what an unbroken one does."""
    assert pruned(rule, history) == rule(history) | {entry.step for entry in history[-1:]}


@given(joined, joined, histories)
def test_joined_rules_keep_what_either_keeps(
    one: Retention, other: Retention, history: list[CheckpointSummary]
) -> None:
    assert (one | other)(history) == one(history) | other(history)


@given(counts, histories)
def test_the_best_are_the_best(count: int, history: list[CheckpointSummary]) -> None:
    kept = ds.Best(count, "loss")(history)
    losses = {entry.step: entry.metrics.get("eval_loss", float("nan")) for entry in history}
    measured = [step for step, loss in losses.items() if loss == loss]
    assert len(kept) == min(count, len(measured))
    for gone in set(measured) - kept:
        assert all((losses[step], step) < (losses[gone], gone) for step in kept)


@given(joined)
def test_rules_are_read_as_they_are_written(rule: Retention) -> None:
    assert retention_of(str(rule)) == rule


@pytest.mark.parametrize("metric", ["acc(top1)", "a,b", "a|b", "it's | (so)"])
def test_a_quoted_name_may_contain_what_separates_rules(metric: str) -> None:
    rule = ds.Best(1, metric) | ds.Latest(2)
    assert retention_of(repr(rule)) == rule


@pytest.mark.parametrize("metric", ["eval_loss", "eval/loss", "eval:loss", "loss%", "5th", "lambda", "#loss"])
def test_a_word_needs_no_quotes(metric: str) -> None:
    assert retention_of(f"Best(metric={metric}) | Latest(2)") == ds.Best(metric=metric) | ds.Latest(2)


def test_words_of_parallel_modes_need_no_quotes(tmp_path: Path) -> None:
    args = ds.TrainingArguments(tmp_path, parallel=["Pipeline(2, schedule=1f1b)", "FSDP(units=layers.*)"])
    assert modes_of(args.parallel) == (ds.Pipeline(2, "1f1b"), ds.FSDP(units="layers.*"))


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("Latest(0)", ConfigurationError, "Latest(count=0): needs an integer of at least 1"),
        ("Latest(2.5)", ConfigurationError, "Latest(count=2.5): needs an integer of at least 1"),
        ("Best(mode='more')", ConfigurationError, "Best(mode='more'): allowed are 'min', 'max' and None"),
        ("Steps()", ConfigurationError, "Steps(): needs integers of at least 1"),
        ("Steps(2, 0)", ConfigurationError, "Steps(2, 0): needs integers of at least 1"),
        ("Lastest(3)", UnknownName, "unknown rule 'Lastest'; did you mean 'Latest'?"),
        ("Best(number=3)", UnknownName, "unknown argument of Best 'number'; known: count, metric, mode"),
        ("Latest(3, 4)", ConfigurationError, "Latest(3, 4): '4' is not an argument; known: count"),
        ("Latest(count=1, count=2)", ConfigurationError, "Latest(count=1, count=2): count is given twice"),
        ("Latest()", ConfigurationError, "Latest(): needs count"),
        ("Latest(3) | __import__('os').system('x')", ConfigurationError, " is not a rule; write for example Latest(…)"),
        ([], ConfigurationError, "[] is not a retention rule; use Latest(…), Best(…), EveryNth(…)"),
        (7, ConfigurationError, "7 is not a retention rule; use Latest(…), Best(…), EveryNth(…)"),
        ([ds.Latest(1), ds.OnBest()], ConfigurationError, "OnBest() is not a retention rule"),
    ],
)
def test_what_is_no_rule(tmp_path: Path, given: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        ds.TrainingArguments(tmp_path, keep=given)  # type: ignore[arg-type]


def test_as_arguments(tmp_path: Path) -> None:
    by_metric = {"metric_for_best_model": "accuracy"}
    assert ds.TrainingArguments(tmp_path).keeping is None
    limited = ds.TrainingArguments(tmp_path, save_total_limit=3, **by_metric).keeping
    assert str(limited) == "Latest(count=3) | Best(metric='eval_accuracy', mode='max')"
    args = ds.TrainingArguments(tmp_path, keep="Latest(2) | Best(3)")
    assert isinstance(args.keep, AnyRetention)
    assert args.to_dict()["keep"] == "Latest(count=2) | Best(count=3)"
    assert str(args.keeping) == "Latest(count=2) | Best(count=3, metric='eval_loss', mode='min')"
    with_best = ds.TrainingArguments(tmp_path, keep=ds.Latest(2), load_best_model_at_end=True).keeping
    assert str(with_best) == "Latest(count=2) | Best(metric='eval_loss', mode='min')"
    own = [ds.Latest(1), ds.Best(2, "near_loss")]
    assert str(ds.TrainingArguments(tmp_path, keep=own, **by_metric).keeping) == (
        "Latest(count=1) | Best(count=2, metric='near_loss')"
    )
    with pytest.raises(ConfigurationError, match=r"keep=Latest\(count=2\), and save_total_limit= too; give only one"):
        ds.TrainingArguments(tmp_path, keep=ds.Latest(2), save_total_limit=2)


def test_the_best_of_a_resumed_run_are_those_of_an_unbroken_one(tmp_path: Path) -> None:
    """Not only the newest best: by what the manifests of former legs say."""
    settings = {"keep": ds.Best(2, "near_loss") | ds.EveryNth(20), "save_total_limit": None, "save_steps": 4}
    losses: dict[int, float] = {}

    def note(ctx: ds.EvaluateContext) -> None:
        if ctx.name == "near":
            losses[ctx.state.global_step] = ctx.metrics["eval_near_loss"]

    stoppable_trainer(tmp_path / "whole", Listener({"on_evaluate": note}), max_steps=48, **settings).train()
    for stop in (8, 22, 36):
        stoppable_trainer(tmp_path / "parts", stop_after(stop), max_steps=48, **settings).train()
    stoppable_trainer(tmp_path / "parts", max_steps=48, **settings).train()
    best = sorted(losses, key=losses.__getitem__)[:2]
    assert {*best, 20, 40, 48} == steps_in(tmp_path / "whole") == steps_in(tmp_path / "parts") - {22}


def steps_in(output_dir: Path) -> set[int]:
    return {entry.step for entry in Summaries().of(output_dir / "checkpoints")}


def test_a_dense_start_is_never_deleted(tmp_path: Path) -> None:
    """Saved at powers of two, then regularly: of a run in two legs the former all stay, of the latter the newest."""
    settings: dict[str, Any] = {"save": "Every(steps=5) | AtSteps(1, 2, 4, 8)", "keep": "Latest(2) | Steps(1, 2, 4, 8)"}
    settings |= {"save_total_limit": None, "save_steps": 500, "max_steps": 20}
    stoppable_trainer(tmp_path, stop_after(6), **settings).train()
    stoppable_trainer(tmp_path, **settings).train()
    assert steps_in(tmp_path) == {1, 2, 4, 8, 15, 20}


def test_a_checkpoint_has_no_metrics_of_another_step(tmp_path: Path) -> None:
    """Saved at 8, 16, …, evaluated at 6, 12, 18, 24: only the last one of them is among the best."""
    settings = {"keep": ds.Best(3, "near_loss") | ds.EveryNth(8), "save_total_limit": None, "eval_steps": 6}
    stoppable_trainer(tmp_path, stop_after(15), max_steps=30, **settings).train()
    stoppable_trainer(tmp_path, max_steps=30, **settings).train()
    entries = Summaries().of(tmp_path / "checkpoints")
    measured = {entry.step: "eval_near_loss" in entry.metrics and "eval_far_loss" in entry.metrics for entry in entries}
    assert measured == {8: False, 16: False, 24: True, 30: True}
    assert ds.Best(3, "near_loss")(entries) == {24, 30}


@pytest.mark.parametrize(
    ("settings", "is_said"),
    [
        ({"save_steps": 20, "eval_steps": 15}, True),
        ({"save_steps": 20, "eval_steps": 25}, False),
        ({"save": "Every(steps=20) | OnBest()", "save_steps": 500, "eval_steps": 15}, False),
        ({"save_steps": 20, "eval_strategy": "epoch"}, False),
    ],
)
def test_it_is_said_where_no_checkpoint_will_be_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], is_said: bool
) -> None:
    both = {"keep": ds.Best(2, "near_loss"), "save_total_limit": None, "max_steps": 50, **settings}
    stoppable_trainer(tmp_path, stop_after(1), **both).train()
    assert ("no checkpoint is due at a step that is evaluated" in caplog.text) is is_said
