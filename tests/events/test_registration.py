"""Callbacks come and go: keys, aliases, versions, what is carried forward, global ones, and what they may return."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.checkpoint import CheckpointManager, saved_states
from dalsegno.errors import ConfigurationError, DuplicateKey, StateMismatch, UnknownName
from dalsegno.events.callback import global_callbacks
from dalsegno.testing import run_ranks, tiny_regression_data
from support.listeners import Listener, Trace
from support.resumed import stop_after
from support.small import small_trainer
from support.zero import count_on_ranks


def train(output_dir: Path, *callbacks: ds.Callback, steps: int = 4) -> ds.Trainer:
    trainer = small_trainer(output_dir, *callbacks, max_steps=steps, save_steps=2)
    trainer.train()
    return trainer


def report(output_dir: Path, *callbacks: ds.Callback, steps: int) -> Any:
    """The load report of a run that is resumed and trained up to ``steps``."""
    reports: list[Any] = []
    train(output_dir, Listener({"on_load": lambda ctx: reports.append(ctx.report)}), *callbacks, steps=steps)
    return reports[0]


# --- handlers ---------------------------------------------------------------------------------------------------------


def test_a_handler_of_a_class_is_inspected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many legs and callbacks of the class; one that an instance brings along is inspected each time."""

    class Watches(ds.Callback):
        def on_step_end(self, ctx: ds.StepEndContext) -> None: ...

    inspected: list[Any] = []
    signature = inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda each: inspected.append(each) or signature(each))
    for _ in range(3):
        assert Watches().handled_events() == [ds.Event.STEP_END]
    assert len(inspected) == 1
    one = Watches()
    one.on_step_end = lambda: None  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match=r"takes \(self, ctx\)"):
        one.handled_events()


def test_a_class_may_switch_off_a_handler_that_it_inherits() -> None:
    class Watches(ds.Callback):
        def on_step_end(self, ctx: ds.StepEndContext) -> None: ...
        def on_save(self, ctx: ds.SaveContext) -> None: ...

    class WatchesLess(Watches):
        on_save = ds.Callback.on_save

    assert WatchesLess().handled_events() == [ds.Event.STEP_END]


def test_a_class_without_a_constructor_takes_no_arguments() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'every'"):
        type("Watches", (ds.Callback,), {})(every=3)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_two_with_one_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DuplicateKey) as caught:
        small_trainer(tmp_path, Trace(), Trace())
    assert str(caught.value) == (
        "callbacks: a Trace and a Trace both have the key 'Trace'; set name= on one of them, e.g. "
        "dalsegno.adapt(Trace(…), name='Trace-2')"
    )
    with pytest.raises(DuplicateKey, match="callbacks: 'Trace' is given twice"):
        small_trainer(tmp_path, trace := Trace(), trace)


def test_order_and_neighbours_never_change_whose_state_is_whose(tmp_path: Path) -> None:
    first, second = Trace(), Trace("other")
    second.steps = 100
    train(tmp_path, first, second)
    again = Trace("other"), Trace(), Trace("third")
    train(tmp_path, *again, steps=6)
    assert [trace.steps for trace in again] == [106, 6, 2]


def test_a_renamed_callback_finds_its_state(tmp_path: Path) -> None:
    class Renamed(Trace):
        aliases = ("OlderStill", "Trace")

    train(tmp_path, Trace())
    renamed = Renamed()
    loaded = report(tmp_path, renamed, steps=6)
    assert renamed.steps == 6
    assert "callbacks.Renamed" in loaded.restored
    assert loaded.notes == ["callbacks.Renamed: found under its former key callbacks.Trace"]
    assert loaded.carried == []


def test_a_state_that_finds_no_callback_is_carried_until_it_does(tmp_path: Path) -> None:
    train(tmp_path, Trace(), Trace("lonely"))
    loaded = report(tmp_path, Trace(), steps=8)
    assert loaded.carried == ["callbacks.lonely"]
    newest = CheckpointManager(tmp_path).find()
    assert newest is not None
    assert newest.step == 8
    assert saved_states(newest)["callbacks.lonely"] == [{"steps": 4}]
    lonely = Trace("lonely")
    train(tmp_path, Trace(), lonely, steps=10)
    assert lonely.steps == 6


def test_a_new_callback_begins_as_it_was_built(tmp_path: Path) -> None:
    train(tmp_path, Trace())
    late = Trace("late")
    loaded = report(tmp_path, Trace(), late, steps=6)
    assert loaded.fresh == ["callbacks.late"]
    assert late.steps == 2


