"""What a hand-written loop does that no checkpoint contains is said; what resumes exactly is not."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import dalsegno as ds
from dalsegno.data import NOT_EXACT
from dalsegno.testing import TinyRegression, tiny_regression_data
from support.small import small_trainer


class Counter:
    total = 0

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.total = state["total"]


class Loop:
    """A healthy one. Each subclass does one thing otherwise; what it counts on is part of its loss."""

    settings: dict[str, Any] = {}

    def __init__(self, folder: Path, **settings: Any) -> None:
        torch.manual_seed(0)
        quiet = {"logging_steps": 0, "eval_steps": 0, "save_steps": 4, "max_steps": 12}
        self.args = ds.TrainingArguments(folder, **{**quiet, "disable_tqdm": True, **self.settings, **settings})
        self.model = TinyRegression()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler: Any = LambdaLR(self.optimizer, lambda step: 0.8**step)
        self.counter = Counter()
        self.loader = DataLoader(tiny_regression_data(200), batch_size=4, shuffle=True)

    def given(self) -> dict[str, Any]:
        return {"lr_scheduler": self.scheduler, "state": {"counter": self.counter}}

    def train(self, stop: int | None = None) -> Any:
        run = ds.Run(
            self.args, **{"model": self.model, "optimizer": self.optimizer, "loader": self.loader, **self.given()}
        )
        with run:
            for batch in run.batches():
                run.step_end(self.step(batch))
                self.behind(run)
                if run.state.global_step == stop:
                    break
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.loss(batch)
        loss.backward()
        self.update()
        self.scheduler.step()
        self.counter.total += 1
        return loss

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch)
        return loss * (1 + self.counter.total)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def behind(self, run: ds.Run) -> None: ...


# -- what differs ------------------------------------------------------------------------------------------------------


class LateUpdate(Loop):
    """Steps the optimizer behind ``step_end``."""

    def update(self) -> None: ...

    def behind(self, run: ds.Run) -> None:
        super().update()


class LateSchedule(Loop):
    def step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.loss(batch)
        loss.backward()
        self.update()
        return loss

    def behind(self, run: ds.Run) -> None:
        self.scheduler.step()


class LateCounter(Loop):
    def behind(self, run: ds.Run) -> None:
        self.counter.total += 1


class LateDraw(Loop):
    def behind(self, run: ds.Run) -> None:
        torch.rand(1)


class Carrying(Loop):
    """Empties the gradients at every third step."""

    def update(self) -> None:
        self.optimizer.step()
        if self.counter.total % 3 == 2:
            self.optimizer.zero_grad()


class TwoModels(Loop):
    """The second one is trained too, and scales the loss of the first."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.critic = nn.Linear(8, 1)
        self.second = torch.optim.AdamW(self.critic.parameters(), lr=0.1)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        mistake = (self.critic(batch["x"]) - batch["y"]).square().mean()
        mistake.backward()  # type: ignore[no-untyped-call]
        self.second.step()
        self.second.zero_grad()
        return super().loss(batch) * mistake.detach()


class WithoutSecondOptimizer(TwoModels):
    def given(self) -> dict[str, Any]:
        return {**super().given(), "state": {"counter": self.counter, "critic": self.critic}}


class ForgottenSchedule(Loop):
    def given(self) -> dict[str, Any]:
        return {"state": {"counter": self.counter}}


class ForgottenScaler(Loop):
    """Its scale grows every third step, and clips the gradients."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=3)

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.loss(batch)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 20.0)  # before unscale_, so the scale matters
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss


class ForgottenAverage(Loop):
    """The average is pulled towards the model, and the model towards the average."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.average = AveragedModel(self.model)

    @torch.no_grad()
    def update(self) -> None:
        super().update()
        self.average.update_parameters(self.model)
        for mean, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
            parameter.lerp_(mean, 0.1)


class LeavesEvaluation(Loop):
    settings = {"eval_steps": 2}

    def given(self) -> dict[str, Any]:
        return {**super().given(), "evaluate": self.evaluate}

    def evaluate(self) -> dict[str, float]:
        self.model.eval()
        return {"eval_loss": 1.0}


SAID: dict[type[Loop], str] = {
    LateUpdate: "behind run.step_end() of step 4, whose checkpoint contains the state before: AdamW steps",
    LateSchedule: "contains the state before: lr_scheduler (LambdaLR) changes",
    LateCounter: 'contains the state before: state["counter"] changes',
    LateDraw: "contains the state before: the state of torch's random generator changes",
    Carrying: "the gradients of step 1 are still there when step 2 adds its own",
    TwoModels: "this loop trains with AdamW, which no checkpoint contains",
    WithoutSecondOptimizer: "this loop trains with AdamW, which no checkpoint contains",
    ForgottenSchedule: "this loop trains with LambdaLR, which no checkpoint contains",
    ForgottenScaler: "this loop trains with GradScaler, which no checkpoint contains",
    ForgottenAverage: "this loop trains with AveragedModel, which no checkpoint contains",
    LeavesEvaluation: "evaluate= has left the model in evaluation mode, and step 3 is trained in it",
}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if getattr(record, NOT_EXACT, False)]


