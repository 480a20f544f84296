"""Adapters of PEFT, tied weights and frozen layers of transformers, under the callbacks that look at parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import dalsegno as ds
from callbacks.layouts import LAYOUTS, assert_same_values
from dalsegno.callbacks import (
    EMA,
    ComputeNorm,
    CountParams,
    GradHistogram,
    GradNormLogger,
    JsonLogger,
    LearningDynamics,
    ParameterNormLogger,
    WeightNormLogger,
)
from dalsegno.checkpoint import CheckpointManager, read_tensors
from dalsegno.distributed import collectives
from dalsegno.logs import read_records
from dalsegno.testing import compare_runs, run_ranks
from support.languages import byte_pairs, llama, pages
from support.resumed import stop_after
from support.small import small_trainer

KINDS = ("lora", "frozen")
STEPS = 8


def build(kind: str) -> nn.Module:
    """Input and output embeddings are one tensor. Trained are adapters alone; or all but the embeddings."""
    model = llama(tie_word_embeddings=True)
    if kind == "lora":
        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    model.model.embed_tokens.requires_grad_(False)
    return model


def trainer(output_dir: Path, kind: str, layout: str, *own: ds.Callback) -> ds.Trainer:
    data = {"train_dataset": pages(byte_pairs()), "eval_dataset": pages(byte_pairs(), 4)}
    watching = [
        JsonLogger(),
        GradNormLogger(),
        ParameterNormLogger(power_iter_steps=3),
        GradHistogram(every=4),
        LearningDynamics(every=4),
        ComputeNorm(),
        WeightNormLogger(),
        CountParams(depth=1),
    ]
    settings = {"max_steps": STEPS, "eval_steps": 4, "logging_steps": 2, "save_steps": 100, "parallel": layout}
    batch = 4 // collectives.world_size()
    return small_trainer(
        output_dir,
        *watching,
        *own,
        model=build(kind),
        parts=data,
        per_device_train_batch_size=batch,
        **settings,
    )


def train(output_dir: Path, kind: str, layout: str) -> None:
    trainer(output_dir, kind, layout).train()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """Folders by kind and layout."""
    folder = tmp_path_factory.mktemp("adapters")
    found = {kind: {layout: folder / kind / layout for layout in LAYOUTS} for kind in KINDS}
    for kind in KINDS:
        for layout, output_dir in found[kind].items():
            run_ranks(train, 1 if layout == "none" else 2, output_dir, kind, layout)
    return found


def records(run: Path, log: str, kind: str | None = None) -> list[dict[str, Any]]:
    return [record for record in read_records(run / "logs" / log) if record.get("kind") == kind]


def names(kind: str) -> tuple[set[str], set[str]]:
    """Of all parameters, each once; and of those that are trained."""
    parameters = dict(build(kind).named_parameters())
    assert not any("lm_head" in name for name in parameters), "the tied one goes by its first name"
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert trained < set(parameters)
    return set(parameters), trained


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_names_are_the_models_own(runs: dict[str, dict[str, Path]], kind: str, layout: str) -> None:
    """Of frozen ones there is a norm, and nothing of a gradient that does not exist."""
    run, (everything, trained) = runs[kind][layout], names(kind)
    for record in records(run, "parameter_norms.jsonl"):
        assert record["norms"].keys() == record["spectral_norms"].keys() == everything
    for record in records(run, "gradient_norms.jsonl"):
        assert record["norms"].keys() == trained
    for record in records(run, "grad_histograms.jsonl"):
        assert record["counts"].keys() == trained
    for record in records(run, "learning_dynamics.jsonl"):
        assert record["update_ratios"].keys() == record["gradient_snr"].keys() == trained
    assert len(records(run, "gradient_norms.jsonl")) == len(records(run, "grad_histograms.jsonl")) == 2


LOGS = [
    "train.jsonl",
    "parameter_norms.jsonl",
    "gradient_norms.jsonl",
    "grad_histograms.jsonl",
    "learning_dynamics.jsonl",
]


@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_on_every_layout(runs: dict[str, dict[str, Path]], kind: str, log: str) -> None:
    """Counts in a histogram may move to the next bin by a rounding."""
    clock = ("timestamp", "_runtime", "_per_second", "counts", "zeros")
    assert_same_values(runs[kind], f"logs/{log}", clock, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tied_one_counts_once_and_a_frozen_one_says_so(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trainer(tmp_path, kind, "none")
    before = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    run.train()
    parameters = dict(run.model.named_parameters())
    total = sum(parameter.numel() for parameter in parameters.values())
    trained = sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad)
    (summary,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("the model")]
    assert summary.split()[-3:-1] == [f"{total:,}", f"{trained:,}"]
    norm = torch.cat([parameter.detach().double().reshape(-1) for parameter in parameters.values()]).norm()
    assert records(tmp_path, "train.jsonl", "eval")[-1]["weight_norm"] == pytest.approx(float(norm), rel=1e-6)
    for name, parameter in parameters.items():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name


def train_in_parts(folder: Path, kind: str, layout: str) -> None:
    trainer(folder / "whole", kind, layout).train()
    for step in (3, 5):
        assert trainer(folder / "parts", kind, layout, stop_after(step)).train().global_step == step
    assert trainer(folder / "parts", kind, layout).train().global_step == STEPS


@pytest.mark.parametrize(
    ("kind", "layout", "world_size"), [("lora", "none", 1), ("lora", "fsdp", 2), ("frozen", "ddp", 2)]
)
def test_resumed_anywhere_it_is_the_same(tmp_path: Path, kind: str, layout: str, world_size: int) -> None:
    run_ranks(train_in_parts, world_size, tmp_path, kind, layout)
    comparison = compare_runs(tmp_path / "whole", tmp_path / "parts")
    assert comparison.identical, f"\n{comparison.table()}"


@pytest.mark.parametrize("kind", KINDS)
def test_averaged_and_fused_into_the_backward_pass(tmp_path: Path, kind: str) -> None:
    """The same as without; and there is an average of what is trained, once."""
    for name, is_fused in (("fused", True), ("ordinary", False)):
        small_trainer(
            tmp_path / name,
            GradNormLogger(),
            EMA(0.9),
            model=build(kind),
            parts={"train_dataset": pages(byte_pairs()), "eval_dataset": pages(byte_pairs(), 4)},
            fuse_optim_with_backward=is_fused,
            max_grad_norm=0,
            max_steps=4,
            eval_steps=2,
            save_steps=4,
        ).train()
    compared = compare_runs(tmp_path / "fused", tmp_path / "ordinary")
    assert {row.what for row in compared.rows if not row.identical} <= {"settings", "logs/gradient_norms.jsonl"}
    checkpoint = CheckpointManager(tmp_path / "fused").find()
    assert checkpoint is not None
    assert read_tensors(checkpoint)["callbacks.EMA"].keys() == names(kind)[1]
