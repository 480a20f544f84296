"""Updates fused into the backward pass: the same weights, bit by bit, and never more than one gradient in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import dalsegno as ds
from dalsegno.callbacks import ComputeNorm, LearningDynamics
from dalsegno.events.table import Event
from dalsegno.logs import read_records
from dalsegno.testing import FaultPlan, assert_resume_equivalent, compare_runs, run_ranks
from support import fused
from support.listeners import Listener
from support.models import Line
from support.small import same, small_trainer, weights

MAY_DIFFER = {"settings", "meter", "callbacks.GradNormLogger", "logs/train.jsonl", "logs/gradient_norms.jsonl"}


def assert_same_run(first: Path, second: Path) -> None:
    """Weights, optimizer state and all else that is saved, bit by bit; what is logged, but for the last digits."""
    compared = compare_runs(first, second)
    assert {"model", "optimizer", "scheduler.0", "rng"} <= {row.what for row in compared.rows}
    assert [row for row in compared.rows if not row.identical and row.what not in MAY_DIFFER] == []
    for log in ("train.jsonl", "gradient_norms.jsonl"):
        mine, yours = (list(read_records(folder / "logs" / log)) for folder in (first, second))
        assert len(mine) == len(yours) > 1
        for a, b in zip(mine, yours, strict=True):
            for key in a.keys() & {"loss", "grad_norm", "max_grad_norm", "learning_rate", "eval_loss", "norms"}:
                assert a[key] == pytest.approx(b[key], rel=1e-5), (log, key)
            assert a.keys() == b.keys()


@pytest.mark.parametrize("optimizer", fused.OPTIMIZERS)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_same_weights_and_state_as_an_ordinary_run(tmp_path: Path, optimizer: str, accumulation: int) -> None:
    how: dict[str, Any] = {"optimizer": optimizer, "gradient_accumulation_steps": accumulation}
    for name, is_fused in (("fused", True), ("ordinary", False)):
        fused.build(tmp_path / name, is_fused, **how).train()
    assert_same_run(tmp_path / "fused", tmp_path / "ordinary")


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_same_in_shards_on_two_ranks(tmp_path: Path, accumulation: int) -> None:
    how = {"gradient_accumulation_steps": accumulation}
    for name, is_fused in (("fused", True), ("ordinary", False)):
        run_ranks(fused.train, 2, tmp_path / name, is_fused, "fsdp", how)
    assert_same_run(tmp_path / "fused", tmp_path / "ordinary")


def test_what_the_last_micro_batch_does_not_reach_is_updated_all_the_same(tmp_path: Path) -> None:
    for name, is_fused in (("fused", True), ("ordinary", False)):
        model = fused.Sometimes()
        fused.build(tmp_path / name, is_fused, model=model, gradient_accumulation_steps=2).train()
    assert_same_run(tmp_path / "fused", tmp_path / "ordinary")


def test_never_more_than_one_gradient_is_there(tmp_path: Path) -> None:
    counts: list[int] = []

    def gradients(ctx: Any) -> int:
        return sum(parameter.grad is not None for parameter in ctx.model.parameters())

    def watch(ctx: Any) -> None:
        ctx.optimizer.register_step_pre_hook(lambda *_: counts.append(gradients(ctx)))

    def look(ctx: Any) -> None:
        assert gradients(ctx) == 0

    trainer = fused.build(tmp_path, True, Listener({"on_train_begin": watch, "on_after_backward": look}))
    trainer.train()
    assert set(counts) == {0, 1}, "0: when the optimizer itself is asked, after the backward pass"
    assert counts.count(1) == 8 * sum(parameter.requires_grad for parameter in trainer.model.parameters())


def test_killed_and_resumed_in_shards(tmp_path: Path) -> None:
    kills = [FaultPlan(event=Event.AFTER_BACKWARD, count=9), FaultPlan(event=Event.OPTIMIZER_STEP, count=2)]
    assert_resume_equivalent(fused.on_two_ranks, kills, world_size=2, folder=tmp_path)


@pytest.mark.parametrize("begins_fused", [True, False])
def test_a_run_may_change_between_the_two(tmp_path: Path, begins_fused: bool) -> None:
    fused.build(tmp_path / "whole", begins_fused).train()
    at_four = Listener({"on_step_end": lambda ctx: ctx.control.stop("half") if ctx.step == 4 else None})
    fused.build(tmp_path / "parts", begins_fused, at_four).train()
    fused.build(tmp_path / "parts", not begins_fused).train()
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_grad_norm": 1.0}, "max_grad_norm=1: the total norm is only known after"),
        ({"max_grad_norm": 0, "fp16": True}, "fp16=True: whether to skip a step"),
    ],
)
def test_settings_that_cannot_work_with_it(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=message):
        ds.TrainingArguments(tmp_path, fuse_optim_with_backward=True, **settings)


def test_ddp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ds.RankFailed, match="DDP keeps all gradients in its buckets"):
        run_ranks(fused.train, 2, tmp_path, True, "auto", {})


@pytest.mark.parametrize(
    ("callback", "event"), [(ComputeNorm(), "on_gradients_ready"), (LearningDynamics(), "on_pre_optimizer_step")]
)
def test_a_callback_that_needs_all_gradients_at_once_is_refused(
    tmp_path: Path, callback: ds.Callback, event: str
) -> None:
    with pytest.raises(ds.EventNotFired, match=f"needs {event}, which fuse_optim_with_backward=True cannot fire"):
        fused.build(tmp_path, True, callback)


class Counting(SGD):
    """Keeps something for all parameters together."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] /= group["k"]
        return super().step(closure)


