"""LoRA of a small Llama: only the adapters are trained, and the checkpoints resume them bit by bit.

    pip install transformers peft
    python docs/examples/lora.py runs/lora

The model is built from a configuration, so that nothing is downloaded; yours comes from `from_pretrained`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import dalsegno as ds
from dalsegno.callbacks import CountParams, JsonLogger


class Bytes(Dataset[dict[str, Tensor]]):
    """Pieces of a file; bytes are the tokens."""

    def __init__(self, path: Path, length: int) -> None:
        content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        self.pieces = content[: len(content) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def build_model() -> nn.Module:
    """A Llama with adapters in its attention; everything else is frozen."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    adapters = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj"])
    return get_peft_model(LlamaForCausalLM(config), adapters)


def build(output_dir: Path, steps: int = 200) -> ds.Trainer:
    """The trainer. The optimizer gets the parameters that are not frozen."""
    torch.manual_seed(0)
    args = ds.TrainingArguments(
        output_dir,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=max(1, steps // 20),
        save_steps=max(1, steps // 4),
    )
    return ds.Trainer(
        build_model(),
        args,
        train_dataset=Bytes(Path(__file__), length=64),
        callbacks=[JsonLogger(run="LoRA"), CountParams()],
    )


if __name__ == "__main__":
    trainer = build(Path(sys.argv[1]))
    result = trainer.train()
    trainer.model.save_pretrained(Path(sys.argv[1]) / "adapter")  # the adapters alone, as peft reads them
    sys.exit(result.exit_status)
