"""What training waits for in a save: the state is captured with few calls per tensor, and copied by several threads."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dalsegno.checkpoint import Checkpoint, CheckpointManager, ModelState, OptimizerState, read_tensors, staging
from dalsegno.checkpoint.staging import SMALL, HostCopies

TENSORS = 200


def calls_of(work: Callable[[], object]) -> Counter[str]:
    """How often each function in Python is called, by its file and name."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_a_capture_of_what_is_planned_calls_few_functions_per_tensor(tmp_path: Path) -> None:
    """8 in Python. 17 while each look-up in the empty registry of pipeline stages made a weak reference, and each shape
    was checked as one read from a disk."""
    model = nn.ParameterList([nn.Parameter(torch.randn(3, 4)) for _ in range(TENSORS)])
    manager, state = CheckpointManager(tmp_path), ModelState(model)
    manager.save_async(1, [state], [])
    manager.settle()
    calls = calls_of(lambda: manager.save_async(2, [state], []))
    manager.settle()
    assert calls["machine.py:available_memory"] == 0, "the buffers are there"
    assert manager.path_of(2).is_dir()
    per_tensor = {name: number / TENSORS for name, number in calls.items() if number >= TENSORS}
    assert sum(per_tensor.values()) <= 14, per_tensor


def test_the_library_of_a_class_is_looked_up_once_for_all_modules() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

    state = ModelState(nn.Sequential(*(Scale() for _ in range(TENSORS))))
    assert calls_of(state.capture)["wrapped.py:_library_of"] <= 2


def test_a_step_counter_is_looked_at_once() -> None:
    """And each of the two moments of AdamW."""
    model = nn.ParameterList([nn.Parameter(torch.randn(3, 4)) for _ in range(TENSORS)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert calls_of(OptimizerState(model, optimizer).capture)["tensor_files.py:is_plain"] == 3 * TENSORS


@pytest.mark.parametrize("threads", [1, 3])
def test_all_tensors_are_copied_whatever_the_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(staging, "thread_count", lambda: threads)
    large = torch.randn(3, 1_500_000)
    model = nn.Module()
    model.register_buffer("large", large)
    model.register_buffer("turned", torch.randn(300, 200).T)
    model.register_buffer("odd", torch.arange(5 * SMALL + 3, dtype=torch.uint8))
    for number in range(1000):
        model.register_buffer(f"small_{number}", torch.full((number % 5, 2), number, dtype=torch.float64))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert sum(tensor.nbytes for tensor in expected.values()) > staging._ALONE_BYTES
    manager = CheckpointManager(tmp_path)
    save = manager.save_async(1, [ModelState(model)], [])
    for tensor in model.state_dict().values():
        tensor.zero_()  # as training may once the state is copied
    save.join()
    assert save.failure is None
    read = read_tensors(Checkpoint.open(save.path))["model"]
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(read[name], tensor), name


SHAPES = st.lists(st.sampled_from([0, 1, 2, 7, 100, 181, 182]), min_size=0, max_size=3).filter(
    lambda shape: torch.Size(shape).numel() < 200_000
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.complex64, torch.bool])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(SHAPES, DTYPES, st.booleans()), max_size=12))
def test_copies_of_any_shape_type_and_stride(forms: list[tuple[list[int], torch.dtype, bool]]) -> None:
    """Nothing is recorded for a backward pass, which would keep the tensors."""
    copies, pairs, begin = HostCopies(), [], 0
    for shape, dtype, is_turned in forms:
        tensor = torch.randint(0, 100, shape).to(dtype)
        tensor = tensor.mT if is_turned and tensor.dim() > 1 else tensor
        tensor.requires_grad_(dtype.is_floating_point)
        pairs.append((torch.zeros(tensor.shape, dtype=dtype), tensor))
        copies.add(begin, *pairs[-1])
        begin += tensor.nbytes
    positions: list[int] = []
    copies.run(positions.append)
    assert all(0 <= position <= begin for position in positions)
    assert all(torch.equal(place, tensor) and not place.requires_grad for place, tensor in pairs)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_copy_that_fails_raises(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(staging, "thread_count", lambda: threads)
    monkeypatch.setattr(staging, "_ALONE_BYTES", 0)
    copies = HostCopies()
    copies.add(0, torch.zeros(3), torch.zeros(4))
    with pytest.raises(RuntimeError, match="size"):
        copies.run(int)


def test_as_many_threads_as_processors_that_the_rank_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    most = staging.thread_count()
    assert 1 <= most <= 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(allowed)))
    assert staging.thread_count() == 1
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert staging.thread_count() == 1
    finally:
        os.sched_setaffinity(0, allowed)
