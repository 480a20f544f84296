"""Hooks written for KempnerForge, as its documentation has them."""

from __future__ import annotations

import copy
import json
import math
import signal
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.interop.kempner import TrainingHook
from dalsegno.logs import read_records
from dalsegno.testing import FaultPlan, TinyRegression, assert_resume_equivalent, run_ranks, tiny_regression_data
from interop.script import Broken, play
from support.listeners import Listener
from support.models import Line
from support.own_loops import OwnLoop
from support.parcels import sent
from support.small import arguments, small_trainer


def hook_base() -> Any:
    from kempnerforge.training.hooks import TrainingHook

    return TrainingHook


def journal() -> Any:
    """A hook that writes down what it is called with."""

    class Journal(hook_base()):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_begin(self, config: Any) -> None:
            self.seen.append(("train_begin", config.gradient_accumulation_steps))

        def on_step_end(self, ctx: Any) -> None:
            self.seen.append(("step_end", ctx.step))

        def on_eval_end(self, metrics: dict[str, float], step: int) -> None:
            self.seen.append(("eval_end", step, sorted(metrics)[0]))

        def on_checkpoint_save(self, step: int, path: str) -> None:
            assert json.loads((Path(path) / "manifest.json").read_text())["step"] == step, "it is published"
            self.seen.append(("checkpoint_save", step, Path(path).name))

        def on_train_end(self, step: int, tokens_seen: int) -> None:
            self.seen.append(("train_end", step, tokens_seen))

    return Journal()


# --- the order --------------------------------------------------------------------------------------------------------

BEGIN = [("train_begin", 2), ("step_end", 1), ("step_end", 2)]
REST = [
    ("step_end", 3),
    ("eval_end", 3, "eval/loss"),
    ("step_end", 4),
    ("checkpoint_save", 4, "step-00000004"),
    ("step_end", 5),
]


def test_a_whole_run(tmp_path: Path) -> None:
    hook = journal()
    play(tmp_path, hook)
    last = [("step_end", 6), ("eval_end", 6, "eval/loss"), ("checkpoint_save", 6, "step-00000006"), ("train_end", 6, 0)]
    assert hook.seen == [*BEGIN, *REST, *last]


@pytest.mark.parametrize("given", [lambda hook_runner: hook_runner, lambda hook_runner: [JsonLogger(), hook_runner]])
def test_a_runner_of_hooks_is_a_list_of_callbacks(tmp_path: Path, given: Any) -> None:
    """Each with a key and a state of its own."""
    from dalsegno.interop.kempner import HookRunner

    class MyHook1(type(journal())):  # type: ignore[misc]
        pass

    class MyHook2(MyHook1):
        pass

    hook_runner = HookRunner([MyHook1(), MyHook2()])
    settings, data = arguments(tmp_path, max_steps=1), tiny_regression_data(8)
    trainer = ds.Trainer(TinyRegression(), settings, train_dataset=data, callbacks=given(hook_runner))
    trainer.train()
    assert [hook.seen for hook in hook_runner.hooks] == [[("train_begin", 1), ("step_end", 1), ("train_end", 1, 0)]] * 2
    assert {"MyHook1", "MyHook2"} < {callback.key for callback in trainer.callbacks}
    assert HookRunner().hooks == []


def test_a_run_that_is_stopped(tmp_path: Path) -> None:
    hook = journal()
    play(tmp_path, hook, stop_at=5)
    assert hook.seen == [*BEGIN, *REST, ("checkpoint_save", 5, "step-00000005"), ("train_end", 5, 0)]


def test_an_exception_skips_neither_later_hooks_nor_the_end(tmp_path: Path) -> None:
    first, second = journal(), journal()
    second.name = "second"
    with pytest.raises(Broken):
        play(tmp_path, first, second, break_at=3)
    assert first.seen == second.seen == [*BEGIN, ("train_end", 2, 0)]


# --- what a step looks like -------------------------------------------------------------------------------------------


def test_the_fields_of_a_step(tmp_path: Path) -> None:
    contexts: list[Any] = []

    class Hook(hook_base()):  # type: ignore[misc]
        def on_step_end(self, ctx: Any) -> None:
            contexts.append(ctx)

    native: list[Any] = []
    note = Listener({"on_train_metrics": lambda ctx: native.append(dict(ctx.metrics))})
    trainer = small_trainer(tmp_path, Hook(), note, max_steps=4)
    trainer.train()
    assert [ctx.step for ctx in contexts] == [1, 2, 3, 4], "each step has a context of its own"
    assert [(ctx.loss, ctx.grad_norm) for ctx in contexts] == [(each["loss"], each["grad_norm"]) for each in native]
    assert [ctx.lr for ctx in contexts] == [0.0075, 0.005, 0.0025, 0.0], "after the schedule has moved"
    assert contexts[0].model is trainer.model
    assert isinstance(contexts[0].optimizer, torch.optim.Optimizer)


