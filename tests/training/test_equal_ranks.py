"""Ranks whose models differ are refused, since a checkpoint contains one; those that a loop averages itself are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import dalsegno as ds
from dalsegno.testing import compare_runs, run_ranks, tiny_regression_data
from support.listeners import Listener
from support.models import Line
from support.resumed import stop_after
from support.small import small_trainer


def average_gradients(model: nn.Module) -> None:
    for each in model.parameters():
        dist.all_reduce(each.grad)
        each.grad /= dist.get_world_size()


def unspread(output_dir: str, averages: bool, settings: dict[str, Any]) -> int:
    """Steps of a Trainer with parallel="none"."""
    average = Listener({"on_gradients_ready": lambda ctx: average_gradients(ctx.model)}, name="average")
    callbacks = [average] if averages else []
    chosen = {"max_steps": 4, "save_steps": 3, **settings}
    return small_trainer(Path(output_dir), *callbacks, model=Line(), parallel="none", **chosen).train().global_step


@pytest.mark.parametrize("settings", [{}, {"save_steps": 1}, {"save_in_background": False}])
def test_a_trainer_that_averages_nothing_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ds.RankFailed, match=r"model: layer\.(weight|bias): differs between rank 0 and rank 1"):
        run_ranks(unspread, 2, str(tmp_path), False, settings)
    assert not list(tmp_path.glob("checkpoints/step-*"))


def test_a_trainer_whose_callback_averages(tmp_path: Path) -> None:
    assert run_ranks(unspread, 2, str(tmp_path), True, {}) == [4, 4]


def local_steps(output_dir: str, every: int, stop: int | None) -> None:
    """A loop that averages the weights after every so many steps; saves after every second."""
    torch.manual_seed(0)
    model, data = Line(), tiny_regression_data(32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    args = ds.TrainingArguments(output_dir, max_steps=8, save_steps=2, logging_steps=0, use_cpu=True)
    callbacks = [] if stop is None else [stop_after(stop)]
    with ds.Run(args, model=model, optimizer=optimizer, loader=loader, callbacks=callbacks) as run:
        for batch in run.batches():
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if (run.state.global_step + 1) % every == 0:
                for each in model.parameters():
                    dist.all_reduce(each.data)
                    each.data /= dist.get_world_size()
            run.step_end(loss=loss)


def joined(work: Callable[..., None], *args: Any) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    work(*args)


def test_a_loop_that_averages_weights_before_each_save_resumes_exactly(tmp_path: Path) -> None:
    run_ranks(joined, 2, local_steps, str(tmp_path / "whole"), 2, None)
    for stop in (4, None):
        run_ranks(joined, 2, local_steps, str(tmp_path / "parts"), 2, stop)
    comparison = compare_runs(tmp_path / "whole", tmp_path / "parts")
    assert comparison.identical, f"\n{comparison.table()}"


def test_a_loop_whose_models_differ_at_a_save_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ds.RankFailed, match="differs between rank 0 and rank 1"):
        run_ranks(joined, 2, local_steps, str(tmp_path), 3, None)
    assert not list(tmp_path.glob("checkpoints/step-*"))
