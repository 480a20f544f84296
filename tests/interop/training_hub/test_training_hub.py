"""training_hub's callbacks: its order, its context, its flags; and that they can never hurt the training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.testing import run_ranks
from interop.script import play
from interop.training_hub.example import base
from support.small import small_trainer

HOOKS = ["train_begin", "epoch_begin", "step_begin", "log", "evaluate", "save", "step_end", "epoch_end", "train_end"]


class Journal:
    """Keeps every context it is given."""

    def __init__(self, *, run_on_all_ranks: bool = False) -> None:
        self.run_on_all_ranks = run_on_all_ranks
        self.contexts: list[tuple[str, Any]] = []
        for name in HOOKS:
            setattr(self, f"on_{name}", lambda context, name=name: self.contexts.append((name, context)))

    def at(self, name: str, step: int) -> Any:
        return next(context for hook, context in self.contexts if hook == name and context.step == step)


def test_a_whole_run(tmp_path: Path) -> None:
    """A step's end comes before its record."""
    callback = Journal()
    play(tmp_path, ds.adapt(callback, "training_hub"))
    first = [("step_begin", 0), ("step_end", 1), ("step_begin", 1), ("step_end", 2), ("log", 2), ("step_begin", 2)]
    first += [("step_end", 3), ("evaluate", 3), ("epoch_end", 3)]
    second = [("step_begin", 3), ("step_end", 4), ("log", 4), ("save", 4), ("step_begin", 4), ("step_end", 5)]
    second += [("step_begin", 5), ("step_end", 6), ("log", 6), ("evaluate", 6), ("epoch_end", 6), ("save", 6)]
    expected = [("train_begin", 0), ("epoch_begin", 0), *first, ("epoch_begin", 3), *second, ("train_end", 6)]
    assert [(name, context.step) for name, context in callback.contexts] == expected
    end, evaluation, save = callback.at("step_end", 4), callback.at("evaluate", 3), callback.at("save", 4)
    assert (end.loss, end.epoch, end.is_main_process, end.output_dir) == (end.metrics["loss"], 1, True, str(tmp_path))
    assert end.loss > 0 and end.learning_rate == end.metrics["learning_rate"] and end.metrics["total_samples"] == 8
    assert evaluation.metrics["eval_loss"] == evaluation.metrics["val_loss"]
    assert evaluation.loss == callback.at("step_end", 3).loss
    assert save.metrics["checkpoint_path"] == str(tmp_path / "checkpoints" / "step-00000004")
    assert callback.at("step_begin", 4).loss is None, "not that of an older step"


def test_an_unknown_loss_is_that_of_the_evaluation(tmp_path: Path) -> None:
    seen: list[Any] = []
    play(tmp_path, type("Diverges", (base(),), {"on_evaluate": lambda self, context: seen.append(context)})())
    without_record, with_record = seen
    assert without_record.loss == without_record.metrics["eval_loss"]
    assert with_record.loss == with_record.metrics["loss"] != with_record.metrics["eval_loss"]


@pytest.mark.parametrize("hook", ["step_end", "log", "evaluate"])
def test_its_flags_act_at_the_end_of_the_step(tmp_path: Path, hook: str) -> None:
    class Stops(base()):  # type: ignore[misc]
        pass

    def ask(self: Any, context: Any) -> None:
        if context.step == 2:
            context.control.should_save = context.control.should_training_stop = True

    setattr(Stops, f"on_{hook}", ask)
    result = play(tmp_path, Stops(), eval_steps=2)
    assert (result.global_step, result.stopped_by) == (2, "Stops")
    assert result.checkpoint == tmp_path / "checkpoints" / "step-00000002"


def test_one_that_sets_none_may_run_in_the_background(tmp_path: Path) -> None:
    controls: list[Any] = []
    methods = {"on_step_end": lambda self, context: controls.append(context.control), "sets_control_flags": False}
    small_trainer(tmp_path, type("Watches", (base(),), methods)(), max_steps=2).train()
    assert controls == [None, None]


def test_what_it_raises_is_counted_and_never_felt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(self: Any, context: Any) -> None:
        raise ValueError("oops")

    assert play(tmp_path, type("Fails", (base(),), {"on_log": fail})()).reason == "finished"
    (record,) = [each for each in caplog.records if "3 calls, 3 failed, 0 dropped" in each.message]
    assert record.levelno == logging.ERROR and record.message.endswith("first with ValueError: oops")


def calls_on_a_rank(output_dir: Path) -> list[list[bool]]:
    one, each = Journal(), Journal(run_on_all_ranks=True)
    play(output_dir, ds.adapt(one, "training_hub", name="one"), ds.adapt(each, "training_hub", name="each"))
    return [[context.is_main_process for _, context in callback.contexts] for callback in (one, each)]


def test_on_rank_zero_unless_it_asks_for_all(tmp_path: Path) -> None:
    (main, on_first), (none, on_second) = run_ranks(calls_on_a_rank, 2, tmp_path)
    assert main == on_first == [True] * len(main)
    assert (none, on_second) == ([], [False] * len(main))


def test_its_own_saves_at_a_signal_are_refused() -> None:
    from training_hub import JITCheckpointCallback

    with pytest.raises(ds.ConfigurationError, match="leave it out: a run saves by itself at SIGTERM"):
        ds.adapt(JITCheckpointCallback())