def test_every_step_is_reported_after_its_record(tmp_path: Path) -> None:
    """Also one whose loss is not finite; what is on disk then has the step's own record."""
    hook, recorded = journal(), []
    log = JsonLogger()
    seen = hook.on_step_end

    def on_step_end(ctx: Any) -> None:
        seen(ctx)
        records = read_records(tmp_path / "logs/train.jsonl")
        recorded.append([each["global_step"] for each in records if each.get("kind") is None])

    def spoil(ctx: Any) -> None:
        if ctx.state.global_step == 1:
            ctx.outputs["loss"] = ctx.outputs["loss"] * math.nan

    hook.on_step_end = on_step_end
    trainer = small_trainer(
        tmp_path, log, hook, Listener({"on_before_backward": spoil}), model=Line(), max_steps=5, logging_steps=2
    )
    trainer.train()
    assert [what for what in hook.seen if what[0] == "step_end"] == [("step_end", step) for step in range(1, 6)]
    assert recorded == [[], [2], [2], [2, 4], [2, 4]]


def test_a_run_stops_at_such_a_step_too(tmp_path: Path) -> None:
    def spoil(ctx: Any) -> None:
        ctx.outputs["loss"] = ctx.outputs["loss"] * math.nan
        ctx.control.stop("enough")

    result = small_trainer(tmp_path, journal(), Listener({"on_before_backward": spoil}), max_steps=3).train()
    assert (result.global_step, result.reason) == (1, "stopped")


def test_a_loop_of_ones_own_has_hooks_too(tmp_path: Path) -> None:
    hook = journal()
    OwnLoop(tmp_path, hook, max_steps=3, save_steps=0).train()
    steps = [("step_end", step) for step in (1, 2, 3)]
    assert hook.seen == [("train_begin", 1), *steps, ("train_end", 3, 0)]


def losses_on_a_rank(output_dir: Path) -> list[float]:
    losses: list[float] = []

    class Hook:
        def on_step_end(self, ctx: Any) -> None:
            losses.append(ctx.loss)

    small_trainer(output_dir, ds.adapt(Hook(), "kempnerforge"), max_steps=2).train()
    return losses


def test_the_loss_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(losses_on_a_rank, 2, tmp_path)
    assert first == second
    assert len(first) == 2


# --- evaluations ------------------------------------------------------------------------------------------------------


def early_stopping(patience: int) -> Any:
    class EarlyStoppingHook(hook_base()):  # type: ignore[misc]
        """Of the same contract as KempnerForge's example: without the loss that it looks for, nothing is better."""

        def __init__(self) -> None:
            self.best, self.waited = math.inf, 0
            self.metrics: list[dict[str, float]] = []

        def on_eval_end(self, metrics: dict[str, float], step: int) -> None:
            self.metrics.append(metrics)
            loss = metrics.get("eval/loss", math.inf)
            self.waited = 0 if loss < self.best else self.waited + 1
            self.best = min(self.best, loss)
            if self.waited >= patience:
                raise KeyboardInterrupt

    return EarlyStoppingHook()


def evaluated(output_dir: Path, hook: Any, sets: Any, **settings: Any) -> ds.TrainResult:
    parts = {"eval_dataset": sets}
    return small_trainer(
        output_dir, hook, model=Line(), parts=parts, **{"max_steps": 40, "eval_steps": 4, **settings}
    ).train()


def test_a_run_that_improves_is_not_stopped(tmp_path: Path) -> None:
    hook = early_stopping(3)
    result = evaluated(tmp_path, hook, tiny_regression_data(8, seed=1))
    assert (result.reason, result.global_step, len(hook.metrics)) == ("finished", 40, 10)
    first = hook.metrics[0]
    assert sorted(first) == ["eval/loss", "eval/perplexity", "eval/runtime", "eval/samples_per_second"]
    assert first["eval/perplexity"] == math.exp(min(first["eval/loss"], 20.0))


def test_one_that_no_longer_improves_is(tmp_path: Path) -> None:
    result = evaluated(tmp_path, early_stopping(3), tiny_regression_data(8, seed=1), learning_rate=0.0)
    assert (result.reason, result.global_step, result.stopped_by) == ("stopped", 16, "EarlyStoppingHook")