# --- versions ---------------------------------------------------------------------------------------------------------


class Newer(Trace):
    """Version 2 of Trace: it counts in a field of another name."""

    name = "Trace"
    state_version = 2

    def __init__(self) -> None:
        super().__init__("Trace")

    def state_dict(self) -> dict[str, int]:
        return {"finished": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["finished"]


class Migrating(Newer):
    def migrate(self, state: dict[str, int], from_version: int) -> dict[str, int]:
        assert from_version == 1
        return {"finished": state["steps"]}


def test_an_older_state_is_migrated(tmp_path: Path) -> None:
    train(tmp_path, Trace())
    migrating = Migrating()
    train(tmp_path, migrating, steps=6)
    assert migrating.steps == 6
    plain = Newer()
    train(tmp_path, plain, steps=8)
    assert plain.steps == 8, "what was saved since then has the new version"


def test_an_older_state_that_nothing_migrates_is_refused(tmp_path: Path) -> None:
    train(tmp_path, Trace())
    with pytest.raises(
        StateMismatch, match=r"callbacks\.Trace: the saved state has version 1.* writes 2; give the class a "
    ):
        train(tmp_path, Newer(), steps=6)


def test_a_newer_state_is_refused(tmp_path: Path) -> None:
    train(tmp_path, Newer())
    with pytest.raises(StateMismatch, match=r"has version 2, .* knows up to 1; resume with the code that wrote it"):
        train(tmp_path, Trace(), steps=6)


# --- come and go ------------------------------------------------------------------------------------------------------


def test_callbacks_are_added_and_removed_between_fits(tmp_path: Path) -> None:
    first, second = Trace(), Trace("second")
    trainer = small_trainer(tmp_path, first, max_steps=2, lr_scheduler_type="constant")
    trainer.train()
    trainer.add_callback(second)
    with pytest.raises(DuplicateKey, match="both have the key 'second'"):
        trainer.add_callback(Trace("second"))
    trainer.args.max_steps = 4
    trainer.train()
    assert trainer.remove_callback("Trace") is first
    assert trainer.callbacks == [second]
    trainer.args.max_steps = 6
    trainer.train()
    assert (first.steps, second.steps) == (4, 4)
    assert trainer.remove_callback(second) is second
    with pytest.raises(UnknownName, match="unknown callback 'secnd'; known: none"):
        trainer.remove_callback("secnd")


def test_callbacks_are_given_and_taken_by_class(tmp_path: Path) -> None:
    """As Hugging Face's Trainer takes them. Of several, the first is taken."""
    trainer = small_trainer(tmp_path, Trace, second := Trace("second"), max_steps=1)
    trainer.add_callback(Listens)
    names = [callback.key for callback in trainer.callbacks]
    assert names == ["Trace", "second", "Listens"]
    assert trainer.remove_callback(Trace) is not second
    assert trainer.pop_callback(Trace) is second
    with pytest.raises(UnknownName, match="unknown callback 'Trace'"):
        trainer.pop_callback(Trace)


class Listens(ds.Callback):
    """A class without arguments."""


def test_own_callbacks_come_first_in_order_then_global_ones(tmp_path: Path) -> None:
    order: list[str] = []

    def named(name: str) -> ds.Callback:
        return Listener({"on_step_begin": lambda ctx: order.append(name)}, name=name)

    with named("global b"), named("global a"):
        small_trainer(tmp_path, named("own b"), named("own a"), max_steps=1).train()
    assert order == ["own b", "own a", "global b", "global a"]


def test_a_global_callback_hears_every_run_inside_with_only(tmp_path: Path) -> None:
    trace = Trace()
    trainer = small_trainer(tmp_path / "built before", max_steps=2)
    with trace:
        trainer.train()
        small_trainer(tmp_path / "inside", max_steps=3).train()
    small_trainer(tmp_path / "after", max_steps=4).train()
    assert trace.steps == 5


def test_a_global_callback_is_counted_and_never_called_twice(tmp_path: Path) -> None:
    trace = Trace()
    handle = ds.register_global_callback(trace)
    with trace, trace:
        small_trainer(tmp_path / "1", trace, max_steps=2).train()
        assert trace.steps == 2, "its own, and global three times over"
    small_trainer(tmp_path / "2", max_steps=2).train()
    assert trace.steps == 4, "leaving the with does not take away what was registered"
    handle.remove()
    handle.remove()
    small_trainer(tmp_path / "3", max_steps=2).train()
    assert trace.steps == 4
    assert global_callbacks() == []


def test_a_global_callback_is_let_go_when_the_run_fails(tmp_path: Path) -> None:
    def fail(ctx: Any) -> None:
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"), Trace():
        small_trainer(tmp_path, Listener({"on_step_begin": fail}), max_steps=1).train()
    assert global_callbacks() == []


def test_a_global_callbacks_state_is_saved_with_the_run(tmp_path: Path) -> None:
    with Trace("global"):
        train(tmp_path)
    again = Trace("global")
    with again:
        train(tmp_path, steps=6)
    assert again.steps == 6


def test_a_callback_for_rank_zero_is_called_there_alone(tmp_path: Path) -> None:
    """Its state is given to all, so that any rank may become the first one."""
    assert run_ranks(count_on_ranks, 2, tmp_path, 4) == [4, 0]
    assert run_ranks(count_on_ranks, 2, tmp_path, 6) == [6, 4]


# --- what a handler may return ----------------------------------------------------------------------------------------


def test_the_flags_of_a_returned_control_are_taken_over(tmp_path: Path) -> None:
    def save_at_three(ctx: Any) -> ds.TrainerControl | None:
        if ctx.step != 3:
            return None
        control = ds.TrainerControl()
        control.should_save = True
        return control

    small_trainer(tmp_path, Listener({"on_step_end": save_at_three}), max_steps=5, save_steps=100).train()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000003", "step-00000005"]


def test_anything_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="a handler returned a bool; it may return None or a TrainerControl"
    ) as it:
        small_trainer(tmp_path, Listener({"on_step_end": lambda ctx: True}), max_steps=1).train()
    assert it.value.__notes__ == ["raised in Listener.on_step_end"]


