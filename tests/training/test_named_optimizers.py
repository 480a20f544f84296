"""``optim=``: the optimizer that a name stands for, with weight decay on matrices only, and resumed exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, NAdam, Optimizer, RMSprop

import dalsegno as ds
from dalsegno.testing import TinyRegression, tiny_regression_data
from support.resumed import assert_resumes
from support.small import small_trainer, weights

Build = Callable[[Iterable[Any]], Optimizer]

NAMED: dict[str, tuple[dict[str, Any], Build]] = {
    "adamw": (
        {"adam_beta1": 0.8, "adam_epsilon": 1e-6},
        lambda groups: AdamW(groups, lr=0.01, betas=(0.8, 0.999), eps=1e-6),
    ),
    "adamw_fused": ({}, lambda groups: AdamW(groups, lr=0.01, fused=True)),
    "adafactor": ({"optim_args": {"d": 2.0}}, lambda groups: Adafactor(groups, lr=0.01, d=2.0)),
    "sgd": (
        {"optim_args": {"momentum": 0.9, "nesterov": True}},
        lambda groups: SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    ),
    "adam": ({"adam_beta2": 0.9}, lambda groups: Adam(groups, lr=0.01, betas=(0.9, 0.9))),
    "rmsprop": ({"optim_args": {"momentum": 0.9}}, lambda groups: RMSprop(groups, lr=0.01, momentum=0.9)),
    "nadam": ({}, lambda groups: NAdam(groups, lr=0.01)),
    "torch.optim:RMSprop": ({"optim_args": {"alpha": 0.9}}, lambda groups: RMSprop(groups, lr=0.01, alpha=0.9)),
}
STEPS = 5


def by_hand(build: Build) -> dict[str, torch.Tensor]:
    """A plain loop over the whole data at once, without dropout."""
    torch.manual_seed(0)
    model = TinyRegression().eval()
    matrices = [each for each in model.parameters() if each.ndim == 2]
    vectors = [each for each in model.parameters() if each.ndim < 2]
    optimizer = build([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])
    data = tiny_regression_data(4)
    batch = [torch.stack([data[index][name] for index in range(4)]) for name in ("x", "y")]
    for _ in range(STEPS):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("name", NAMED)
def test_a_name_builds_the_optimizer_of_a_plain_loop(tmp_path: Path, name: str) -> None:
    settings, build = NAMED[name]

    def trainer(output_dir: Path, *more: ds.Callback) -> ds.Trainer:
        torch.manual_seed(0)
        model = TinyRegression()
        model.layers[2].p = 0.0
        return small_trainer(
            output_dir,
            *more,
            model=model,
            length=4,
            parts={"data_collator": in_order},
            optim=name,
            weight_decay=0.1,
            max_steps=STEPS,
            max_grad_norm=0,
            lr_scheduler_type="constant",
            save_steps=100,
            **settings,
        )

    last = assert_resumes(trainer, tmp_path, 2)
    for key, expected in by_hand(build).items():
        torch.testing.assert_close(weights(last)[key], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NAMED)
def test_a_named_optimizer_resumes_under_a_schedule(tmp_path: Path, name: str) -> None:
    def trainer(output_dir: Path, *more: ds.Callback) -> ds.Trainer:
        return small_trainer(output_dir, *more, optim=name, max_steps=STEPS, save_steps=100, **NAMED[name][0])

    assert_resumes(trainer, tmp_path, 2)


class Wide(nn.Module):
    """Has a matrix that is large enough to be quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 1)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return ((x - y) ** 2).mean()


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_4bit", "adamw_fp8"])
def test_an_optimizer_of_torchao_resumes(tmp_path: Path, name: str) -> None:
    def trainer(output_dir: Path, *more: ds.Callback) -> ds.Trainer:
        torch.manual_seed(0)
        return small_trainer(output_dir, *more, model=Wide(), optim=name, max_steps=STEPS, save_steps=100)

    with torch.compiler.set_stance("force_eager"):  # its kernels take 20 s to compile
        last = assert_resumes(trainer, tmp_path, 2)
    state = last._parts.optimizer.state[last.model.layers[1].weight]["exp_avg"]  # type: ignore[index, union-attr]
    assert type(state).__module__.startswith("torchao.")