def test_several_sets_are_one_evaluation(tmp_path: Path) -> None:
    sets = {"a": tiny_regression_data(8, seed=1), "a_b": tiny_regression_data(8, seed=2)}
    hooks = {metric: early_stopping(3) for metric in ("eval_a_b_loss", None)}
    for metric, hook in hooks.items():
        settings = {"max_steps": 4, "metric_for_best_model": metric}
        evaluated(tmp_path / str(metric), hook, sets, **settings)
        (metrics,) = hook.metrics
        main = "eval/a/loss" if metric is None else "eval/a_b/loss"
        assert metrics["eval/loss"] == metrics[main]
        assert metrics["eval/a/perplexity"] != metrics["eval/a_b/perplexity"]


def test_an_evaluation_over_two_legs_is_one(tmp_path: Path) -> None:
    """A signal comes during the second set; the next leg measures that set alone."""
    sets = {"a": tiny_regression_data(8, seed=1), "b": tiny_regression_data(8, seed=2)}
    settings = {"max_steps": 4, "save_steps": 4}
    first, second, whole = early_stopping(3), early_stopping(3), early_stopping(3)

    def stop(ctx: Any) -> None:
        if ctx.name == "b":
            signal.raise_signal(signal.SIGTERM)

    parts = {"eval_dataset": sets}
    stopper = Listener({"on_evaluate_begin": stop})
    small_trainer(tmp_path / "run", first, stopper, model=Line(), parts=parts, eval_steps=4, **settings).train()
    evaluated(tmp_path / "run", second, sets, **settings)
    evaluated(tmp_path / "whole", whole, sets, **settings)
    assert (first.metrics, len(second.metrics)) == ([], 1)
    losses = [name for name in whole.metrics[0] if name.endswith("loss")]
    assert [second.metrics[0][name] for name in losses] == [whole.metrics[0][name] for name in losses]


# --- hooks from the documentation -------------------------------------------------------------------------------------


def test_gradient_norms_from_a_hook(tmp_path: Path) -> None:
    """The page's own example, which at home sees no gradients: here it has an event at which there are some."""
    logged: list[tuple[int, dict[str, float]]] = []

    class GradHistogramHook(hook_base()):  # type: ignore[misc]
        def __init__(self) -> None:
            self._norms: dict[str, float] = {}

        def on_gradients_ready(self, ctx: Any) -> None:
            for name, parameter in ctx.model.named_parameters():
                self._norms[name] = parameter.grad.norm().item()

        def on_step_end(self, ctx: Any) -> None:
            if self._norms:
                logged.append((ctx.step, {f"grad_norm/{name}": norm for name, norm in self._norms.items()}))
                assert math.hypot(*self._norms.values()) == pytest.approx(ctx.grad_norm)
                self._norms.clear()

    small_trainer(tmp_path, GradHistogramHook(), model=Line(), max_steps=3, gradient_accumulation_steps=2).train()
    assert [step for step, _ in logged] == [1, 2, 3]
    assert all(norms["grad_norm/layer.weight"] > 0 for _, norms in logged)


def test_early_stopping_by_keyboard_interrupt_saves(tmp_path: Path) -> None:
    class EarlyStop(hook_base()):  # type: ignore[misc]
        def on_eval_end(self, metrics: dict[str, float], step: int) -> None:
            raise KeyboardInterrupt

    result = play(tmp_path, EarlyStop())
    assert (result.reason, result.global_step, result.stopped_by) == ("stopped", 3, "EarlyStop")
    assert result.why == "on_eval_end raised KeyboardInterrupt"
    assert result.checkpoint == tmp_path / "checkpoints" / "step-00000003"


def test_a_heartbeat_to_a_server(tmp_path: Path) -> None:
    beats: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            beats.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()

        class Heartbeat(hook_base()):  # type: ignore[misc]
            def on_step_end(self, ctx: Any) -> None:
                url = f"http://127.0.0.1:{server.server_port}/beat/{ctx.step}"
                urllib.request.urlopen(url, data=b"", timeout=60).close()

        small_trainer(tmp_path, Heartbeat(), max_steps=2).train()
        server.shutdown()
    assert beats == ["/beat/1", "/beat/2"]


# --- state ------------------------------------------------------------------------------------------------------------


class Average:
    """A hook with state, written without the base class."""

    def __init__(self) -> None:
        self.average = 0.0

    def on_step_end(self, ctx: Any) -> None:
        self.average = 0.9 * self.average + 0.1 * ctx.loss

    def on_log_step(self, ctx: Any) -> None:
        if ctx.kind == "train":
            ctx.logs["average"] = self.average

    def state_dict(self) -> dict[str, float]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.average = state["average"]


def averaging(output_dir: Path) -> ds.Trainer:
    hook = ds.adapt(Average(), "kempnerforge")
    return small_trainer(output_dir, hook, JsonLogger(), max_steps=12, logging_steps=1, save_steps=4)


