"""Running statistics on several ranks: rank 0's at each step's end, so that neither saves nor layouts change them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import dalsegno as ds
from dalsegno.distributed import collectives
from dalsegno.distributed.buffers import SharedBuffers
from dalsegno.testing import run_ranks, tiny_regression_data
from support.listeners import Listener
from support.small import arguments, rows, small_trainer


class Normed(nn.Module):
    """With statistics that each rank gathers from batches of its own, one of them in an expanded tensor."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # A bias would have rounding errors for a gradient, which Adam makes as large as any.
        self.layers = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.register_buffer("count", torch.zeros(1).expand(3))
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (batch, 8), y: (batch, 1)."""
        if self.training:
            self.count[:1].add_(x.detach().mean())
        return nn.functional.mse_loss(self.layers(x), y)


def buffers(model: nn.Module) -> list[list[float]]:
    return [each.flatten().tolist() for each in model.buffers()]


def trained(output_dir: Path, parallel: str, saves: tuple[int, ...]) -> dict[str, Any]:
    """Evaluations of eight steps, with checkpoints at some of them; and this rank's buffers then."""
    seen: dict[str, Any] = {"losses": [], "buffers": []}

    def save(ctx: Any) -> None:
        ctx.control.should_save = ctx.state.global_step in saves

    def note(ctx: Any) -> None:
        seen["losses"].append(ctx.metrics["eval_loss"])
        seen["buffers"].append(buffers(ctx.model))

    trainer = small_trainer(
        output_dir,
        Listener({"on_step_end": save, "on_evaluate": note}),
        model=Normed(),
        length=64,
        parts={"eval_dataset": tiny_regression_data(7, seed=1)},
        parallel=parallel,
        max_steps=8,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        eval_steps=2,
        save_steps=100,
    )
    trainer.train()
    return seen | {"best": trainer.state.best_metric}


def trained_four_times(output_dir: Path) -> list[dict[str, Any]]:
    return [
        trained(output_dir / f"{parallel}{len(saves)}", parallel, saves)
        for parallel in ("fsdp", "ddp")
        for saves in ((), (3, 5))
    ]


def test_a_save_changes_no_evaluation_and_all_ranks_have_the_same_statistics(tmp_path: Path) -> None:
    first, second = run_ranks(trained_four_times, 2, tmp_path)
    assert first == second, "ranks tell the same, their buffers included"
    fsdp, fsdp_saved, ddp, ddp_saved = first
    assert fsdp == fsdp_saved
    assert ddp == ddp_saved
    assert fsdp["losses"] == pytest.approx(ddp["losses"], rel=1e-4), "the way to spread a model is not felt either"
    assert sorted(path.name for path in tmp_path.glob("fsdp2/checkpoints/*"))[:2] == ["step-00000003", "step-00000005"]


def own_loop(output_dir: Path, saves: tuple[int, ...], max_steps: int) -> Any:
    """A loop around a sharded model; this rank's buffers at each step's end, and its loss in evaluation mode."""
    model = Normed()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = tiny_regression_data(64)
    batches = [rows(data, range(at, at + 4)) for at in range(4 * collectives.rank(), 48, 8)]
    args = arguments(output_dir, max_steps=max_steps, save_steps=100)
    found = []
    with ds.Run(args, model=model, optimizer=optimizer, loader=batches) as run:
        for batch in run.batches():
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.state.global_step + 1 in saves:
                run.save()
            run.step_end(loss=loss)
            model.eval()
            with torch.no_grad():
                found.append((buffers(model), model(**rows(data, range(48, 56))).item()))
            model.train()
    return found


def own_loops(output_dir: Path) -> Any:
    whole = own_loop(output_dir / "whole", (), 6)
    saved = own_loop(output_dir / "saved", (2, 3), 6)
    first = own_loop(output_dir / "cut", (), 3)
    return whole, saved, first + own_loop(output_dir / "cut", (), 6)


def test_a_save_changes_nothing_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    first, second = run_ranks(own_loops, 2, tmp_path)
    assert first == second
    whole, saved, cut = first
    assert whole == saved == cut


class Different(nn.Module):
    """Another buffer on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("own", torch.full((1 + collectives.rank(),), float(collectives.rank())))


def share_different(_: Path) -> list[list[float]]:
    model = Different()
    shared = SharedBuffers([model])
    shared.begin_leg()
    shared.share()
    return buffers(model)


def test_ranks_with_different_buffers_keep_their_own(tmp_path: Path) -> None:
    assert run_ranks(share_different, 2, tmp_path) == [[[0.0]], [[1.0, 1.0]]]


def warned_under_ddp(output_dir: Path) -> list[list[str]]:
    """By torch, of a run with DDP, and of the same argument elsewhere in the program."""
    with warnings.catch_warnings(record=True) as of_run:
        warnings.simplefilter("always")
        small_trainer(output_dir, model=Normed(), parallel="ddp", max_steps=2, per_device_train_batch_size=2).train()
    with warnings.catch_warnings(record=True) as elsewhere:
        warnings.simplefilter("always")
        nn.parallel.DistributedDataParallel(Normed(), broadcast_buffers=False)
    return [
        [str(each.message) for each in found if "broadcast_buffers" in str(each.message)]
        for found in (of_run, elsewhere)
    ]


def test_a_run_with_ddp_is_not_warned_of_an_argument_of_torch(tmp_path: Path) -> None:
    """Which the user has not given; where they give it, torch warns as before."""
    for of_run, elsewhere in run_ranks(warned_under_ddp, 2, tmp_path):
        assert of_run == []
        assert bool(elsewhere) == hasattr(nn.parallel.DistributedDataParallel, "broadcast_buffers")  # since 2.13
