"""Every way for a leg to end: reported once, with its reason, and who requested it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import IterableDataset

import dalsegno as ds
from dalsegno.errors import EmptyDataset
from dalsegno.logs import RunFile
from dalsegno.testing import tiny_regression_data
from support.listeners import Listener
from support.small import small_trainer


class Oops(Exception):
    pass


def fail(ctx: Any) -> None:
    raise Oops("it broke")


class Stream(IterableDataset[Any]):
    """``length`` samples, each time it is asked."""

    def __init__(self, length: int) -> None:
        self._data = tiny_regression_data(length) if length else []

    def __iter__(self) -> Iterator[Any]:
        return iter([self._data[index] for index in range(len(self._data))])


def once() -> Iterator[Any]:
    """A loader that is used up after three batches."""
    data = tiny_regression_data(12)
    for begin in (0, 4, 8):
        yield {key: torch.stack([data[begin + i][key] for i in range(4)]) for key in ("x", "y")}


def interrupt(ctx: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def interrupt_twice(ctx: Any) -> None:
    interrupt(ctx)
    interrupt(ctx)


def fail_at_last(ctx: Any) -> None:
    if ctx.kind == "final":
        fail(ctx)


def stop(ctx: Any) -> None:
    ctx.control.stop("enough is enough")


def abort(ctx: Any) -> None:
    ctx.control.stop("no good", save=False)


class Ending(NamedTuple):
    """What leads to the end of a run of four steps that saves at its end, and what is reported of it."""

    reason: str
    handlers: dict[str, Any]
    raises: type[BaseException] | None = None
    saved: int | None = None
    """The step of the one checkpoint."""
    data: Callable[[], dict[str, Any]] = dict


ENDINGS = {
    "finished": Ending("finished", {}, saved=4),
    "stopped": Ending("stopped", {"on_step_begin": stop}, saved=1),
    "stopped in evaluation": Ending("stopped", {"on_evaluate": stop}, saved=2),
    "aborted": Ending("aborted", {"on_log": abort}),
    "exception": Ending("exception", {"on_step_end": fail}, Oops),
    "exception at the beginning": Ending("exception", {"on_train_begin": fail}, Oops),
    "exception in a save": Ending("exception", {"on_before_save": fail}, Oops),
    "exception after a save": Ending("exception", {"on_save": fail}, Oops, saved=4),
    "exception in the final record": Ending("exception", {"on_log": fail_at_last}, Oops, saved=4),
    "interrupted": Ending("stopped", {"on_after_backward": interrupt}, saved=1),
    "interrupted twice": Ending("interrupted", {"on_after_backward": interrupt_twice}, KeyboardInterrupt),
    "exit": Ending("exception", {"on_step_begin": lambda ctx: exit(3)}, SystemExit),
    "empty": Ending("exception", {}, EmptyDataset, data=lambda: {"train_dataset": Stream(0)}),
    "exhausted": Ending("exhausted", {}, saved=3, data=lambda: {"train_dataset": None, "train_dataloader": once()}),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_every_ending_is_told_once(tmp_path: Path, name: str) -> None:
    ending = ENDINGS[name]
    ends: list[str] = []
    exceptions: list[BaseException] = []
    handlers = {
        "on_exception": lambda ctx: exceptions.append(ctx.exception),
        "on_train_end": lambda ctx: ends.append(ctx.reason),
    }
    trainer = small_trainer(
        tmp_path,
        Listener(ending.handlers, name="culprit"),
        Listener(handlers, name="watch"),
        parts={"eval_dataset": tiny_regression_data(4, seed=1), **ending.data()},
        max_steps=4,
        logging_steps=2,
        eval_steps=2,
        save_steps=4,
    )
    saved = None if ending.saved is None else tmp_path / f"checkpoints/step-{ending.saved:08d}"
    if ending.raises is None:
        result = trainer.train()
        assert (result.reason, result.checkpoint) == (ending.reason, saved)
        assert exceptions == []
    else:
        with pytest.raises(ending.raises) as caught:
            trainer.train()
        assert exceptions == [caught.value]
    assert ends == [ending.reason]
    assert list(tmp_path.glob("checkpoints/step-*")) == ([] if saved is None else [saved])
    leg = RunFile(tmp_path).load().legs[-1]
    assert leg.reason == ending.reason
    assert leg.ended is not None


def test_an_empty_map_dataset_is_refused_before_anything_begins(tmp_path: Path) -> None:
    with pytest.raises(EmptyDataset, match="the dataset has length 0"):
        small_trainer(tmp_path, length=0)


def test_who_asked_for_the_end(tmp_path: Path) -> None:
    def return_control(ctx: Any) -> ds.TrainerControl:
        ctx.control.should_training_stop = True
        return ctx.control

    def ask(handler: Any) -> ds.Callback:
        return Listener({"on_step_end": handler}, name="the culprit")

    innocent = Listener({"on_step_end": lambda ctx: None}, name="innocent")
    for number, (handler, why) in enumerate(
        [
            (stop, "enough is enough"),
            (return_control, None),
            (lambda ctx: ctx.trainer.stop("through the trainer"), "through the trainer"),
        ]
    ):
        result = small_trainer(tmp_path / str(number), innocent, ask(handler), max_steps=4).train()
        assert (result.global_step, result.why, result.stopped_by) == (1, why, "the culprit")
        assert RunFile(tmp_path / str(number)).load().legs[-1].by == "the culprit"


def test_the_first_who_asks_is_the_one_who_is_named(tmp_path: Path) -> None:
    first = Listener({"on_step_end": stop}, name="first")
    second = Listener({"on_step_end": abort}, name="second")
    result = small_trainer(tmp_path, first, second, max_steps=4, save_steps=4).train()
    assert (result.reason, result.why, result.stopped_by) == ("aborted", "enough is enough", "first")
    assert result.checkpoint is None


def test_an_exception_keeps_its_type_and_says_where_it_came_from(tmp_path: Path) -> None:
    class Clumsy(ds.Callback):
        def on_pre_optimizer_step(self, ctx: Any) -> None:
            raise Oops("it broke")

    with pytest.raises(Oops) as caught:
        small_trainer(tmp_path, Clumsy(), max_steps=1).train()
    assert str(caught.value) == "it broke"
    assert caught.value.__notes__ == ["raised in Clumsy.on_pre_optimizer_step"]


def test_failing_on_the_way_out_hides_nothing_and_stops_nobody(tmp_path: Path) -> None:
    events: list[str] = []

    def fail_again(ctx: Any) -> None:
        raise RuntimeError("and again")

    bad = Listener({"on_step_end": fail, "on_exception": fail_again, "on_train_end": fail_again}, name="bad")
    good = Listener(
        {
            "on_exception": lambda ctx: events.append(type(ctx.exception).__name__),
            "on_train_end": lambda ctx: events.append(ctx.reason),
        }
    )
    with pytest.raises(Oops, match="it broke") as caught:
        small_trainer(tmp_path, bad, good, max_steps=1).train()
    assert events == ["Oops", "exception"]
    notes = " ".join(caught.value.__notes__)
    assert notes.count("and during teardown: RuntimeError: and again") == 2


def test_a_failing_train_end_after_a_good_run_is_raised_when_all_have_heard(tmp_path: Path) -> None:
    events: list[str] = []
    bad = Listener({"on_train_end": fail}, name="bad")
    good = Listener({"on_train_end": lambda ctx: events.append(ctx.reason)})
    with pytest.raises(Oops):
        small_trainer(tmp_path, bad, good, max_steps=1).train()
    assert events == ["finished"]
    assert RunFile(tmp_path).load().legs[-1].reason == "finished"


def test_of_two_that_fail_at_the_end_the_second_is_in_the_notes_of_the_first(tmp_path: Path) -> None:
    def fail_too(ctx: Any) -> None:
        raise RuntimeError("and again")

    both = [Listener({"on_train_end": each}, name=each.__name__) for each in (fail, fail_too)]
    with pytest.raises(Oops) as caught:
        small_trainer(tmp_path, *both, max_steps=1).train()
    assert caught.value.__notes__[-1] == "and during teardown: RuntimeError: and again"