def is_exact(folder: Path, kind: type[Loop]) -> bool:
    whole = kind(folder / "whole").train()
    kind(folder / "parts").train(8)
    return all(map(torch.equal, whole, kind(folder / "parts").train()))


@pytest.mark.parametrize("kind", SAID)
def test_what_a_checkpoint_misses_is_said_once(
    kind: type[Loop], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind(tmp_path).train()
    (warning,) = said(caplog)
    assert SAID[kind] in warning
    caplog.clear()
    if kind is not LeavesEvaluation:  # the checkpoint contains the mode; it is the wrong one all the same
        assert not is_exact(tmp_path, kind), "else the warning is not true"


def test_a_log_record_behind_the_step_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class LateRecord(Loop):
        def behind(self, run: ds.Run) -> None:
            run.log({"note": 1.0})

    LateRecord(tmp_path).train()
    (warning,) = said(caplog)
    assert "run.log() is called" in warning


def test_it_is_said_of_a_loop_that_is_left_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its only checkpoint is taken while it leaves, in the step that a signal or a command ends."""

    class Stopped(LateCounter):
        def step(self, batch: dict[str, Tensor]) -> Tensor:
            loss = super().step(batch)
            if self.counter.total >= 5:
                self.stop()
            return loss

    loop = Stopped(tmp_path, save_steps=0)
    run = ds.Run(loop.args, model=loop.model, optimizer=loop.optimizer, loader=loop.loader, **loop.given())
    loop.stop = lambda: run.stop("enough")  # type: ignore[attr-defined]
    with run:
        for batch in run.batches():
            run.step_end(loop.step(batch))
            loop.behind(run)
    (warning,) = said(caplog)
    assert 'state["counter"] changes' in warning


# -- what is exact -----------------------------------------------------------------------------------------------------


class EmptiesFirst(Loop):
    """As torch's tutorials do: between forward and backward."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(batch)
        self.optimizer.zero_grad()
        return loss

    def update(self) -> None:
        self.optimizer.step()


class EmptiesInPlace(EmptiesFirst):
    """The gradients stay the same tensors."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss = Loop.loss(self, batch)
        self.optimizer.zero_grad(set_to_none=False)
        return loss


class SavesBoth(TwoModels):
    def given(self) -> dict[str, Any]:
        state = {"counter": self.counter, "critic": self.critic, "second": self.second}
        return {**super().given(), "state": state}


class TwoInAList(SavesBoth):
    """Under AMP, as docs/guides/own-loop.md has it, each with a schedule of its own; the first has one group more."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        first, *rest = self.model.parameters()
        self.optimizer = torch.optim.AdamW([{"params": [first], "lr": 0.02}, {"params": rest}], lr=0.01)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 0.8**step)
        self.of_second = LambdaLR(self.second, lambda step: 0.9**step)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)

    def given(self) -> dict[str, Any]:
        state = {"counter": self.counter, "critic": self.critic, "scaler": self.scaler}
        schedules = [self.scheduler, self.of_second]
        return {"optimizer": [self.optimizer, self.second], "lr_scheduler": schedules, "state": state}

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        mistake = (self.critic(batch["x"]) - batch["y"]).square().mean()
        loss: Tensor = self.model(**batch) * mistake.detach()
        for each, optimizer in ((mistake, self.second), (loss, self.optimizer)):
            self.scaler.scale(each).backward()  # type: ignore[no-untyped-call]
            self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        self.scheduler.step()
        self.of_second.step()
        return loss


class Bundle:
    """What a user saves as one."""

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


class SavesABundle(TwoModels):
    def given(self) -> dict[str, Any]:
        bundle = Bundle(counter=self.counter, critic=self.critic, second=self.second)
        return {**super().given(), "state": {"bundle": bundle}}


class SavesScaler(ForgottenScaler):
    def given(self) -> dict[str, Any]:
        return {**super().given(), "state": {"counter": self.counter, "scaler": self.scaler}}


class SchedulesInTurn(Loop):
    """Of the three schedules, the run knows the outer one."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        parts = [LinearLR(self.optimizer, 0.1, total_iters=3), LambdaLR(self.optimizer, lambda step: 0.8**step)]
        self.scheduler = SequentialLR(self.optimizer, parts, [3])


class SetsItsMode(LeavesEvaluation):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        self.model.train()
        return super().loss(batch)


class ProbesInItsEvaluation(LeavesEvaluation):
    """Trains a model of its own there, with the random numbers that are there for it."""

    def evaluate(self) -> dict[str, float]:
        probe = nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(probe.parameters())
        for _ in range(3):
            probe(torch.ones(1, 8)).sum().backward()
            optimizer.step()
        return {"eval_loss": probe.bias.item()}


class InnerLoop(Loop):
    """A copy and an optimizer for each step."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        fast = TinyRegression()
        fast.load_state_dict(self.model.state_dict())
        inner = torch.optim.AdamW(fast.parameters())
        fast(**batch).backward()
        inner.step()
        return super().loss(batch)


