"""mini_trainer's observers: its counts, its context, its numbers of a step. All else is as with InstructLab's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dalsegno as ds
from interop.mini_trainer.example import base
from interop.script import play
from support.listeners import Listener
from support.small import ByteLines, small_trainer

HOOKS = (
    "train_begin epoch_begin step_begin before_forward after_backward pre_optimizer_step optimizer_step log evaluate"
)
HOOKS += " save step_end epoch_end train_end"


def journal() -> Any:
    """A callback that keeps every context it is given."""

    class Journal(base()):  # type: ignore[misc]
        def __init__(self) -> None:
            self.contexts: list[Any] = []
            for name in HOOKS.split():
                setattr(self, f"on_{name}", self.contexts.append)

    return Journal()


def at(callback: Any, name: str, number: int) -> Any:
    return next(each for each in callback.contexts if each.hook_name == f"on_{name}" and each.step == number)


def test_steps_and_epochs_are_counted_as_mini_trainer_does(tmp_path: Path) -> None:
    """A step from its update on, an epoch in its end."""
    callback = journal()
    play(tmp_path, callback)
    seen = [(each.hook_name.removeprefix("on_"), each.step, each.epoch) for each in callback.contexts]
    passes = ["before_forward", "after_backward"]

    def step(number: int, epoch: int, count: int, *boundary: str) -> list[tuple[str, int, int]]:
        begun = [(name, number - 1, epoch) for name in ["step_begin", *passes * count]]
        return begun + [
            (name, number, epoch) for name in ["pre_optimizer_step", "optimizer_step", *boundary, "step_end"]
        ]

    first = [*step(1, 0, 2), *step(2, 0, 2, "log"), *step(3, 0, 1, "evaluate"), ("epoch_end", 3, 1)]
    second = [*step(4, 1, 2, "log"), ("save", 4, 1), *step(5, 1, 2), *step(6, 1, 1, "log", "evaluate")]
    second += [("epoch_end", 6, 2), ("save", 6, 2)]
    assert seen == [
        *[("train_begin", 0, 0), ("epoch_begin", 0, 0), *first],
        *[("epoch_begin", 3, 1), *second, ("train_end", 6, 2)],
    ]


@pytest.mark.parametrize(("max_steps", "mode"), [(2, "step"), (-1, "epoch")])
def test_its_fields_are_those_of_mini_trainer(tmp_path: Path, max_steps: int, mode: str) -> None:
    callback = journal()
    play(tmp_path, callback, max_steps=max_steps)
    begin = callback.contexts[0]
    names = "hook_name step epoch total_samples total_tokens loss learning_rate grad_norm batch_metrics val_metrics"
    names += " checkpoint_path output_dir model_name_or_path training_mode max_epochs max_steps max_tokens world_size"
    names += " is_local_process_zero is_world_process_zero"
    assert [field.name for field in dataclasses.fields(begin)] == names.split()
    assert (begin.training_mode, begin.max_epochs, begin.max_steps, begin.max_tokens) == (mode, 2, max(max_steps, 0), 0)


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Embedding(32, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Both: (batch, sequence)."""
        return nn.functional.cross_entropy(self.head(input_ids).flatten(0, 1), labels.flatten())


def test_the_numbers_of_a_step(tmp_path: Path) -> None:
    callback, rates = journal(), {}
    note = Listener(
        {"on_train_metrics": lambda ctx: rates.update({ctx.state.global_step: ctx.metrics["learning_rate"]})}
    )
    parts = {"train_dataset": ByteLines(), "eval_dataset": ByteLines()}
    settings = {"max_steps": 2, "gradient_accumulation_steps": 2, "eval_steps": 2}
    small_trainer(tmp_path, callback, note, model=Speaker(), parts=parts, **settings).train()
    end = at(callback, "step_end", 2)
    assert end.learning_rate == rates[2] == at(callback, "pre_optimizer_step", 2).learning_rate, "of its own update"
    numbers, seconds = end.batch_metrics, end.batch_metrics["time_per_batch"]
    assert numbers == {
        "step": 2,
        "epoch": 0,
        "steps_per_epoch": None,
        "lr": rates[2],
        "grad_norm": end.grad_norm,
        "loss": end.loss,
        "avg_loss_backward": end.loss / 2,
        "num_samples": 8,
        "num_loss_counted_tokens": 128,
        "batch_num_loss_counted_tokens": 128,
        "num_total_tokens": 128,
        "grad_accum": 2,
        "avg_time_per_minibatch": seconds / 2,
        "time_per_batch": seconds,
        "tokens_per_second": 128 / seconds,
        "total_samples_accumulated": 16,
        "total_tokens_accumulated": 256,
        "samples_per_second": 8 / seconds,
        "peak_memory_usage_GB": None,
        "val_loss": at(callback, "evaluate", 2).val_metrics["val_loss"],
    }
    assert at(callback, "pre_optimizer_step", 2).batch_metrics == {}


def test_a_manager_removes_all_of_a_class(tmp_path: Path) -> None:
    from dalsegno.interop.mini_trainer import CallbackManager

    first, other = journal(), type("Other", (base(),), {})()
    manager = CallbackManager()
    for each in (first, other, ds.adapt(journal(), name="second")):
        manager.add_callback(each)
    manager.remove_callback(other)
    assert [ds.adapt(each).key for each in manager] == ["Journal", "second"]
    small_trainer(tmp_path, manager, max_steps=1).train()
    assert first.contexts
    manager.remove_callback(type(first))
    assert len(manager) == 1, "the adapted one is not of this class"
    manager.remove_callback(ds.Callback)
    assert manager == []
