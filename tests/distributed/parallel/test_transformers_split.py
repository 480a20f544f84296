"""Models of transformers under every layout: a Llama, split by its own plan, and a mixture of experts, by one for its
attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

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
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))


COUNTED = ("none", "tp", "pp")
"""Layouts under which FLOPs are counted, which takes longer than the training."""


def attention() -> dict[str, Any]:
    rows = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    return {**rows, "model.layers.*.self_attn.o_proj": RowwiseParallel()}


def modes(plan: Any) -> dict[str, tuple[Any, int, int]]:
    """Setting, ranks, and those of them with different data."""
    split, cut = ds.TensorParallel(plan, size=2), ds.Pipeline(2, "gpipe", microbatches=2)
    return {
        "none": ("none", 1, 1),
        "fsdp": (ds.FSDP(), 2, 2),
        "tp": (split, 2, 1),
        "pp": (cut, 2, 1),
        "hsdp": (ds.HSDP(replicate=2), 4, 4),
        "pp x fsdp": ([cut, ds.FSDP()], 4, 2),
        "tp x fsdp": ([split, ds.FSDP()], 4, 2),
        "pp x tp": ([cut, split], 4, 1),
    }


def train(output_dir: Path, spreads: list[str]) -> dict[str, list[dict[str, float]]]:
    """The numbers of both models' records under each layout: losses, norms, loads of experts, and FLOPs."""
    return {spread: of_llama_and_mixtral(output_dir / str(number), spread) for number, spread in enumerate(spreads)}


def of_llama_and_mixtral(output_dir: Path, spread: str) -> list[dict[str, float]]:
    records = []
    for kind, plan in (("llama", "auto"), ("mixtral", attention())):
        parallel, _, data_ranks = modes(plan)[spread]
        args = ds.TrainingArguments(
            output_dir / kind,
            max_steps=2,
            save_steps=0,
            logging_steps=1,
            optim="sgd",
            learning_rate=0.1,
            disable_tqdm=True,
            use_cpu=True,
            per_device_train_batch_size=len(Sentences()) // data_ranks,
            parallel=parallel,
        )
        measuring: list[ds.Callback] = [callbacks.JsonLogger()]
        measuring += [callbacks.ComputeBudget()] if spread in COUNTED else []
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
    layouts = modes("auto")
    found: dict[int, list[dict[str, Any]]] = {}
    for number in (1, 2, 4):
        spreads = [spread for spread, (_, ranks, _) in layouts.items() if ranks == number]
        found[number] = run_ranks(train, number, tmp_path / str(number), spreads)
    [alone] = [each["none"] for each in found[1]]
    assert {"loss", "grad_norm", "total_petaflops"} <= alone[0].keys()
    for spread, (_, number, _) in layouts.items():
        ranks = [each[spread] for each in found[number]]
        assert all(each == ranks[0] for each in ranks), spread
        assert len(alone) == len(ranks[0]) == 4
        for ours, expected in zip(ranks[0], alone, strict=True):
            left_out = () if spread in COUNTED else ("total_petaflops",)
            same = {name: value for name, value in expected.items() if name not in left_out}
            assert ours == pytest.approx(same, rel=1e-4), spread


def refusal(output_dir: Path) -> str:
    sizes = {**SIZES, "num_key_value_heads": 1}
    args = ds.TrainingArguments(output_dir, max_steps=1, use_cpu=True, parallel=ds.TensorParallel("auto"))
    with pytest.raises(ds.ConfigurationError) as refused:
        ds.Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), args, train_dataset=Sentences())
    return str(refused.value)


def test_heads_that_the_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    message = "2 ranks cannot share the 1 num_key_value_heads of LlamaForCausalLM"
    assert all(message in each for each in run_ranks(refusal, 2, tmp_path))
