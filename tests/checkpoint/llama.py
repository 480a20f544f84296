"""A tiny Llama of transformers, trained on two ranks with FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import dalsegno as ds

VOCABULARY = 40


def config(tied: bool) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )


class Sentences(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Both of shape (6,)."""
        tokens = (torch.arange(6) * 7 + index) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def train_tied_and_untied(folder: Path) -> dict[bool, dict[str, Any]]:
    """Both, in one process: importing transformers takes longer than training."""
    return {tied: train(folder / str(tied), tied) for tied in (True, False)}


def train(output_dir: Path, tied: bool) -> dict[str, Any]:
    """Train two steps; returns the logits (6, vocabulary) of the first sentence and every full parameter as arrays."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(config(tied))
    args = ds.TrainingArguments(
        output_dir,
        max_steps=2,
        save_steps=2,
        logging_steps=0,
        learning_rate=0.01,
        per_device_train_batch_size=2,
        parallel="fsdp",
        use_cpu=True,
        disable_tqdm=True,
    )
    ds.Trainer(model, args, train_dataset=Sentences()).train()
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=Sentences()[0]["input_ids"][None]).logits[0]
    state = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in state_of(model)}
    return {"logits": logits.numpy(), "state": {name: each.detach().numpy() for name, each in state.items()}}


def state_of(model: Any) -> list[tuple[str, Any]]:
    return list(model.state_dict().items())
