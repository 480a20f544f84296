"""Which device a rank trains on: the accelerator that torch finds, without being asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dalsegno.distributed import accelerator
from dalsegno.distributed.parallel.torchrun import init_distributed


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with ``count`` devices of a kind; returns the list of numbers to which the device was set."""

    def plug(kind: str | None, count: int = 1) -> list[int]:
        chosen = [0]
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda: None if kind is None else torch.device(kind)
        )
        monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: chosen[-1])
        monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(device_count=lambda: count))
        return chosen

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return plug


@pytest.mark.parametrize(
    ("kind", "use_cpu", "device"),
    [
        ("mps", False, "mps:0"),
        ("mps", True, "cpu"),
        ("xpu", False, "xpu:0"),
        ("cuda", False, "cuda:0"),
        (None, False, "cpu"),
    ],
)
def test_a_run_is_on_the_accelerator_that_torch_finds(
    plug_in: Any, kind: str | None, use_cpu: bool, device: str
) -> None:
    plug_in(kind)
    assert init_distributed(use_cpu) == torch.device(device)


@pytest.mark.parametrize(("kind", "backend"), [("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl")])
def test_each_rank_has_its_device_and_a_backend_for_it(
    plug_in: Any, monkeypatch: pytest.MonkeyPatch, kind: str, backend: str
) -> None:
    chosen, groups = plug_in(kind, 4), []
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: groups.append(backend))
    assert init_distributed(use_cpu=False) == torch.device(kind, 3)
    assert chosen == [0, 3] and groups == [backend]


def test_several_ranks_on_a_device_without_collectives_train_on_the_cpu(
    plug_in: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plug_in("mps")
    groups: list[str] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "init_process_group", groups.append)
    assert init_distributed(use_cpu=False) == torch.device("cpu")
    assert groups == ["gloo"]
    assert "has an accelerator of type 'mps', but training runs on the CPU: torch has no collectives" in caplog.text


def test_a_device_without_float64_sums_in_float32() -> None:
    assert accelerator.wide_dtype(torch.device("mps")) == torch.float32
    assert accelerator.wide(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.float64
