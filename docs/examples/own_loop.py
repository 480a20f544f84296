"""A loop written by hand, with the events, logs and checkpoints of dalsegno around it.

python docs/examples/own_loop.py runs/loop          # kill it whenever you like; the same command resumes
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import dalsegno as ds
from dalsegno.callbacks import GradNormLogger, JsonLogger
from dalsegno.data import ResumableSampler


def letters_and_next(text: str, context: int) -> TensorDataset:
    """Each piece of `context` bytes, with the byte that follows."""
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    return TensorDataset(content.unfold(0, context, 1)[:-1], content[context:])


def train(output_dir: Path, steps: int = 400) -> ds.TrainResult:
    """Train from the newest checkpoint in `output_dir` to step `steps`."""
    torch.manual_seed(0)
    data = letters_and_next(Path(__file__).read_text(encoding="utf-8"), context=8)
    model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    loader = StatefulDataLoader(data, batch_sampler=ResumableSampler(len(data), batch_size=32, seed=0))
    args = ds.TrainingArguments(output_dir, max_steps=steps, save_steps=steps // 4, logging_steps=max(1, steps // 20))

    def loss_of(batch: list[Tensor]) -> Tensor:
        context, following = batch
        return nn.functional.cross_entropy(model(context), following)

    with ds.Run(
        args,
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        loader=loader,
        callbacks=[JsonLogger(run="own loop"), GradNormLogger()],
    ) as run:  # restores everything
        for batch in run.batches():
            loss = loss_of(batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            run.step_end(loss=loss, grad_norm=norm)  # log, save, stop: whatever is due
    return run.result


if __name__ == "__main__":
    sys.exit(train(Path(sys.argv[1])).exit_status)
