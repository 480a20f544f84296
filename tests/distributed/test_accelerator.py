"""The accelerator: its random generators are saved and restored; one module asks torch about it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import dalsegno as ds
from dalsegno.distributed import accelerator
from dalsegno.distributed.rng import seeded_generators
from support.small import small_trainer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands for a machine without CUDA")


class OneDevice:
    """What torch.mps has: one device. Its generator is in this process's memory."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def get_rng_state(self) -> torch.Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.generator.set_state(state)

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)


class SeveralDevices:
    """What torch.xpu has."""

    def __init__(self) -> None:
        self.generators = [torch.Generator(), torch.Generator()]

    @property
    def generator(self) -> torch.Generator:
        return self.generators[1]

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [each.get_state() for each in self.generators]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        for each, state in zip(self.generators, states, strict=True):
            each.set_state(state)

    def manual_seed_all(self, seed: int) -> None:
        for each in self.generators:
            each.manual_seed(seed)


class Noise(ds.Callback):
    """Adds numbers of the device's generator to a gradient, as a dropout on the device would."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def on_gradients_ready(self, ctx: Any) -> None:
        weight = next(ctx.model.parameters())
        weight.grad += torch.rand(weight.shape, generator=self._generator)


def plug_in(monkeypatch: pytest.MonkeyPatch, kind: str, module: Any) -> None:
    """Only for dalsegno: torch, which asks too, would look for the real device."""
    monkeypatch.setattr(accelerator, "_accelerator", lambda: (kind, module))


def train(folder: Path, module: Any, steps: int) -> dict[str, torch.Tensor]:
    run = small_trainer(folder, Noise(module.generator), max_steps=steps, save_steps=2, lr_scheduler_type="constant")
    run.train()
    return {name: each.detach().clone() for name, each in run.model.named_parameters()}


@pytest.mark.parametrize(("kind", "build"), [("mps", OneDevice), ("xpu", SeveralDevices)])
def test_a_resumed_run_draws_what_it_would_have_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, build: Any
) -> None:
    module = build()
    plug_in(monkeypatch, kind, module)
    whole = train(tmp_path / "whole", module, 4)
    train(tmp_path / "cut", module, 2)
    module.generator.manual_seed(99)
    resumed = train(tmp_path / "cut", module, 4)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_a_run_resumed_on_another_kind_of_device_draws_the_same_each_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its numbers depend on the seed and the step, not on what the process has drawn before."""
    for name in ("one", "other"):
        train(tmp_path / name, OneDevice(), 2)
    weights = []
    for name, before in (("one", 1), ("other", 2)):
        module = OneDevice()
        plug_in(monkeypatch, "mps", module)
        module.generator.manual_seed(before)
        weights.append(train(tmp_path / name, module, 4))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_seeding_for_a_while_leaves_the_devices_generator_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    module = OneDevice()
    plug_in(monkeypatch, "mps", module)
    before = module.get_rng_state()
    with seeded_generators(3, torch.device("cpu")):
        torch.rand(4, generator=module.generator)
    assert torch.equal(module.get_rng_state(), before)


ASKS_FOR_CUDA = {
    "utilization": "NVIDIA's driver is asked",
    "power": "NVIDIA's driver is asked",
    "temperature": "NVIDIA's driver is asked",
    "record_allocations": "no other allocator records",
    "dump_allocations": "no other allocator records",
    "pin": "no other runtime page-locks memory in place",
}
"""Functions of ``accelerator.py`` that call torch's module of one kind of device, since there is no other call."""


def test_one_module_asks_torch_for_cuda_where_there_is_no_other_way() -> None:
    """Everything else would forget the devices of other kinds. Texts are not looked at."""
    package = Path(ds.__file__).parent
    found = {
        (str(path.relative_to(package)), getattr(part, "name", ""))
        for path in package.rglob("*.py")
        for part in ast.parse(path.read_text()).body
        for node in ast.walk(part)
        if isinstance(node, ast.Attribute)
        and node.attr in ("cuda", "mps", "xpu", "npu", "mtia")
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    }
    assert found == {("distributed/accelerator.py", name) for name in ASKS_FOR_CUDA}