def test_requests_for_evaluation_saving_and_the_epochs_end(tmp_path: Path) -> None:
    """Each is met once, at its step's end; after an epoch that is cut short, the next one's data follows."""
    seen: list[tuple[str, int]] = []

    def ask(ctx: Any) -> None:
        flags = {1: "evaluate", 2: "save", 3: "epoch_stop", 4: "log"}
        if ctx.step in flags:
            setattr(ctx.control, f"should_{flags[ctx.step]}", True)

    def note(what: str) -> Any:
        return lambda ctx: (
            seen.append((what, ctx.state.global_step)) if getattr(ctx, "kind", "train") == "train" else None
        )

    handlers = {"on_step_end": ask, "on_save": note("save"), "on_epoch_end": note("epoch end"), "on_log": note("log")}
    handlers["on_evaluate"] = note("evaluate")

    parts = {"eval_dataset": tiny_regression_data(4, seed=1)}
    small_trainer(
        tmp_path, Listener(handlers), parts=parts, num_train_epochs=2, length=20, max_steps=8, save_in_background=False
    ).train()
    assert seen == [("evaluate", 1), ("save", 2), ("epoch end", 3), ("log", 4), ("epoch end", 8)]


def test_an_epoch_stop_survives_a_resume(tmp_path: Path) -> None:
    def cut(ctx: Any) -> None:
        if ctx.step == 3:
            ctx.control.should_epoch_stop = True

    epochs: dict[str, list[float]] = {"whole": [], "parts": []}
    for folder, stops in [("whole", []), ("parts", [2, 3, 4])]:
        for stop in [*stops, 0]:
            note = Listener({"on_step_end": lambda ctx, f=folder: epochs[f].append(ctx.state.epoch)}, name="note")
            cutter = Listener({"on_step_end": cut}, name="cutter")
            small_trainer(tmp_path / folder, cutter, note, stop_after(stop), max_steps=8, save_steps=100).train()
    assert epochs["whole"] == epochs["parts"]
    assert epochs["whole"] == pytest.approx([0.2, 0.4, 0.6, 1.2, 1.4, 1.6, 1.8, 2.0])


def test_a_request_for_the_epochs_end_at_its_end_is_none_for_the_next(tmp_path: Path) -> None:
    def cut(ctx: Any) -> None:
        ctx.control.should_epoch_stop = True

    parts = {"eval_dataset": tiny_regression_data(4, seed=1)}
    settings = {"eval_strategy": "epoch", "num_train_epochs": 2}
    result = small_trainer(tmp_path, Listener({"on_evaluate": cut}), parts=parts, **settings).train()
    assert (result.global_step, result.reason) == (10, "finished")
