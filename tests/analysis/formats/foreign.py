"""Logs of other programs, made by these programs: a small training run each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Line(nn.Module):
    """A model as Hugging Face's Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        predicted = self.linear(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(predicted, labels), "logits": predicted}


def rows(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 4, generator=generator)
    return [{"x": x, "labels": x.sum()} for x in inputs]


def train_with_transformers(folder: Path) -> None:
    """Twelve steps, a record every two, an evaluation every six, a checkpoint every four; TensorBoard, too."""
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=12,
        per_device_train_batch_size=4,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=6,
        save_steps=4,
        learning_rate=0.05,
        report_to=["tensorboard"],
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(Line(), args, train_dataset=rows(16), eval_dataset=rows(8)).train()


def train_with_lightning(folder: Path) -> None:
    """Twelve steps in three epochs, a record every two, an evaluation an epoch."""
    import pytorch_lightning as lightning
    from pytorch_lightning.loggers import CSVLogger
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.line = Line()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss = self.line(**batch)["loss"]
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
            self.log("val_loss", self.line(**batch)["loss"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    trainer = lightning.Trainer(
        logger=CSVLogger(folder),
        max_epochs=3,
        log_every_n_steps=2,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), DataLoader(rows(16), batch_size=4), DataLoader(rows(8), batch_size=4))  # type: ignore[arg-type]
