"""Makes the picture of docs/guides/stopping.md: ``python docs/images/rollback.py [FOLDER]``, with the runs in FOLDER.

A small network learns a function. Some samples have wrong targets, 1,000 times too large, and come in a row; or the
learning rate is too high. Without rollbacks the training is lost. With them it reaches the loss of a training without
the wrong samples, or with a fitting learning rate.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

import dalsegno as ds
from dalsegno.callbacks import CheckLoss, DivergenceDetector, JsonLogger

HERE = Path(__file__).parent
STEPS = 300
BATCH = 16
WRONG = range(150 * BATCH, 156 * BATCH)
"""Numbers of the samples with wrong targets: those of six steps, since the data is not shuffled."""
POLICY = ds.RecoveryPolicy(margin=10, skip=5, budget=4)
SLOWER = ds.RecoveryPolicy(margin=10, skip=None, lr_factor=0.25, budget=4)


class Function(Dataset[dict[str, Tensor]]):
    """Samples of sin(x₁) + x₂·x₃, in an order of their own."""

    def __init__(self, seed: int, length: int, wrong: Sequence[int] = ()) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._x = torch.randn(length, 4, generator=generator)
        self._y = torch.sin(self._x[:, 0]) + self._x[:, 1] * self._x[:, 2]
        self._y += 0.1 * torch.randn(length, generator=generator)
        self._y[torch.tensor(wrong, dtype=torch.long)] *= 1000

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self._x[index], "y": self._y[index]}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (batch, 4), y: (batch,)."""
        return nn.functional.mse_loss(self.layers(x).squeeze(-1), y)


def train(
    folder: Path, *, wrong: Sequence[int] = (), rate: float = 0.05, policy: ds.RecoveryPolicy | None = None
) -> ds.TrainResult:
    """One run, with plain gradient descent. ``policy``: go back by it; None: train on, whatever happens."""
    torch.manual_seed(0)
    model = Network()
    args = ds.TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=1024,
        max_grad_norm=0,
        logging_steps=1,
        eval_steps=STEPS,
        save_steps=25,
        seed=1,
        recovery=policy,
        use_cpu=True,
        disable_tqdm=True,
    )
    watchers: list[Any] = []
    if policy is not None:
        watchers = [DivergenceDetector(action="rollback", threshold=5.0, smoothing=0.5), CheckLoss(action="rollback")]
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    trainer = ds.Trainer(
        model,
        args,
        train_dataloader=torch.utils.data.DataLoader(Function(0, STEPS * BATCH * 2, wrong), batch_size=BATCH),
        eval_dataset=Function(1, 1024),
        optimizer=optimizer,
        callbacks=[JsonLogger(), *watchers],
    )
    for name in ("ProgressCallback", "InfoCallback", "DefaultMetrics"):
        trainer.remove_callback(name)
    return trainer.train()


RUNS: dict[str, dict[str, Any]] = {
    "without wrong samples": {},
    "wrong samples": {"wrong": WRONG},
    "wrong samples, going back": {"wrong": WRONG, "policy": POLICY},
    "learning rate too high": {"rate": 0.2},
    "learning rate too high, going back": {"rate": 0.2, "policy": SLOWER},
}


def eval_loss(folder: Path) -> float:
    """At the end of the run."""
    return float(next(iter(ds.open_log(folder))).metric("eval_loss").values[-1])


def main(folder: Path) -> None:
    for name, settings in RUNS.items():
        if not (folder / name / "run.json").exists():
            train(folder / name, **settings)
        print(f"{name}: eval_loss {eval_loss(folder / name):.4g}")
    logs = [next(iter(ds.open_log(folder / name))) for name in ("wrong samples", "wrong samples, going back")]
    picture = ds.plot_logs(logs, compare=True, metrics=["loss"], view=ds.View(log=True, ylim=(0.01, 1e6)))
    image = Image.open(io.BytesIO(picture._repr_png_())).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(HERE / "rollback.png", optimize=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
