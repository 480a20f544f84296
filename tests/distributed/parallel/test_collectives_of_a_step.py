"""A step exchanges what the same step written by hand with torch alone exchanges; a pipeline's also the losses. How its
tensors are sharded is not looked up again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.by_hand import MAX_GRAD_NORM, PARTS, Texts, Transformer, plan, steps_by_hand
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import dalsegno as ds
from dalsegno.testing import run_ranks
from dalsegno.training.step import TrainStep
from support.small import arguments

BATCH, STEPS = 4, 3
MODES: dict[str, tuple[Any, int, dict[str, int]]] = {
    "fsdp": (ds.FSDP(), 2, {}),
    "tp": (ds.TensorParallel(plan()), 1, {}),
    "pp": (ds.Pipeline(2, microbatches=PARTS), 1, {"broadcast": 1}),
}
"""Mode, ranks with different data, and what a step exchanges beside that by hand."""


class Exchanges(TorchDispatchMode):
    """Counts the collectives, sends and receives within the block, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it calls the operators of its parts
        name = func._schema.name.rpartition(":")[2].replace("_", "")  # allreduce_ and all_reduce are two doors to one
        if "c10d" in func.namespace and not name.startswith(("wait", "wrap")):  # what follows one
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def of_last_step(folder: Path, layout: str) -> tuple[Counter[str], Counter[str]]:
    """Ours, and by hand."""
    torch.set_num_threads(1)
    mode, data_ranks, _ = MODES[layout]
    texts = Texts(STEPS * BATCH * data_ranks)
    steps = steps_by_hand(layout, 16, 2, BATCH, texts)
    for _ in islice(steps, STEPS - 1):
        pass
    with Exchanges() as by_hand:
        next(steps)
    ours: list[Counter[str]] = []
    call = TrainStep.__call__

    def counted(self: TrainStep, step_batch: Any) -> Any:
        with Exchanges() as exchanges:
            result = call(self, step_batch)
        ours.append(exchanges.counts)
        return result

    train(folder, mode, texts, counted)
    assert len(ours) == STEPS
    return ours[-1], by_hand.counts


def train(folder: Path, mode: Any, texts: Texts, step: Callable[[TrainStep, Any], Any]) -> None:
    """Train with ``step`` in place of the trainer's; what the loop around it exchanges depends on the clock."""
    settings: dict[str, Any] = {"parallel": mode, "max_steps": STEPS, "per_device_train_batch_size": BATCH}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainStep, "__call__", step)
        args = arguments(folder, max_grad_norm=MAX_GRAD_NORM, save_steps=0, **settings)
        ds.Trainer(Transformer(16, 2), args, train_dataset=texts).train()


@pytest.mark.parametrize("layout", MODES)
def test_a_step_exchanges_what_one_by_hand_does(tmp_path: Path, layout: str) -> None:
    *_, beside = MODES[layout]
    for ours, by_hand in run_ranks(of_last_step, 2, tmp_path, layout):
        assert sum(by_hand.values())
        assert ours == by_hand + Counter(beside)


def mesh_lookups(folder: Path) -> list[int]:
    """Process groups that each step looks up in a mesh."""
    torch.set_num_threads(1)
    call, get_group = TrainStep.__call__, DeviceMesh.get_group
    found: list[int] = []

    def looking_up(*arguments: Any, **named: Any) -> Any:
        found[-1] += 1
        return get_group(*arguments, **named)

    def counted(self: TrainStep, step_batch: Any) -> Any:
        found.append(0)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(DeviceMesh, "get_group", looking_up)
            return call(self, step_batch)

    train(folder, ds.FSDP(), Texts(STEPS * BATCH * 2), counted)
    return found


def test_a_step_does_not_look_up_how_each_parameter_is_sharded(tmp_path: Path) -> None:
    """One look-up for each parameter, 2 % of a small step, before clipping found them once."""
    for found in run_ranks(mesh_lookups, 2, tmp_path):
        assert len(found) == STEPS
        assert found[-1] == 0
