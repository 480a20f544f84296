"""A character-level GPT that learns Python from the modules of the standard library.

python docs/examples/char_gpt.py runs/gpt           # kill it whenever you like; the same command resumes
torchrun --nproc-per-node 2 docs/examples/char_gpt.py runs/gpt
dalsegno logs tail -f runs/gpt
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import dalsegno as ds
from dalsegno.callbacks import DivergenceDetector, GradNormLogger, JsonLogger

TEXT = "".join(
    path.read_text(encoding="utf-8") for package in (argparse, asyncio, json) for path in [Path(str(package.__file__))]
)
ALPHABET = sorted(set(TEXT))
CODE = {character: number for number, character in enumerate(ALPHABET)}


class Characters(Dataset[dict[str, Tensor]]):
    """Pieces of the text, each with the same piece one character on."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.codes = torch.tensor([CODE[character] for character in TEXT])

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        begin = index * self.length
        piece = self.codes[begin : begin + self.length + 1]
        return {"input_ids": piece[:-1], "labels": piece[1:]}


class Block(nn.Module):
    """Attention and a two-layer network, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """The model returns its loss: that is all the Trainer needs."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(layers)))
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        logits = self.head(self.blocks(self.characters(input_ids) + self.positions(places)))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(output_dir: Path, steps: int = 600, width: int = 64, length: int = 128) -> ds.Trainer:
    """The trainer; `dalsegno check-resume` takes the same function."""
    torch.manual_seed(0)
    data = Characters(length)
    train, valid = torch.utils.data.random_split(data, [0.9, 0.1], torch.Generator().manual_seed(0))
    every = max(1, steps // 6)
    args = ds.TrainingArguments(
        output_dir,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        warmup_steps=steps // 10,
        logging_steps=max(1, steps // 60),
        eval_steps=every,
        save_steps=every,
        requeue="SLURM_JOB_ID" in os.environ,  # in a Slurm job: see train.sbatch
    )
    return ds.Trainer(
        GPT(width, layers=2, length=length),
        args,
        train_dataset=train,
        eval_dataset=valid,
        callbacks=[JsonLogger(run="char GPT"), GradNormLogger(), DivergenceDetector(patience=3)],
    )


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1])).train().exit_status)