class EndsEpochs(Loop):
    """Behind an epoch's last step, whose checkpoint is taken when the next batch is asked for."""

    settings = {"save_strategy": "epoch", "max_steps": 20}

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.loader = DataLoader(tiny_regression_data(32), batch_size=4, shuffle=True)

    def behind(self, run: ds.Run) -> None:
        if run.state.global_step % 8 == 0:
            self.counter.total += 1


@pytest.mark.parametrize(
    "kind",
    [
        Loop,
        EmptiesFirst,
        EmptiesInPlace,
        SavesBoth,
        TwoInAList,
        SavesABundle,
        SavesScaler,
        SchedulesInTurn,
        SetsItsMode,
        ProbesInItsEvaluation,
        InnerLoop,
        EndsEpochs,
    ],
)
def test_a_loop_that_resumes_exactly_is_not_warned(
    kind: type[Loop], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert is_exact(tmp_path, kind)
    assert said(caplog) == []


class HalfTrained(Loop):
    def given(self) -> dict[str, Any]:
        return {**super().given(), "optimizer": torch.optim.SGD([*self.model.parameters()][:2], lr=0.01)}


class IgnoresSettings(Loop):
    settings = {"bf16": True, "max_grad_norm": 0.5}


FORGOTTEN: dict[type[Loop], str] = {
    WithoutSecondOptimizer: "critic.weight and 1 more: trainable parameters that no optimizer of the run has",
    HalfTrained: "layers.3.weight and 1 more: trainable parameters that no optimizer of the run has",
    ForgottenSchedule: r"AdamW has a schedule \(initial_lr in its groups\), and the run does not",
    IgnoresSettings: "bf16=True, max_grad_norm=0.5: has no effect on a loop of your own",
}


@pytest.mark.parametrize("kind", [*FORGOTTEN, Loop, SavesBoth, SavesABundle, TwoInAList])
def test_what_is_forgotten_is_said_before_the_first_step(
    kind: type[Loop], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = kind(tmp_path)
    ds.Run(loop.args, **{"model": loop.model, "optimizer": loop.optimizer, "loader": loop.loader, **loop.given()})
    found = [each for each in caplog.messages if "the run" in each or "no effect" in each]
    assert len(found) == (kind in FORGOTTEN)
    assert all(re.match(FORGOTTEN[kind], each) for each in found)


def test_a_second_optimizer_needs_its_parameters_in_the_run(tmp_path: Path) -> None:
    loop = TwoModels(tmp_path)
    given = {"model": loop.model, "loader": loop.loader, "lr_scheduler": loop.scheduler}
    with pytest.raises(
        ds.ConfigurationError, match=r"'optimizer_1': .*no checkpoint of this run would contain|is the model's"
    ):
        ds.Run(loop.args, optimizer=[loop.optimizer, loop.second], **given)


# -- weights of a leg that failed --------------------------------------------------------------------------------------


class Fails(Loop):
    fails_at = 0

    def behind(self, run: ds.Run) -> None:
        if run.state.global_step == self.fails_at:
            raise ZeroDivisionError


def test_a_run_that_begins_with_the_weights_of_a_failed_one_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a notebook whose cell is run again."""
    first, again, third = Fails(tmp_path), Loop(tmp_path), Loop(tmp_path / "other")
    first.fails_at = 2
    with pytest.raises(ZeroDivisionError):
        first.train()
    assert said(caplog) == []
    for loop in (again, third):
        loop.model = first.model
        loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=0.01)
        loop.scheduler = LambdaLR(loop.optimizer, lambda step: 0.8**step)
        loop.train()
    (warning,) = said(caplog)  # the last one begins with weights of a checkpoint
    assert f"no checkpoint contains, left in this model by step 2 of the run in {tmp_path}" in warning


def test_a_run_that_begins_with_the_weights_of_a_stopped_one_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a script that trains first on one dataset, then on another."""

    def end(ctx: Any) -> None:
        if ctx.step == 2:
            signal.raise_signal(signal.SIGTERM)

    model = TinyRegression()
    small_trainer(tmp_path / "first", ds.on(ds.Event.STEP_END, end), model=model, max_steps=4, save_steps=2).train()
    small_trainer(tmp_path / "second", model=model, max_steps=4, save_steps=2).train()
    (warning,) = said(caplog)
    assert f"weights of step 2, at which the run in {tmp_path / 'first'} was stopped (SIGTERM)" in warning
    caplog.clear()
    small_trainer(tmp_path / "first", model=model, max_steps=4, save_steps=2).train()
    small_trainer(tmp_path / "third", model=model, max_steps=4, save_steps=2).train()
    assert said(caplog) == []  # it had come to its end


def test_a_trainer_says_it_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(ctx: Any) -> None:
        if ctx.step == 2:
            raise ZeroDivisionError

    model = TinyRegression()
    with pytest.raises(ZeroDivisionError):
        small_trainer(tmp_path, ds.on(ds.Event.STEP_END, fail), model=model, max_steps=4).train()
    small_trainer(tmp_path, model=model, max_steps=4).train()
    (warning,) = said(caplog)
    assert "left in this model by step 2" in warning
