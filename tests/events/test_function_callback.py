"""Functions as callbacks: ds.on, with and without every=."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.events.table import Event
from support.small import small_trainer


def test_a_function_hears_its_event(tmp_path: Path) -> None:
    saved: list[int] = []
    small_trainer(tmp_path, ds.on(Event.SAVE, lambda ctx: saved.append(ctx.step)), max_steps=4, save_steps=2).train()
    assert saved == [2, 4]


@pytest.mark.parametrize("event", [Event.STEP_BEGIN, Event.OPTIMIZER_STEP, Event.STEP_END, Event.STEP_DONE])
def test_every_so_many_steps(event: Event, tmp_path: Path) -> None:
    """The step that the event belongs to is a multiple, in the next leg as well."""
    seen: list[int] = []
    ahead = event in (Event.STEP_BEGIN, Event.OPTIMIZER_STEP)

    @ds.on(event, every=3)
    def note(ctx: Any) -> None:
        seen.append(ctx.state.global_step + ahead)

    small_trainer(tmp_path, note, max_steps=4, save_steps=4, lr_scheduler_type="constant").train()
    small_trainer(tmp_path, note, max_steps=9, save_steps=4, lr_scheduler_type="constant").train()
    assert seen == [3, 6, 9]
    assert note.key == "note"


def test_it_is_still_the_function_and_may_request_a_stop(tmp_path: Path) -> None:
    @ds.on(Event.STEP_END, every=2, name="enough")
    def stop(ctx: Any) -> str:
        ctx.control.stop("it is enough")
        return "called"

    class Ctx:
        control = ds.TrainerControl()

    assert stop(Ctx()) == "called"
    enough = ds.on(Event.STEP_END, lambda ctx: ctx.control.stop("it is enough"), every=2, name="enough")
    result = small_trainer(tmp_path, enough, max_steps=9).train()
    assert (result.global_step, result.why, result.stopped_by) == (2, "it is enough", "enough")


def nothing(ctx: Any) -> None: ...


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ds.on("on_saved", nothing), r"on\('on_saved', …\): needs an event: dalsegno.Event.SAVE"),
        (lambda: ds.on(Event.SAVE, 7), "needs a function"),
        (lambda: ds.on(Event.SAVE, lambda: None, name="f"), r"f\(\) cannot be called with \(ctx\)"),
        (lambda: ds.on(Event.STEP_END, nothing, every=0), "every=0.*at least 1"),
        (lambda: ds.on(Event.TRAIN_BEGIN, nothing, every=2), "on_train_begin does not belong to a step"),
        (lambda: ds.on(Event.AFTER_FORWARD, nothing, every=2), "on_after_forward does not belong to a step"),
    ],
)
def test_what_cannot_work_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=message):
        make()


def test_an_async_handler_is_refused_where_nobody_awaits_it(tmp_path: Path) -> None:
    @ds.on(Event.SAVE)
    async def upload(ctx: Any) -> None: ...

    with pytest.raises(
        ds.ConfigurationError, match=r"upload\.on_save is async.*wrap the callback: dalsegno\.Background\(callback\)"
    ):
        small_trainer(tmp_path, upload)
