"""What comes at another place in an interrupted run changes no step; what comes in a step is in its checkpoint."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.logs import read_records
from dalsegno.testing import compare_runs, tiny_regression_data
from support.listeners import Listener
from support.small import small_trainer


class Noisy(nn.Module):
    """Draws from each of the CPU's generators in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift = random.random() + float(np.random.rand())
        return nn.functional.mse_loss(self.layers(x) + shift, y)


def draw(*_: Any) -> None:
    nn.Linear(8, 8)  # its parameters are drawn
    np.random.rand()
    random.random()


class Drawer(ds.Callback):
    """Draws whenever its state is asked for or given."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, ctx: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        draw()
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        draw()
        self.steps = state["steps"]


def drawing(where: str) -> ds.Callback:
    return Drawer() if where == "state_dict" else Listener({where: draw}, name="drawer")


def stopper(step: int, *, save: bool = True) -> ds.Callback:
    handlers = {"on_step_end": lambda ctx: ctx.control.stop("mid-way", save=save) if ctx.step == step else None}
    return Listener(handlers, name="stopper")


def interrupter() -> ds.Callback:
    """A signal arrives during each evaluation."""
    return Listener({"on_prediction_step": lambda ctx: signal.raise_signal(signal.SIGTERM)}, name="interrupter")


def noisy(output_dir: Path, *callbacks: Any, **settings: Any) -> ds.Trainer:
    """Five steps an epoch; a checkpoint every five steps."""
    settings = {"num_train_epochs": 2, "save_steps": 5, "logging_steps": 1, **settings}
    torch.manual_seed(0)
    model = Noisy()
    return small_trainer(output_dir, JsonLogger(), *callbacks, model=model, **settings)


def differences(first: Path, second: Path) -> list[str]:
    return [row.title for row in compare_runs(first, second).rows if not row.identical]


OUTSIDE = ["on_before_load", "on_load", "on_train_begin", "on_before_save", "on_save", "on_train_end", "state_dict"]


@pytest.mark.parametrize("where", [*OUTSIDE, "on_step_done", "on_epoch_end"])
@pytest.mark.parametrize("in_background", [False, True])
def test_drawn_numbers_shift_nothing_in_a_resumed_run(tmp_path: Path, where: str, in_background: bool) -> None:
    """Interrupted after a checkpoint, at one, and where only the interruption saves."""
    noisy(tmp_path / "whole", drawing(where), save_in_background=in_background).train()
    for step, save in ((7, False), (5, True), (3, True)):
        parts = tmp_path / f"parts-{step}"
        noisy(parts, drawing(where), stopper(step, save=save), save_in_background=in_background).train()
        noisy(parts, drawing(where), save_in_background=in_background).train()
        assert differences(tmp_path / "whole", parts) == []


def test_a_run_that_draws_outside_of_its_steps_is_the_run_that_does_not(tmp_path: Path) -> None:
    noisy(tmp_path / "without").train()
    noisy(tmp_path / "with", *(Listener({each: draw}, name=each) for each in OUTSIDE if each[:3] == "on_")).train()
    assert differences(tmp_path / "without", tmp_path / "with") == []


def test_an_evaluation_that_is_interrupted_gives_back_what_the_states_have_drawn(tmp_path: Path) -> None:
    class Evaluated(Drawer):
        def on_evaluate_begin(self, ctx: Any) -> None:
            draw()

    data = {"parts": {"eval_dataset": tiny_regression_data(32, seed=1)}, "eval_steps": 3, "save_in_background": False}
    noisy(tmp_path / "whole", Evaluated(), **data).train()
    assert noisy(tmp_path / "parts", Evaluated(), interrupter(), **data).train().global_step == 3
    noisy(tmp_path / "parts", Evaluated(), **data).train()
    saved = "trainer.best_model_checkpoint"  # the interruption has saved the step that is the best
    assert compare_runs(tmp_path / "whole", tmp_path / "parts", ignoring=[saved]).identical


def test_a_second_train_goes_on_with_the_generators_of_the_first(tmp_path: Path) -> None:
    noisy(tmp_path / "whole").train()
    trainer = noisy(tmp_path / "parts", stopper(3))
    trainer.train()
    trainer.remove_callback("stopper")
    draw()
    trainer.train()
    rows = {row.what: row.identical for row in compare_runs(tmp_path / "whole", tmp_path / "parts").rows}
    assert rows["model"] and rows["rng"]


def own_loop(output_dir: Path, *, leave_at: int | None = None) -> None:
    """Draws before and after its loop."""
    torch.manual_seed(0)
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(tiny_regression_data(20), batch_size=4)  # type: ignore[arg-type, var-annotated]
    args = ds.TrainingArguments(output_dir, num_train_epochs=2, save_steps=1, eval_steps=0, logging_steps=1)
    with ds.Run(args, model=model, optimizer=optimizer, loader=loader) as run:
        if run.resumed_from is not None:
            draw()
        for batch in run.batches():
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step_end(loss=loss)
            if run.state.global_step == leave_at:
                break
        draw()


def test_an_own_loop_may_draw_around_its_loop(tmp_path: Path) -> None:
    own_loop(tmp_path / "whole")
    for step in (3, 5):  # inside an epoch; at its last step, whose checkpoint is saved after the loop is left
        own_loop(tmp_path / f"parts-{step}", leave_at=step)
        own_loop(tmp_path / f"parts-{step}")
        assert differences(tmp_path / "whole", tmp_path / f"parts-{step}") == []


# --- the end of a step ------------------------------------------------------------------------------------------------


def logs_what(event: str) -> ds.Callback:
    def note(ctx: Any) -> None:
        ctx.trainer.log({event: ctx.step, "of": ctx.state.global_step})

    return Listener({event: note}, name="notes")


@pytest.mark.parametrize("event", ["on_step_done", "on_save"])
@pytest.mark.parametrize(("step", "save"), [(5, True), (7, False), (3, True), (6, True)])
def test_records_logged_at_the_end_of_a_step_outlast_a_resume(
    tmp_path: Path, event: str, step: int, save: bool
) -> None:
    noisy(tmp_path / "whole", logs_what(event), save_in_background=False).train()
    noisy(tmp_path / "parts", logs_what(event), stopper(step, save=save), save_in_background=False).train()
    noisy(tmp_path / "parts", logs_what(event), save_in_background=False).train()
    assert differences(tmp_path / "whole", tmp_path / "parts") == []


def test_each_planned_checkpoint_has_its_record_of_a_background_save(tmp_path: Path) -> None:
    for step, save in ((7, False), (10, True), (12, True), (16, False)):
        noisy(tmp_path, logs_what("on_save"), stopper(step, save=save), num_train_epochs=4).train()
    noisy(tmp_path, logs_what("on_save"), num_train_epochs=4).train()
    saved = [each["on_save"] for each in read_records(tmp_path / "logs/train.jsonl") if "on_save" in each]
    assert saved == [5, 10, 15, 20]


def test_on_save_of_the_checkpoint_that_a_leg_resumes_from_tells_what_it_told_before(tmp_path: Path) -> None:
    told: list[Any] = []

    def tell(ctx: Any) -> None:
        told.append((ctx.path, ctx.step, ctx.is_best, ctx.state.global_step))

    settings = {"eval_steps": 5, "parts": {"eval_dataset": tiny_regression_data(8, seed=1)}}
    for step in (5, 9):  # the second interruption is the only reason for its checkpoint
        noisy(tmp_path, Listener({"on_save": tell}, name="teller"), stopper(step), **settings).train()
    first, again, *_ = told
    assert first == again == (tmp_path / "checkpoints/step-00000005", 5, True, 5)
    assert [step for _, step, _, _ in told] == [5, 5, 9]
    noisy(tmp_path, Listener({"on_save": tell}, name="teller"), **settings).train()
    assert [step for _, step, _, _ in told] == [5, 5, 9, 10]


def test_the_save_comes_after_the_last_event_of_its_step_at_an_epochs_end_too(tmp_path: Path) -> None:
    order: list[str] = []
    events = ("on_step_done", "on_epoch_end", "on_before_save", "on_save")
    handlers = {event: lambda ctx, event=event: order.append(f"{event} {ctx.state.global_step}") for event in events}
    noisy(tmp_path, Listener(handlers), save_steps=4, save_in_background=False).train()
    assert order[3:8] == ["on_step_done 4", "on_before_save 4", "on_save 4", "on_step_done 5", "on_epoch_end 5"]
    assert order[-4:] == ["on_step_done 10", "on_epoch_end 10", "on_before_save 10", "on_save 10"]


def test_a_step_whose_evaluation_is_interrupted_is_done_after_it(tmp_path: Path) -> None:
    order: list[str] = []
    handlers = {
        "on_evaluate": lambda ctx: order.append(f"evaluate {ctx.state.global_step}"),
        "on_step_done": lambda ctx: order.append(f"done {ctx.step}"),
    }
    settings = {"eval_steps": 3, "num_train_epochs": 1, "parts": {"eval_dataset": tiny_regression_data(32, seed=1)}}
    noisy(tmp_path, interrupter(), Listener(handlers, name="order"), **settings).train()
    assert order == ["done 1", "done 2"]
    noisy(tmp_path, Listener(handlers, name="order"), **settings).train()
    assert order == ["done 1", "done 2", "evaluate 3", "done 3", "done 4", "done 5"]


def test_an_abort_in_on_step_done_calls_off_the_save_of_its_step(tmp_path: Path) -> None:
    def abort(ctx: Any) -> None:
        if ctx.step == 5:
            ctx.control.stop("the loss is wrong", save=False)

    result = noisy(tmp_path, Listener({"on_step_done": abort}, name="critic")).train()
    assert (result.reason, result.why, result.stopped_by) == ("aborted", "the loss is wrong", "critic")
    assert result.checkpoint is None
