"""GradientNoiseScale: against gradients taken one by one, alone and on two ranks, and against noise that is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dalsegno as ds
from callbacks.scripted import Kept
from dalsegno.callbacks import GradientNoiseScale, ScaleLoss
from dalsegno.distributed import collectives
from dalsegno.events.table import Event
from dalsegno.testing import FaultPlan, assert_resume_equivalent, run_ranks
from support.models import Line
from support.resumed import assert_resumes
from support.small import small_trainer, weights

DECAY = 0.8
KEY = "gradient_noise_scale"


class Witness(ds.Callback):
    """The two-batch estimates of appendix A.1, from gradients of their own and weights by samples, of each step."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.scales: dict[int, float] = {}
        self._noise = self._signal = 0.0

    def on_step_begin(self, ctx: Any) -> None:
        self.batches = []

    def on_microbatch_begin(self, ctx: Any) -> None:
        self.batches.append((gradient(ctx.model, ctx.batch), ctx.samples))

    def on_train_metrics(self, ctx: Any) -> None:
        gathered = collectives.gather(self.batches, "the test's gradients")
        every = [each for batches in gathered for each in batches]
        count = sum(samples for _, samples in every)
        big = float((sum(g * samples for g, samples in every) / count).square().sum())
        firsts = [batches[0] for batches in gathered if batches[0][1]]
        if len(gathered[0]) > 1 and firsts:
            held = sum(samples for _, samples in firsts)
            small = sum(float(g.square().sum()) * samples for g, samples in firsts) / held
            size = held / len(firsts)
            noise = (small - big) / (1 / size - 1 / count)
            signal = (count * big - size * small) / (count - size)
            self._noise = DECAY * self._noise + (1 - DECAY) * noise
            self._signal = DECAY * self._signal + (1 - DECAY) * signal
        if self._signal > 0 and self._noise >= 0:
            self.scales[ctx.state.global_step] = self._noise / self._signal


