"""A convolutional network on the handwritten digits that come with scikit-learn: 1,797 pictures of 8 × 8 pixels.

pip install scikit-learn
python docs/examples/digits_cnn.py runs/digits
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

import dalsegno as ds
from dalsegno.callbacks import EMA, EarlyStopping, JsonLogger


class CNN(nn.Module):
    """Two convolutions and a linear layer; returns the loss, and logits of shape (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 10),
        )  # fmt: skip

    def forward(self, pictures: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(pictures)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """A batch, whose entries are the model's arguments."""
    pictures, labels = zip(*samples, strict=True)
    return {"pictures": torch.stack(pictures), "labels": torch.stack(labels)}


def build(output_dir: Path, epochs: int = 20) -> ds.Trainer:
    """The trainer: the best of the evaluations is loaded at the end; three without progress end the run."""
    torch.manual_seed(0)
    digits = load_digits()
    pictures = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    data = TensorDataset(pictures, torch.tensor(digits.target))
    args = ds.TrainingArguments(
        output_dir,
        num_train_epochs=epochs,
        per_device_train_batch_size=64,
        learning_rate=3e-3,
        logging_steps=10,
        eval_strategy="epoch",
        save_strategy="epoch",
        metric_for_best_model="loss",
        load_best_model_at_end=True,
    )
    return ds.Trainer(
        CNN(),
        args,
        data_collator=collate,
        train_dataset=Subset(data, range(1500)),
        eval_dataset=Subset(data, range(1500, len(data))),
        callbacks=[JsonLogger(run="digits"), EMA(0.99), EarlyStopping(patience=3)],
    )


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1])).train().exit_status)