def test_state_survives_a_kill(tmp_path: Path) -> None:
    assert_resume_equivalent(averaging, [FaultPlan(event=ds.Event.STEP_END, count=7)], folder=tmp_path)
    records = read_records(tmp_path / "killed" / "logs" / "train.jsonl")
    assert sum("average" in record for record in records) == 12


# --- state ------------------------------------------------------------------------------------------------------------


class Watches(TrainingHook):
    """Of its attributes, training changes the first two, ``on_train_begin`` sets two, and one is the time."""

    def __init__(self) -> None:
        self.best: float | None = None
        self.seen: list[int] = []
        self.norms: dict[str, float] = {}
        self.begun = self.constant = 0
        self.is_ready = False
        self.since = 0.0

    def on_train_begin(self, config: Any) -> None:
        self.begun += 1
        self.norms = {"first": 0.0}

    def on_step_end(self, ctx: Any) -> None:
        self.best, self.is_ready, self.since = ctx.loss, True, time.monotonic()
        self.seen.append(ctx.step)
        self.norms["first"] += 1.0
        self.begun += 1
        self.made = ctx.step


def test_attributes_that_no_checkpoint_contains_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small_trainer(tmp_path / "first", Watches(), max_steps=4, save_steps=1).train()
    (said,) = [each.getMessage() for each in caplog.records if "no checkpoint contains" in each.getMessage()]
    assert "training has changed Watches.begun, Watches.best, Watches.norms, Watches.seen, which" in said
    assert said.endswith("dalsegno.adapt(Watches(…), state=('begun', 'best', 'norms', 'seen'))")
    caplog.clear()
    saving = ds.adapt(Watches(), state=("best", "seen"))
    small_trainer(tmp_path / "second", saving, max_steps=4, save_steps=1).train()
    again = Watches()
    small_trainer(tmp_path / "second", ds.adapt(again, state="seen"), max_steps=5).train()
    assert again.seen == [1, 2, 3, 4, 5]
    in_a_rank: Any = sent(ds.adapt(again, state="seen"), tmp_path)
    assert in_a_rank.state_dict() == {"seen": [1, 2, 3, 4, 5]}, "as a launch brings it there"
    assert "no checkpoint contains" not in caplog.text


class Counts(TrainingHook):
    """Its steps begin at the class's number, and its losses are more than a glance reads."""

    steps = 0

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gap = math.nan
        self.since = 0

    def on_step_end(self, ctx: Any) -> None:
        self.steps += 1
        self.losses += [ctx.loss] * 300
        self.gap, self.since = -math.nan, time.time_ns()


def test_the_warning_of_an_attribute_tells_how_to_save_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small_trainer(tmp_path / "first", ds.adapt(Counts(), name="mine"), max_steps=2, save_steps=1).train()
    (said,) = [each.getMessage() for each in caplog.records if "no checkpoint contains" in each.getMessage()]
    assert "training has changed mine.losses, mine.steps, which" in said
    assert said.endswith("dalsegno.adapt(Counts(…), name='mine', state=('losses', 'steps'))")
    caplog.clear()
    small_trainer(tmp_path / "second", Counts(), max_steps=2, eval_steps=1, save_steps=0).train()
    assert "no checkpoint contains" not in caplog.text, "nothing is saved"


def test_a_state_by_names_of_attributes_is_of_the_callback_that_has_it() -> None:
    saving: Any = ds.adapt(Watches(), state=("seen",))
    twin = copy.deepcopy(saving)
    twin.load_state_dict({"seen": [1, 2]})
    assert (twin.state_dict(), saving.state_dict()) == ({"seen": [1, 2]}, {"seen": []})
    named: Any = ds.adapt(saving.__wrapped__, name="second")
    again: Any = ds.adapt(saving.__wrapped__, state=("best", "seen"))
    assert (named.key, named.state_dict()) == ("second", {"seen": []}), "what was said before still holds"
    assert (again.key, again.state_dict()) == ("second", {"best": None, "seen": []})


def test_a_state_by_names_of_attributes_is_refused_where_it_would_save_nothing() -> None:
    class Stateful(Watches):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(ds.ConfigurationError, match="Stateful has a state_dict, which says what is saved"):
        ds.adapt(Stateful(), state=("seen",))
    with pytest.raises(ds.ConfigurationError, match="JsonLogger is dalsegno's own kind: give its class a state_dict"):
        ds.adapt(JsonLogger(), state=("path",))
    with pytest.raises(ds.UnknownName, match=r"attribute of Watches: 'sen'; did you mean 'seen'"):
        ds.adapt(Watches(), state=("sen",))
