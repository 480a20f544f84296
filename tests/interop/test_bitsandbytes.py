"""Weights of bitsandbytes are saved with what they are quantized by: alone, and sharded by FSDP2."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn

import dalsegno as ds
from checkpoint.sameness import bits
from dalsegno.checkpoint import CheckpointManager, ModelState, OptimizerState
from dalsegno.cli import main
from dalsegno.testing import run_ranks
from support.small import small_trainer

bnb: Any = pytest.importorskip("bitsandbytes")


def model_of(seed: int) -> nn.Module:
    """QLoRA: a 4-bit base with nested scales, an 8-bit one, and a trained layer."""
    torch.manual_seed(seed)
    quantized = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    layers = nn.Sequential(quantized, bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False), nn.Linear(64, 1))
    for layer in layers[:2]:
        layer.requires_grad_(False)
    return layers.to("cpu")  # quantizes


def outputs(model: nn.Module) -> bytes:
    return bits(model(torch.linspace(-1, 1, 128).reshape(2, 64)))


def carry_over(directory: Path, source: nn.Module, target: nn.Module) -> None:
    CheckpointManager(directory).save(1, [ModelState(source)], [])
    checkpoint = CheckpointManager(directory).find()
    assert checkpoint is not None
    CheckpointManager(directory).load(checkpoint, [ModelState(target)], [])


def test_quantized_weights_are_restored_with_their_scales(tmp_path: Path) -> None:
    source, target = model_of(0), model_of(1)
    before = outputs(source)
    assert outputs(target) != before
    carry_over(tmp_path, source, target)
    assert outputs(target) == before
    assert type(target[0].weight).__name__ == "Params4bit"
    names = ModelState(source).capture().tensors.keys()
    assert {"0.weight", "0.weight.absmax", "0.weight.nested_absmax", "0.weight.nested_offset", "1.SCB"} <= names
    assert not any("quant_state" in name for name in names)


def test_the_state_of_its_8_bit_optimizer_is_restored(tmp_path: Path) -> None:
    def trained(seed: int, steps: int) -> tuple[nn.Module, Any]:
        model = model_of(seed)
        optimizer = bnb.optim.AdamW8bit(model[2].parameters(), lr=0.1, min_8bit_size=16)
        step(model, optimizer, steps)
        return model, optimizer

    def step(model: nn.Module, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, 128).reshape(2, 64)).square().mean().backward()
            optimizer.step()

    source, target = trained(0, 3), trained(1, 0)
    states = [[ModelState(model), OptimizerState(model, optimizer)] for model, optimizer in (source, target)]
    CheckpointManager(tmp_path).save(1, states[0], [])
    checkpoint = CheckpointManager(tmp_path).find()
    assert checkpoint is not None
    CheckpointManager(tmp_path).load(checkpoint, states[1], [])
    for each in (source, target):
        step(*each, 2)
    assert outputs(target[0]) == outputs(source[0])


def sharded(directory: str) -> tuple[bool, bool]:
    """Whether the outputs of a model sharded by FSDP2 differ from another one's before they are loaded, and after."""
    from torch.distributed.fsdp import fully_shard

    models = [model_of(seed) for seed in (0, 1)]
    for model in models:
        fully_shard(model[0])
        fully_shard(model, ignored_params={model[1].weight})
    source, target = models
    differed = outputs(source) != outputs(target)
    carry_over(Path(directory), source, target)
    return differed, outputs(source) != outputs(target)


def test_a_weight_that_is_sharded_keeps_its_scales() -> None:
    with tempfile.TemporaryDirectory() as directory:
        assert run_ranks(sharded, 2, directory) == [(True, False)] * 2


class Quantized(nn.Module):
    """A 4-bit layer as transformers loads it, and a head."""

    is_loaded_in_4bit = True  # peft asks

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = bnb.nn.Linear4bit(8, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
        self.head = nn.Linear(64, 1)
        self.to("cpu")  # quantizes

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.head(self.base(x)), y)


def test_the_adapters_of_a_quantized_base_are_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = get_peft_model(Quantized(), LoraConfig(r=2, target_modules=["base"], modules_to_save=["head"]))
    trainer = small_trainer(tmp_path / "run", model=model, max_steps=3, save_steps=3)
    trainer.train()
    ds.export_adapters(tmp_path / "run", tmp_path / "adapter")
    x, y = torch.linspace(-1, 1, 32).reshape(4, 8), torch.zeros(4, 1)
    theirs = PeftModel.from_pretrained(Quantized(), str(tmp_path / "adapter"))
    assert torch.equal(theirs.train()(x=x, y=y), trainer.model.train()(x=x, y=y))  # on a CPU, eval() packs it anew

    run, weight = str(tmp_path / "run"), "base_model.model.base.base_layer.weight"
    assert main(["checkpoints", "export", run, "--to", str(tmp_path / "model")]) == 0
    assert f"quantized or wrapped (1): {weight}; only the tensors inside" in capsys.readouterr().out
    assert {weight, f"{weight}.absmax", f"{weight}.quant_map"} <= load_file(tmp_path / "model/model.safetensors").keys()
    assert main(["checkpoints", "export", run, "--to", str(tmp_path / "run.pt"), "--program", "torch"]) == 2
    assert f"contains 1 quantized or wrapped weights ({weight})" in capsys.readouterr().err
    assert not (tmp_path / "run.pt").exists()
