"""Learning rates set by command: the schedule continues, scaled; what cannot be scaled is refused; and the script's own
change later on still takes effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as schedules

import dalsegno as ds
from dalsegno.training.learning_rate import scale_rates
from support.commanded import Client, Commands
from support.listeners import Listener
from support.models import Line
from support.small import small_trainer

SCHEDULES: dict[str, Any] = {
    "LambdaLR": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda optimizer: schedules.MultiplicativeLR(optimizer, lambda step: 0.9),
    "StepLR": lambda optimizer: schedules.StepLR(optimizer, 3),
    "MultiStepLR": lambda optimizer: schedules.MultiStepLR(optimizer, [3, 8]),
    "ConstantLR": lambda optimizer: schedules.ConstantLR(optimizer, 0.5, total_iters=7),
    "LinearLR": lambda optimizer: schedules.LinearLR(optimizer, 0.1, total_iters=9),
    "ExponentialLR": lambda optimizer: schedules.ExponentialLR(optimizer, 0.8),
    "PolynomialLR": lambda optimizer: schedules.PolynomialLR(optimizer, 20, 2),
    "CosineAnnealingLR": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 8, eta_min=0.001),
    "WarmRestarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 4, eta_min=0.001),
    "OneCycleLR": lambda optimizer: schedules.OneCycleLR(optimizer, [0.2, 0.4], total_steps=20),
    "CyclicLR": lambda optimizer: schedules.CyclicLR(optimizer, 0.01, 0.1, step_size_up=4),
    "SequentialLR": lambda optimizer: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, total_iters=4), schedules.CosineAnnealingLR(optimizer, 10, eta_min=0.002)],
        milestones=[4],
    ),
    "ChainedScheduler": lambda optimizer: schedules.ChainedScheduler(
        [schedules.ExponentialLR(optimizer, 0.9), schedules.StepLR(optimizer, 4)], optimizer
    ),
}


def rates(name: str, *, scaled_at: int, tensor: bool) -> list[list[float]]:
    """The learning rates of two groups over 16 steps; multiplied by 3 after step ``scaled_at``."""

    def rate(value: float) -> Any:
        return torch.tensor(value) if tensor else value

    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate(lr)} for lr in (0.1, 0.3)]
    optimizer = AdamW(groups, capturable=tensor) if name != "CyclicLR" else SGD(groups, momentum=0.9)
    scheduler = SCHEDULES[name](optimizer)
    found = []
    for step in range(16):
        found.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
        if step == scaled_at:
            scale_rates(optimizer, [scheduler], 3.0)
            assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    return found


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_torch_continues_scaled(name: str, tensor: bool) -> None:
    """Also across a milestone, a restart, the top of a cycle."""
    plain = rates(name, scaled_at=-1, tensor=tensor)
    for step in (1, 5):
        scaled = rates(name, scaled_at=step, tensor=tensor)
        wanted = [[rate * (3.0 if number > step else 1.0) for rate in row] for number, row in enumerate(plain)]
        torch.testing.assert_close(torch.tensor(scaled), torch.tensor(wanted), rtol=1e-5, atol=1e-9)


# --- in a run ---------------------------------------------------------------------------------------------------------


def leg(
    output_dir: Path, steps: int, commands: Commands | None = None, *, make: Any = None, stop: int = 0, **settings: Any
) -> list[float]:
    """Trains to ``steps``, or stops at ``stop``; the learning rate of each of the leg's steps."""
    found: list[float] = []

    def note(ctx: Any) -> None:
        found.append(float(ctx.lr))
        if ctx.step == stop:
            ctx.control.stop("mid-way")

    model = Line()
    parts = {} if make is None else make(model)
    client = Client(commands or {})
    listener = Listener({"on_step_end": note}, name="rates")
    trainer = small_trainer(
        output_dir, client, listener, model=model, parts=parts, max_steps=steps, length=80, save_steps=100, **settings
    )
    trainer.train()
    return found


def linear(steps: int, peak: float = 0.01) -> list[float]:
    return [peak * (steps - step) / steps for step in range(steps)]


def close(found: list[float], wanted: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-6, atol=1e-12)


def test_a_value_holds_for_the_next_step_and_the_default_schedule_continues_from_it(tmp_path: Path) -> None:
    found = leg(tmp_path, 10, {4: [("set", {"learning_rate": 0.003})]})
    assert found[4] == 0.003
    close(found, linear(10)[:4] + [rate * 0.003 / 0.006 for rate in linear(10)[4:]])


