"""Models of transformers with split layers, also under a pipeline: a Llama by its own plan, a mixture of experts by one
for its attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import dalsegno as ds
from dalsegno import callbacks
from dalsegno.logs import read_records
from dalsegno.testing import run_ranks

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


class Sentences:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.arange(10) * (index + 3) % 61
        return {"input_ids": ids, "labels": ids}


def model(kind: str) -> nn.Module:
    """The Llama has tied embeddings, which a pipeline's first and last stage share."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))


def attention() -> dict[str, Any]:
    rows = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    return {**rows, "model.layers.*.self_attn.o_proj": RowwiseParallel()}


def train(output_dir: Path, spread: str) -> list[dict[str, float]]:
    """The numbers of both models' records: losses, norms, FLOPs, loads of experts."""
    records = []
    for kind, plan in (("llama", "auto"), ("mixtral", attention())):
        split = ds.TensorParallel(plan, size=2)
        modes = {"none": "none", "tp": split, "pp x tp": [ds.Pipeline(2, "gpipe", microbatches=2), split]}
        args = ds.TrainingArguments(
            output_dir / kind,
            max_steps=2,
            save_steps=0,
            logging_steps=1,
            learning_rate=1e-3,
            disable_tqdm=True,
            use_cpu=True,
            parallel=modes[spread],  # type: ignore[arg-type]
        )
        measuring = [callbacks.JsonLogger(), callbacks.ComputeBudget()]
        measuring += [callbacks.ExpertLoadBalance(every=1)] if kind == "mixtral" else []
        ds.Trainer(model(kind), args, train_dataset=Sentences(), callbacks=measuring).train()
        records += [*read_records(output_dir / kind / "logs" / "train.jsonl")]
    wanted = ("loss", "grad_norm", "total_petaflops", "tokens")
    return [
        {name: value for name, value in each.items() if name in wanted or name.startswith("expert_load")}
        for each in records
        if "grad_norm" in each
    ]


def test_they_train_as_one_process_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    [alone] = run_ranks(train, 1, tmp_path / "one", "none")
    assert {"loss", "grad_norm", "total_petaflops"} <= alone[0].keys()
    for spread, number in (("tp", 2), ("pp x tp", 4)):
        ranks = run_ranks(train, number, tmp_path / spread.replace(" ", "_"), spread)
        assert all(each == ranks[0] for each in ranks)
        assert len(alone) == len(ranks[0]) == 4
        for ours, expected in zip(ranks[0], alone, strict=True):
            assert ours == pytest.approx(expected, rel=1e-4)
