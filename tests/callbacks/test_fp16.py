"""Under fp16 the loss is scaled up, so that small gradients survive; whoever looks at gradients sees them unscaled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import dalsegno as ds
from callbacks.grad_norm_ranks import Uneven
from callbacks.layouts import numbers, sentences
from dalsegno.callbacks import (
    ComputeNorm,
    GradHistogram,
    GradNormLogger,
    JsonLogger,
    LearningDynamics,
    NaNChecker,
    ScaleLoss,
)
from dalsegno.logs import read_records
from dalsegno.testing import run_ranks, tiny_regression_data
from support.listeners import Listener
from support.models import Line
from support.small import small_trainer

SCALE = 2.0**16
"""What a gradient scaler begins with."""

Build = Callable[[], Sequence[ds.Callback]]

OBSERVERS: dict[str, tuple[Build, str, str]] = {
    "GradNormLogger": (lambda: [GradNormLogger()], "gradient_norms.jsonl", "norms"),
    "ComputeNorm": (lambda: [ComputeNorm(per_layer=True)], "train.jsonl", "grad_norm_unclipped"),
    "LearningDynamics": (lambda: [LearningDynamics(every=1)], "learning_dynamics.jsonl", "update_ratios"),
    "the trainer's own": (list, "train.jsonl", "grad_norm"),
}


def one_step(output_dir: Path, build: Build, **settings: Any) -> None:
    """Under plain gradient descent, where the size of gradients shows. The loss is so small that no scale overflows."""
    torch.manual_seed(0)
    model = Uneven()
    parts = {"train_dataset": sentences(), "eval_dataset": sentences(4), "optimizer": SGD(model.parameters(), lr=0.1)}
    schedule = {"max_steps": 1, "logging_steps": 1, "eval_steps": 1, "lr_scheduler_type": "constant"}
    own = [JsonLogger(), ScaleLoss(2.0**-8), *build()]
    small_trainer(output_dir, *own, model=model, parts=parts, max_grad_norm=0, **schedule, **settings).train()


def values(output_dir: Path, log: str) -> dict[str, float]:
    """What the first record of that log says."""
    records = [record for record in read_records(output_dir / "logs" / log) if "kind" not in record]
    return dict(numbers(records[0]))


@pytest.mark.parametrize("name", OBSERVERS)
def test_the_same_as_without_a_scale(tmp_path: Path, name: str) -> None:
    build, log, title = OBSERVERS[name]
    one_step(tmp_path / "fp32", build)
    one_step(tmp_path / "fp16", build, fp16=True)
    plain, seen = values(tmp_path / "fp32", log), values(tmp_path / "fp16", log)
    chosen = [place for place in plain if title in place]
    assert chosen
    assert [seen[place] for place in chosen] == pytest.approx([plain[place] for place in chosen], rel=0.02)


def everything() -> Sequence[ds.Callback]:
    return [callback for build, _, _ in OBSERVERS.values() for callback in build()]


def in_fp16(output_dir: Path, layout: str) -> None:
    one_step(output_dir, everything, fp16=True, parallel=layout, per_device_train_batch_size=2)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_on_two_ranks_too(tmp_path: Path, layout: str) -> None:
    one_step(tmp_path / "fp32", everything)
    run_ranks(in_fp16, 2, tmp_path / "fp16", layout)
    for _, log, title in OBSERVERS.values():
        plain, seen = values(tmp_path / "fp32", log), values(tmp_path / "fp16", log)
        chosen = [place for place in plain if title in place]
        assert [seen[place] for place in chosen] == pytest.approx([plain[place] for place in chosen], rel=0.02)


def test_histograms_are_not_moved(tmp_path: Path) -> None:
    """Scaled, every entry would lie 16 bins higher."""

    def middles(output_dir: Path, **settings: Any) -> dict[str, float]:
        one_step(output_dir, lambda: [GradHistogram(every=1)], **settings)
        (record,) = read_records(output_dir / "logs/grad_histograms.jsonl")
        return {
            name: sum(number * count for number, count in enumerate(counts)) / max(1, sum(counts))
            for name, counts in record["counts"].items()
        }

    assert middles(tmp_path / "fp16", fp16=True) == pytest.approx(middles(tmp_path / "fp32"), abs=1.5)


def test_what_a_handler_sees(tmp_path: Path) -> None:
    """From on_gradients_ready to on_optimizer_step; and in the hook of the optimizer."""
    seen: dict[str, list[Tensor]] = {}
    model = Line()

    def see(where: str) -> Callable[..., None]:
        return lambda *_: seen.update({where: [each.grad.clone() for each in model.parameters()]})

    def hook(ctx: Any) -> None:
        ctx.optimizer.register_step_pre_hook(see("hook"))

    names = ("on_after_backward", "on_gradients_ready", "on_pre_optimizer_step", "on_optimizer_step")
    listener = Listener({**{name: see(name) for name in names}, "on_train_begin": hook})
    small_trainer(tmp_path, ScaleLoss(2.0**-8), listener, model=model, fp16=True, max_grad_norm=0, max_steps=1).train()
    scaled = seen.pop("on_after_backward")
    assert len(seen) == 4
    for gradients in seen.values():
        torch.testing.assert_close([each * SCALE for each in gradients], scaled)


class Steep(Line):
    """Its gradients are too large for fp16 once they are scaled up, and fine by themselves."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layer(x) * 10, y * 10)


def test_a_step_that_the_scaler_skips_is_no_alarm(tmp_path: Path) -> None:
    skipped: list[int] = []
    note = Listener({"on_step_skipped": lambda ctx: skipped.append(ctx.state.global_step)})
    trainer = small_trainer(tmp_path, NaNChecker(), note, model=Steep(), fp16=True, max_steps=12, logging_steps=1)
    result = trainer.train()
    assert skipped
    assert (result.reason, result.global_step) == ("finished", 12)


def test_a_step_that_the_scaler_skips_is_marked(tmp_path: Path) -> None:
    """Neither no norms nor updates of zero."""
    skipped: list[int] = []
    note = Listener({"on_step_skipped": lambda ctx: skipped.append(ctx.state.global_step + 1)})
    own = [GradNormLogger(), LearningDynamics(every=1), note]
    settings = {"max_steps": 12, "eval_steps": 1, "fp16": True}
    parts = {"eval_dataset": tiny_regression_data(4)}
    small_trainer(tmp_path, *own, model=Steep(), parts=parts, **settings).train()
    assert 0 < len(skipped) < 12
    for log, title in (("gradient_norms", "norms"), ("learning_dynamics", "update_ratios")):
        records = list(read_records(tmp_path / "logs" / f"{log}.jsonl"))
        assert [each["global_step"] for each in records if each.get("skipped")] == skipped
        assert all(("skipped" in each) != (title in each) for each in records)


class Broken(Line):
    """The derivative of its square root at zero is infinite, whatever the scale."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.sqrt((self.layer(x) * 0).abs()).mean()


@pytest.mark.parametrize(("fp16", "steps"), [(False, 1), (True, 21)])
def test_a_gradient_that_is_not_finite_at_any_scale_is_one(tmp_path: Path, fp16: bool, steps: int) -> None:
    result = small_trainer(
        tmp_path, NaNChecker(), model=Broken(), max_steps=40, logging_steps=1, max_grad_norm=0, fp16=fp16
    ).train()
    assert (result.reason, result.global_step) == ("aborted", steps)
    assert str(result.why).startswith(f"the gradient of the output of layer is not finite, first in step {steps}")