def test_a_resume_keeps_it_and_reports_no_change(tmp_path: Path) -> None:
    """In a new process, as here in a new trainer: the optimizer's state has it."""
    leg(tmp_path, 10, {4: [("set", {"learning_rate": {"factor": 0.5}})]}, stop=6)
    reports: list[Any] = []
    trainer = small_trainer(
        tmp_path,
        Listener({"on_load": lambda ctx: reports.append(ctx.report.changes)}),
        model=Line(),
        max_steps=10,
        length=80,
        save_steps=100,
    )
    trainer.train()
    assert reports == [[]]
    close([float(trainer._parts.optimizer.param_groups[0]["initial_lr"])], [0.005])


def test_a_later_change_in_the_script_takes_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leg(tmp_path, 10, {4: [("set", {"learning_rate": {"factor": 0.5}})]}, stop=6)
    caplog.set_level("INFO")
    found = leg(tmp_path, 10, learning_rate=0.02)
    close(found, linear(10, 0.02)[6:])
    assert "learning_rate: the script's new value takes effect" in caplog.text


def test_raised_max_steps_reshape_the_default_schedule(tmp_path: Path) -> None:
    """As if the script had raised it."""
    found = leg(tmp_path / "command", 10, {4: [("set", {"max_steps": 20})]})
    close(found, linear(10)[:4] + linear(20)[4:])
    leg(tmp_path / "script", 10, stop=4)
    assert found[4:] == leg(tmp_path / "script", 20)


def test_a_rate_in_a_tensor_with_a_dimension_is_set_too(tmp_path: Path) -> None:
    """Torch's optimizers take a rate of shape (1,) as well as one of shape ()."""

    def make(model: Line) -> dict[str, Any]:
        return {"optimizer": AdamW(model.parameters(), lr=torch.tensor([0.01]))}

    found = leg(tmp_path, 10, {4: [("set", {"max_steps": 20})]}, make=make)
    close(found, linear(10)[:4] + linear(20)[4:])


def test_max_steps_at_or_below_the_present_step_finish_the_run(tmp_path: Path) -> None:
    assert len(leg(tmp_path, 10, {4: [("set", {"max_steps": 2})]})) == 4
    run = small_trainer(tmp_path, model=Line(), max_steps=10, length=80, save_steps=100)
    result = run.train()
    assert (result.reason, result.global_step) == ("finished", 4)
    assert result.checkpoint is not None
    assert run.args.max_steps == 10  # the script's own settings are as they were
    assert leg(tmp_path, 12) == pytest.approx(linear(12)[4:])  # until the script changes its value


def test_the_users_schedule_continues_scaled_and_survives_a_resume(tmp_path: Path) -> None:
    def make(model: Any) -> dict[str, Any]:
        optimizer = SGD(model.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": schedules.ExponentialLR(optimizer, 0.9)}

    commands: Commands = {3: [("set", {"learning_rate": 0.05})]}
    found = leg(tmp_path, 10, commands, make=make, stop=6) + leg(tmp_path, 10, make=make)
    close(found, [0.1, 0.09, 0.081] + [0.05 * 0.9**step for step in range(7)])


def test_without_a_schedule_the_rate_stays(tmp_path: Path) -> None:
    model = Line()
    optimizer = SGD(model.parameters(), lr=0.1)
    data = [{"x": torch.ones(2, 8), "y": torch.ones(2, 1)}] * 6
    args = ds.TrainingArguments(tmp_path, max_steps=6, logging_steps=0, save_steps=0, use_cpu=True)
    found = []
    with ds.Run(args, model=model, optimizer=optimizer, loader=data) as run:
        for number, batch in enumerate(run.batches()):
            if number == 2:
                run.commands.submit("set", {"learning_rate": {"factor": 2}}, by="me")
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            found.append(optimizer.param_groups[0]["lr"])
            run.step_end(loss=loss)
    assert found == [0.1, 0.1, 0.1, 0.2, 0.2, 0.2]


class Absolute:
    """A schedule of the user's own, with rates of its own."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_schedule_that_cannot_be_scaled_is_refused_at_once(tmp_path: Path) -> None:
    def make(model: Any) -> dict[str, Any]:
        optimizer = SGD(model.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": Absolute(optimizer)}

    with pytest.raises(ds.ConfigurationError, match="Absolute has no base_lrs"):
        leg(tmp_path, 3, {2: [("set", {"learning_rate": 0.05})]}, make=make)
    assert not (tmp_path / "control.jsonl").exists()


def test_no_factor_leads_away_from_zero(tmp_path: Path) -> None:
    """At the end of the decay. The command is answered, and the run ends as usual."""
    client = Client({10: [("set", {"learning_rate": 0.1})]})
    small_trainer(tmp_path, client, model=Line(), max_steps=10, length=80).train()
    outcome = client.tickets[0].wait(0)
    assert outcome is not None
    assert outcome.step is None
    assert "after step 10 the schedule's value is 0" in str(outcome.error)
