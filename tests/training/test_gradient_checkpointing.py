"""``gradient_checkpointing=True``: the same weights, bit by bit, from fewer kept activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dalsegno as ds
from dalsegno.callbacks import NaNChecker
from dalsegno.distributed.stage_places import is_on_other_stage
from dalsegno.testing import TinyLanguageModel, run_ranks
from support.resumed import assert_resumes
from support.small import ByteLines, small_trainer, weights


class Kept(ds.Callback):
    """Bytes that forward passes keep for the backward pass, in the largest of them."""

    def __init__(self) -> None:
        self.most = self._now = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._now += tensor.nbytes
        return tensor

    def on_before_forward(self, ctx: ds.BeforeForwardContext) -> None:
        self._now = 0
        self._hooks.__enter__()

    def on_after_forward(self, ctx: ds.AfterForwardContext) -> None:
        self._hooks.__exit__()
        self.most = max(self.most, self._now)


def trainer(output_dir: Path, *callbacks: Any, model: nn.Module | None = None, **settings: Any) -> ds.Trainer:
    torch.manual_seed(0)
    model = model or TinyLanguageModel(width=16, depth=3, heads=2, context=16, vocabulary=31)
    parts = {"train_dataset": ByteLines()}
    return small_trainer(output_dir, *callbacks, model=model, parts=parts, max_steps=6, save_steps=100, **settings)


def test_weights_are_the_same_and_less_is_kept(tmp_path: Path) -> None:
    plain, checked = Kept(), Kept()
    whole = trainer(tmp_path / "plain", plain, NaNChecker())
    whole.train()
    last = trainer(tmp_path / "checked", checked, NaNChecker(), gradient_checkpointing=True)
    last.train()
    for name, expected in weights(whole).items():
        assert torch.equal(weights(last)[name], expected), name
    assert checked.most < 0.6 * plain.most


def test_a_resumed_run_is_exact(tmp_path: Path) -> None:
    def build(output_dir: Path, *more: ds.Callback) -> ds.Trainer:
        return trainer(output_dir, *more, gradient_checkpointing=True)

    assert_resumes(build, tmp_path, 2)


def test_a_model_with_a_switch_of_its_own_is_switched(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def llama() -> Any:
        config = transformers.LlamaConfig(
            vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)

    plain = trainer(tmp_path / "plain", model=llama())
    plain.train()
    last = trainer(
        tmp_path / "checked",
        model=llama(),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"preserve_rng_state": False},
    )
    last.train()
    assert any(getattr(module, "gradient_checkpointing", False) for module in last.model.modules())
    for name, expected in weights(plain).items():
        assert torch.equal(weights(last)[name], expected), name


class Nested(nn.Sequential):
    """The layers are a block of their own, between two others. Returns the mean squared error."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.calls = 0
        super().__init__(nn.Linear(8, 8), nn.Sequential(*(self.layer() for _ in range(4))), nn.Linear(8, 1))

    def layer(self) -> nn.Module:
        layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3))
        layer[0].register_forward_hook(self._count)
        return layer

    def _count(self, *given: Any) -> None:
        self.calls += 1

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (batch, 8), y: (batch, 1)."""
        return nn.functional.mse_loss(super().forward(x), y)


def spread(output_dir: str) -> tuple[list[bool], list[int]]:
    """Of each layout: whether the weights are the same, bit by bit, and the calls of layers, plain and checkpointed."""
    same, calls = [], []
    for parallel in ("fsdp", ds.Pipeline(2, "gpipe")):
        kept = []
        for checkpointing in (False, True):
            model = Nested()
            folder = Path(output_dir, type(parallel).__name__, str(checkpointing))
            small_trainer(
                folder, model=model, parallel=parallel, gradient_checkpointing=checkpointing, max_steps=4
            ).train()
            own = [each.detach() for each in model.parameters() if not is_on_other_stage(each)]
            kept.append([each.full_tensor() if isinstance(each, DTensor) else each for each in own])
            calls.append(model.calls)
        same.append(all(map(torch.equal, *kept)))
    return same, calls


def test_spread_over_ranks(tmp_path: Path) -> None:
    """A pipeline begins its second stage inside a block: then the layers in it are checkpointed."""
    for same, calls in run_ranks(spread, 2, str(tmp_path)):
        assert same == [True, True]
        assert calls[:2] == [16, 32]
        assert calls[3] >= calls[2] + 8


def test_arguments_reach_torch(tmp_path: Path) -> None:
    """Without the generators' state, dropout draws other numbers when a block is computed again."""
    plain, again = (
        small_trainer(tmp_path / str(options), model=Nested(), gradient_checkpointing=True, max_steps=2, **options)
        for options in ({}, {"gradient_checkpointing_kwargs": {"preserve_rng_state": False}})
    )
    plain.train()
    again.train()
    assert not torch.equal(weights(plain)["1.0.0.weight"], weights(again)["1.0.0.weight"])


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ds.ConfigurationError, match="Linear has neither gradient_checkpointing_enable"):
        small_trainer(tmp_path, model=nn.Linear(8, 1), max_steps=2, gradient_checkpointing=True)
    with pytest.raises(ds.UnknownName, match=r"'use_reentrent'; did you mean 'use_reentrant'\?"):
        trainer(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrent": False})
    with pytest.raises(ds.ConfigurationError, match="gradient_checkpointing_kwargs= needs gradient_checkpointing=True"):
        ds.TrainingArguments(tmp_path, gradient_checkpointing_kwargs={})
    with pytest.raises(ds.ConfigurationError, match="torch_compile_mode='default' needs torch_compile=True"):
        ds.TrainingArguments(tmp_path, torch_compile_mode="default")