def test_an_optimizer_that_does_not_treat_each_parameter_by_itself_is_refused(tmp_path: Path) -> None:
    model = Line()
    parts = {"optimizer": Counting(model.parameters(), lr=0.1)}
    trainer = small_trainer(
        tmp_path, model=model, parts=parts, fuse_optim_with_backward=True, max_grad_norm=0, max_steps=1
    )
    with pytest.raises(ds.ConfigurationError, match="Counting changes lr in its step, for all parameters together"):
        trainer.train()


class Wrapping(SGD):
    """Says what another one says."""

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]

    def __init__(self, inner: SGD) -> None:
        self.inner = inner
        self.state = inner.state
        self.defaults = inner.defaults

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_an_optimizer_around_another_is_refused(tmp_path: Path) -> None:
    model = Line()
    parts = {"optimizer": Wrapping(SGD(model.parameters(), lr=0.1)), "lr_scheduler": []}
    with pytest.raises(ds.ConfigurationError, match="Wrapping wraps another optimizer"):
        small_trainer(tmp_path, model=model, parts=parts, fuse_optim_with_backward=True, max_grad_norm=0, max_steps=1)


class Twice(nn.Module):
    """One layer used in two segments, each with a backward pass of its own inside of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return nn.functional.mse_loss(x.sum(1, keepdim=True), y)


def test_a_gradient_in_parts_is_an_error_and_not_two_updates(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, model=Twice(), fuse_optim_with_backward=True, max_grad_norm=0, max_steps=1)
    with pytest.raises(ds.ConfigurationError, match=r"layer\.(weight|bias) gets its gradient in several parts"):
        trainer.train()


def test_a_schedule_finds_its_optimizer_stepping(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """torch warns of a schedule whose optimizer never steps."""
    trainer = fused.build(tmp_path, True)
    before = weights(trainer)
    trainer.train()
    assert not same(before, weights(trainer))
    assert [each for each in recwarn if "lr_scheduler" in str(each.message)] == []


@pytest.mark.parametrize("then_fused", [True, False])
def test_the_model_may_go_on_to_another_trainer(tmp_path: Path, then_fused: bool) -> None:
    """Also one whose training broke off in the middle of a step: no optimizer of before has a hand in it."""

    def fail(ctx: Any) -> None:
        if ctx.state.global_step == 2:
            raise RuntimeError("in the middle of a step")

    model = fused.Uneven()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="in the middle"):
        fused.build(tmp_path / "broken", True, Listener({"on_after_backward": fail}), model=model).train()
    assert not same(before, model.state_dict())
    model.load_state_dict(before)
    fused.build(tmp_path / "second", then_fused, model=model).train()
    other = fused.Uneven()
    other.load_state_dict(before)
    fused.build(tmp_path / "only", then_fused, model=other).train()
    assert same(model.state_dict(), other.state_dict())
