"""ModelMerge: the right means, however the model is spread; saved from a window's first step on, and exported."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dalsegno as ds
from callbacks.grad_norm_ranks import Uneven
from callbacks.layouts import sentences
from dalsegno.callbacks import ModelMerge
from dalsegno.checkpoint import read_tensors
from dalsegno.checkpoint.listing import newest_verified
from dalsegno.distributed import collectives
from dalsegno.events.table import Event
from dalsegno.testing import FaultPlan, assert_resume_equivalent, run_ranks
from support.listeners import Listener
from support.resumed import assert_resumes
from support.small import same, small_trainer, weights


def merging(output_dir: Path, *own: Any, layout: str = "none", **settings: Any) -> ds.Trainer:
    """Four samples a step, a checkpoint every two, eight steps."""
    torch.manual_seed(0)
    how = {"per_device_train_batch_size": 4 // collectives.world_size(), "learning_rate": 0.05, "parallel": layout}
    plan = {"optim": "sgd", "max_steps": 8, "save_steps": 2, "lr_scheduler_type": "constant", **settings}
    parts = {"train_dataset": sentences(), "eval_dataset": sentences(8, seed=1)}
    return small_trainer(output_dir, *own, model=Uneven(), parts=parts, **how, **plan)


def means(output_dir: Path, step: int, key: str = "ModelMerge") -> dict[str, Tensor]:
    return read_tensors(newest_verified(output_dir / f"checkpoints/step-{step:08d}")).get(f"callbacks.{key}", {})


def mean_of(output_dir: Path, steps: list[int]) -> dict[str, Tensor]:
    """Of the weights in these checkpoints, in float64."""
    found = [read_tensors(newest_verified(output_dir / f"checkpoints/step-{step:08d}"))["model"] for step in steps]
    return {name: torch.stack([each[name].double() for each in found]).mean(0) for name in found[0]}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], **limits: float) -> None:
    assert found
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), wanted[name].double(), **(limits or {"rtol": 1e-6, "atol": 1e-8}))


@pytest.mark.parametrize(
    ("how", "steps"),
    [
        ({}, range(1, 9)),
        ({"window": 3}, [6, 7, 8]),
        ({"window": 5, "every": 2}, [4, 6, 8]),
        ({"steps": 6, "window": 2}, [5, 6]),
    ],
    ids=str,
)
def test_the_mean_is_what_its_definition_says(tmp_path: Path, how: dict[str, Any], steps: Any) -> None:
    merging(tmp_path, ModelMerge(**how), save_steps=1).train()
    found = means(tmp_path, 8)
    assert found.keys() == {"embed.weight", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "scale"}
    assert_close(found, mean_of(tmp_path, list(steps)))


def test_there_are_tensors_from_a_windows_first_step_to_the_next_window(tmp_path: Path) -> None:
    merging(tmp_path, ModelMerge([4, 8], window=2), save_steps=1).train()
    assert [bool(means(tmp_path, step)) for step in range(1, 9)] == [False, False] + [True] * 6
    assert_close(means(tmp_path, 4), mean_of(tmp_path, [3, 4]))
    assert same(means(tmp_path, 6), means(tmp_path, 4))
    assert_close(means(tmp_path, 7), mean_of(tmp_path, [7]))
    assert_close(means(tmp_path, 8), mean_of(tmp_path, [7, 8]))


def test_training_is_what_it_is_without(tmp_path: Path) -> None:
    merged, plain = merging(tmp_path / "a", ModelMerge(window=4)), merging(tmp_path / "b")
    merged.train()
    plain.train()
    assert same(weights(merged), weights(plain))


def resumed_in_windows(output_dir: Path, *own: ds.Callback) -> ds.Trainer:
    layout = "none" if collectives.world_size() == 1 else "fsdp"
    return merging(output_dir, ModelMerge([4, 8], window=3), *own, layout=layout)


def test_stopped_and_resumed(tmp_path: Path) -> None:
    """Before a window, in one, behind one."""
    assert_resumes(resumed_in_windows, tmp_path, 1, 3, 5, 7)


def test_killed_and_resumed_in_shards(tmp_path: Path) -> None:
    kills = [FaultPlan(event=Event.STEP_END, count=4), FaultPlan(event=Event.STEP_END, count=5)]
    assert_resume_equivalent(resumed_in_windows, kills, world_size=2, folder=tmp_path)


def train(output_dir: Path, layout: str, max_steps: int) -> None:
    merging(output_dir, ModelMerge(8, window=5), layout=layout, max_steps=max_steps).train()


@pytest.mark.parametrize("legs", [[(2, "ddp"), (2, "ddp")], [(2, "fsdp"), (1, "none")], [(1, "none"), (2, "fsdp")]])
def test_the_means_follow_the_model_to_any_layout(tmp_path: Path, legs: list[tuple[int, str]]) -> None:
    """The second leg begins in the middle of the window."""
    train(tmp_path / "alone", "none", 8)
    for steps, (count, layout) in zip((6, 8), legs, strict=True):
        run_ranks(train, count, tmp_path / "spread", layout, steps)
    assert_close(means(tmp_path / "spread", 8), means(tmp_path / "alone", 8), rtol=1e-4, atol=1e-6)


def test_exported_and_evaluated_by_hand(tmp_path: Path) -> None:
    merge = ModelMerge(window=3)
    trainer = merging(tmp_path / "run", merge)
    with (
        pytest.raises(ds.ConfigurationError, match=r"ModelMerge.averaged\(\): there is no average yet"),
        merge.averaged(),
    ):
        pass
    trainer.train()
    own = weights(trainer)
    seen: list[Any] = []
    trainer.add_callback(Listener({"on_evaluate": lambda ctx: seen.append(ctx.evaluated_weights)}, name="seen"))
    with merge.averaged():
        found = trainer.evaluate()["eval_loss"]
        merged = {name: each.detach().clone() for name, each in trainer.model.named_parameters() if each.requires_grad}
    assert same(merged, means(tmp_path / "run", 8))
    assert found != trainer.evaluate()["eval_loss"]
    assert same(weights(trainer), own)
    assert seen == ["ModelMerge", None]
    ds.export_model(tmp_path / "run", tmp_path / "merged", average="ModelMerge")
    exported = load_file(tmp_path / "merged/model.safetensors")
    assert same({name: exported[name] for name in merged}, merged)
    again = ModelMerge(window=3)
    finished = merging(tmp_path / "run", again)
    finished.train()
    with again.averaged():
        assert finished.evaluate()["eval_loss"] == found


def test_one_that_comes_in_the_middle_of_a_window_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    merging(tmp_path, max_steps=6).train()
    with caplog.at_level(logging.WARNING, "dalsegno"):
        merging(tmp_path, ModelMerge(window=4)).train()
    assert "ModelMerge: the mean of 2 of 4 weights up to step 8" in caplog.text


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"steps": []}, r"steps=\[\]; needs a step, or several"),
        ({"steps": [0]}, "steps=0; needs an integer of at least 1"),
        ({"steps": [10, 12], "window": 3}, "steps=10 and 12 are closer than window=3"),
        ({"window": 2, "every": 3}, "every=3; needs an integer up to the window's 2"),
    ],
)
def test_wrong_arguments(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=message):
        ModelMerge(**how)


def test_a_merge_that_no_checkpoint_would_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ds.ConfigurationError, match=r"steps=5, but no checkpoint is saved there .* add AtSteps\(5\)"):
        merging(tmp_path, ModelMerge(5, window=3)).train()
    merging(tmp_path, ModelMerge(5, window=3), save="Every(steps=2) | AtSteps(5)", save_steps=500).train()
    assert means(tmp_path, 5)