@pytest.mark.parametrize("name", ["adadelta", "adagrad", "adamax", "asgd", "radam"])
def test_the_others_of_torch_are_built_by_name(tmp_path: Path, name: str) -> None:
    optimizer = small_trainer(tmp_path, optim=name, weight_decay=0.1)._parts.optimizer
    assert type(optimizer).__name__.lower() == name
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def in_order(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch that does not depend on the order of its samples."""
    samples = sorted(samples, key=lambda sample: float(sample["x"][0]))
    return {name: torch.stack([sample[name] for sample in samples]) for name in ("x", "y")}


def test_settings_of_adam_have_no_effect_on_others_and_are_not_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    common = {"optim": "sgd", "save_steps": 100, "lr_scheduler_type": "constant"}
    small_trainer(tmp_path, max_steps=2, **common).train()
    last = small_trainer(tmp_path, max_steps=4, adam_beta1=0.5, **common)
    last.train()
    assert last.state.global_step == 4
    assert "adam_beta1" not in caplog.text


def test_changed_arguments_take_effect_and_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small_trainer(tmp_path, max_steps=2, save_steps=100, optim="sgd", optim_args={"momentum": 0.9}).train()
    caplog.set_level("INFO")
    last = small_trainer(tmp_path, max_steps=4, save_steps=100, optim="sgd", optim_args={"momentum": 0.5})
    last.train()
    assert [group["momentum"] for group in last._parts.optimizer.param_groups] == [0.5, 0.5]
    assert "optim_args: saved {'momentum': 0.9}, now {'momentum': 0.5} (the new value takes effect)" in caplog.text


def test_another_implementation_of_the_same_optimizer_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small_trainer(tmp_path, max_steps=2, save_steps=100).train()
    caplog.set_level("INFO")
    last = small_trainer(tmp_path, max_steps=4, save_steps=100, optim="adamw_fused")
    last.train()
    assert [group["fused"] for group in last._parts.optimizer.param_groups] == [None, None]
    assert "optim: saved adamw, now adamw_fused (the saved implementation" in caplog.text


def test_another_optimizer_is_refused_by_a_checkpoint(tmp_path: Path) -> None:
    small_trainer(tmp_path, max_steps=2, save_steps=100).train()
    with pytest.raises(ds.StateMismatch, match=r"optimizer: saved .*AdamW, now .*SGD"):
        small_trainer(tmp_path, max_steps=4, save_steps=100, optim="sgd").train()


class NotAnOptimizer(nn.Module):
    def __init__(self, groups: object, lr: float) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (
            {"optim": "adamw_torch_fused"},
            "optim= 'adamw_torch_fused'; did you mean 'adamw_fused'?",
        ),
        ({"optim": "sgdd"}, "'sgdd'; did you mean 'sgd'?"),
        ({"optim": "AdamW"}, "unknown optimizer in optim= 'AdamW'; did you mean 'adamw'"),
        ({"optim": "torch.optim:RMSpropp"}, "unknown optimizer of torch.optim 'RMSpropp'; did you mean 'RMSprop'"),
        ({"optim": "no_such_package:Adam"}, "no module 'no_such_package'"),
        ({"optim": "sgd", "optim_args": {"momentun": 0.9}}, "optim='sgd' with .*momentun"),
        ({"optim": f"{__name__}:NotAnOptimizer"}, "builds a NotAnOptimizer, not an optimizer of torch"),
        ({"optim_args": "momentum=0.9"}, "optim_args='momentum=0.9'; needs a dict of arguments"),
        ({"min_lr": 1.0}, "min_lr=1 is over learning_rate=0.01"),
        ({"lr_scheduler_kwargs": {"power": 2}}, "kwargs= of 'linear': 'power'; known: none"),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-5}},
            r"'lr_end'; use TrainingArguments\(min_lr=…\)",
        ),
        (
            {"lr_scheduler_type": "wsd", "lr_scheduler_kwargs": {"decay_type": "root"}},
            r"lr_scheduler_kwargs=\{'decay_type': 'root'\}; needs one of linear, cosine, 1-sqrt",
        ),
        ({"optim": "adamw_torch_8bit"}, "did you mean 'adamw_8bit'"),
        ({"warmup_ratio": 2.0}, "warmup_ratio=2.0; needs a fraction of the run's steps, 0 to 1"),
    ],
)
def test_what_is_refused(tmp_path: Path, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=error):
        small_trainer(tmp_path, max_steps=2, **settings)