def gradient(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    values = {name: each.detach().double().requires_grad_() for name, each in model.named_parameters()}
    wide = {key: each.double() for key, each in batch.items()}
    loss = torch.func.functional_call(model, values, kwargs=wide)
    parts = torch.autograd.grad(loss, list(values.values()))
    return torch.cat([each.flatten() for each in parts])


def measured(
    output_dir: Path, more: Sequence[ds.Callback] = (), length: int = 22, fp16: bool = False
) -> tuple[dict[int, float], dict[int, float]]:
    """By the callback and by the witness, by step. An epoch's last steps are smaller, and on two ranks have padding."""
    witness, kept = Witness(), Kept()
    small_trainer(
        output_dir,
        GradientNoiseScale(DECAY),
        *more,
        witness,
        kept,
        model=Line(),
        length=length,
        parallel="auto",
        gradient_accumulation_steps=3,
        fp16=fp16,
        per_device_train_batch_size=2,
        max_grad_norm=0.1,
        logging_steps=1,
        max_steps=12,
    ).train()
    return {step: logs[KEY] for step, logs in kept.of("train").items() if KEY in logs}, witness.scales


@pytest.mark.parametrize(("world_size", "length"), [(1, 22), (1, 25), (2, 22), (2, 19), (2, 13)])
def test_as_from_gradients_taken_one_by_one(tmp_path: Path, world_size: int, length: int) -> None:
    for found, expected in run_ranks(measured, world_size, tmp_path, (), length):
        assert len(expected) >= 5
        assert found == pytest.approx(expected, rel=1e-4)


def test_a_factor_of_the_whole_loss_does_not_matter(tmp_path: Path) -> None:
    found, expected = measured(tmp_path / "scaled", [ScaleLoss(8.0)])
    assert found == pytest.approx(expected, rel=1e-4)
    found, expected = measured(tmp_path / "fp16", [ScaleLoss(2.0**-8)], fp16=True)
    assert found == pytest.approx(expected, rel=0.05)


class Middle(nn.Module):
    """The gradient of a sample is the difference between ``place`` and it."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(50))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x: (batch, 50), weight: (batch,), of each sample's loss."""
        return ((self.place - x).square().sum(1) / 2 * weight).sum() / weight.sum()


@pytest.mark.parametrize("weighted", [False, True])
def test_it_finds_noise_that_is_known(tmp_path: Path, weighted: bool) -> None:
    """Samples around 0.5 with a deviation of 2, in 50 dimensions: 50 · 4 / (50 · 0.25) = 16. It is in
    samples, whatever a batch's loss counts."""
    generator = torch.Generator().manual_seed(1)
    x = 0.5 + 2 * torch.randn(6000, 50, generator=generator)
    data = [{"x": each, "weight": torch.tensor(1.0)} for each in x]
    kept = Kept()
    small_trainer(
        tmp_path,
        GradientNoiseScale(decay=0.998),
        kept,
        model=Middle(),
        parts={"train_dataset": data, "loss_weight": (lambda batch: 3.0 * len(batch["x"])) if weighted else None},
        gradient_accumulation_steps=4,
        per_device_train_batch_size=2,
        learning_rate=0.0,
        logging_steps=1,
        max_steps=700,
    ).train()
    assert kept.of("train")[700][KEY] == pytest.approx(16, rel=0.1)


def saved_and_resumed(output_dir: Path, *own: ds.Callback) -> ds.Trainer:
    return small_trainer(
        output_dir,
        GradientNoiseScale(DECAY),
        *own,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        parallel="auto",
        logging_steps=2,
        save_steps=3,
        max_steps=9,
    )


def outcome(output_dir: Path, observed: bool) -> list[bytes]:
    """This rank's weights, bit by bit, and its next random numbers."""
    trainer = saved_and_resumed(output_dir)
    if not observed:
        trainer.remove_callback("GradientNoiseScale")
    trainer.train()
    return [each.numpy().tobytes() for each in [*weights(trainer).values(), torch.rand(8)]]


def test_it_is_not_felt(tmp_path: Path) -> None:
    with_it, without = (run_ranks(outcome, 2, tmp_path / f"{observed}", observed) for observed in (True, False))
    assert with_it == without


def test_stopped_and_resumed(tmp_path: Path) -> None:
    assert_resumes(saved_and_resumed, tmp_path, 4, 5)


def test_killed_and_resumed_on_two_ranks(tmp_path: Path) -> None:
    kills = [FaultPlan(event=Event.MICROBATCH_END, count=11)]
    assert_resume_equivalent(saved_and_resumed, kills, world_size=2, folder=tmp_path)


def test_a_step_with_infinite_gradients_is_passed_over(tmp_path: Path) -> None:
    """And those after it count as if it had not been."""

    class Breaks(ds.Callback):
        def on_before_backward(self, ctx: Any) -> None:
            if ctx.state.global_step == 4:
                ctx.outputs["loss"] = ctx.outputs["loss"] * float("inf")

    kept = Kept()
    noise = GradientNoiseScale(DECAY)
    settings = {"gradient_accumulation_steps": 2, "logging_steps": 1, "max_steps": 5}
    small_trainer(tmp_path, noise, Breaks(), kept, **settings).train()
    logs = kept.of("train")
    assert [logs[step].get(KEY) for step in (4, 5)] == [logs[4].get(KEY)] * 2


def refused_in_shards(output_dir: Path) -> str:
    with pytest.raises(ds.ConfigurationError) as caught:
        small_trainer(output_dir, GradientNoiseScale(), parallel="fsdp", gradient_accumulation_steps=2).train()
    return str(caught.value)


def test_what_cannot_be_measured_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ds.ConfigurationError, match="gradient_accumulation_steps=2 or more"):
        small_trainer(tmp_path / "a", GradientNoiseScale()).train()
    fused = {"fuse_optim_with_backward": True, "max_grad_norm": 0.0, "gradient_accumulation_steps": 2}
    with pytest.raises(ds.ConfigurationError, match="with fuse_optim_with_backward=True, no gradient is left"):
        small_trainer(tmp_path / "b", GradientNoiseScale(), **fused).train()
    for message in run_ranks(refused_in_shards, 2, tmp_path / "c"):
        assert "the weights are sharded" in message
    with pytest.raises(ds.ConfigurationError, match=r"decay=1; needs a finite number of at least 0 and below 1"):
        GradientNoiseScale(decay=1)
