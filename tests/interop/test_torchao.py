"""States of torchao's low-bit optimizers are saved by row: any number of ranks can load them, in shards of any size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from checkpoint.sameness import bits
from dalsegno.checkpoint import CheckpointManager, ModelState, OptimizerState, read_tensors
from dalsegno.checkpoint.contract import local_part
from dalsegno.distributed import collectives
from dalsegno.testing import run_ranks

pytest.importorskip("torchao")


def built(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """33 rows, of which the ranks have 17 and 16: with 256 elements each, both are quantized."""
    import torchao.optim
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 33), nn.Linear(33, 1))
    if collectives.world_size() > 1:
        fully_shard(model)
    return model, getattr(torchao.optim, kind)(model.parameters(), lr=0.01, block_size=128)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.linspace(-1, 1, 1024).view(4, 256)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    """What this rank holds, by name."""
    tensors = OptimizerState(model, optimizer).capture().tensors
    return {name: bits(local_part(each)) for name, each in tensors.items()}


def load(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    manager = CheckpointManager(directory)
    checkpoint = manager.find()
    assert checkpoint is not None
    manager.load(checkpoint, [ModelState(model), OptimizerState(model, optimizer)], [])


def save(directory: str, kind: str) -> dict[str, bytes]:
    with torch.compiler.set_stance("force_eager"):
        model, optimizer = built(kind, 0)
        step(model, optimizer)
        CheckpointManager(Path(directory)).save(1, [ModelState(model), OptimizerState(model, optimizer)], [])
        return held(model, optimizer)


def loaded(directory: str, kind: str) -> dict[str, bytes]:
    with torch.compiler.set_stance("force_eager"):
        model, optimizer = built(kind, 1)
        load(Path(directory), model, optimizer)
        found = held(model, optimizer)
        step(model, optimizer)
    return found


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit"])
def test_uneven_shards_on_another_number_of_ranks(tmp_path: Path, kind: str) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    of_two = run_ranks(save, 2, first, kind)
    assert of_two[0]["0.weight.exp_avg.codes"] != of_two[1]["0.weight.exp_avg.codes"]
    of_one = loaded(first, kind)
    checkpoint = CheckpointManager(Path(first)).find()
    assert checkpoint is not None
    assert of_one == {name: bits(each) for name, each in read_tensors(checkpoint)["optimizer"].items()}
    assert of_one["0.weight.exp_avg.codes"] == of_two[0]["0.weight.exp_avg.codes"] + of_two[1]["0.weight.exp_avg.codes"]
    whole = save(second, kind)
    of_two = run_ranks(loaded, 2, second, kind)
    for name in ("0.weight.exp_avg.codes", "0.weight.exp_avg_sq.scale", "0.weight.exp_avg_sq.codes"):
        assert whole[name] == of_two[0][name] + of_two[1][name]
