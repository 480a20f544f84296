"""A tiny Llama, trained by other programs and here on the same batches in the same order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dalsegno as ds
from checkpoint import llama
from dalsegno.callbacks import JsonLogger
from dalsegno.logs import read_records

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
    keywords = {
        name: more.pop(name)
        for name in ("optimizer", "lr_scheduler", "train_dataset", "train_dataloader")
        if name in more
    }
    if "train_dataset" not in keywords:
        keywords.setdefault("train_dataloader", in_order())
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


def one_group(net: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """An optimizer of one group, and a schedule that falls to zero at step 26."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)


@dataclass
class Loop:
    """A loop as people write it: clip, step, schedule."""

    net: Any
    optimizer: torch.optim.Optimizer
    schedule: Any
    losses: list[float] = field(default_factory=list)

    @classmethod
    def new(cls) -> Loop:
        net = model()
        return cls(net, *one_group(net))

    def run(self, first: int, last: int) -> Loop:
        for batch in itertools.islice(itertools.chain(in_order(), in_order()), first, last):
            loss = self.net(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return self


def continued_here(run: Path) -> tuple[list[float], nn.Module]:
    """The losses from the checkpoint to step 26, and the model then."""
    net = model(seed=7)
    optimizer, schedule = one_group(net)
    result = trainer_here(run, net, optimizer=optimizer, lr_scheduler=schedule).train()
    assert result.global_step == STEPS
    return losses_here(run)[-(STEPS - BEGUN) :], net
