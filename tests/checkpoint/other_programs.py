"""A tiny Llama, trained by other programs and here on the same batches in the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.logs import read_records

from . import llama

BATCH, SAMPLES, STEPS = 2, 48, 26
BEGUN = 6
"""Steps before the move; 20 follow."""


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Samples that are all different, so that another order gives other losses."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) * (index % 7 + 1) + index) % llama.VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def model(seed: int = 0, *, tied: bool = True) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(llama.config(tied))


def in_order() -> DataLoader[Any]:
    return DataLoader(Sentences(), batch_size=BATCH, shuffle=False)


def trainer_here(output_dir: Path, net: nn.Module, **more: Any) -> ds.Trainer:
    """Saves at the end of ``max_steps``; the learning rate falls to zero at step 26."""
    settings = {"max_steps": STEPS, "save_steps": 0, "learning_rate": 0.01, "weight_decay": 0.1}
    keywords = {name: more.pop(name) for name in ("optimizer", "lr_scheduler", "train_dataset") if name in more}
    if "train_dataset" not in keywords:
        keywords["train_dataloader"] = in_order()
    args = ds.TrainingArguments(
        output_dir,
        **{**settings, **more},
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        per_device_train_batch_size=BATCH,
    )
    return ds.Trainer(net, args, callbacks=[JsonLogger()], **keywords)


def losses_here(output_dir: Path) -> list[float]:
    """Of each step."""
    return [each["loss"] for each in read_records(output_dir / "logs/train.jsonl") if "loss" in each]
