"""A training loop written by hand, as a user would, around ``ds.Run``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import dalsegno as ds
from dalsegno.callbacks import DivergenceDetector, GradNormLogger, JsonLogger
from dalsegno.testing import DataOrder, TinyRegression, tiny_regression_data


class OwnLoop:
    """Everything that a ``train.py`` would build, and its loop as ``train``."""

    def __init__(self, output_dir: Path, *callbacks: ds.Callback, **settings: object) -> None:
        torch.manual_seed(0)
        self.model = TinyRegression()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [10, 20])
        self.loader = DataLoader(tiny_regression_data(50), batch_size=4, shuffle=True)
        chosen = {"max_steps": 40, "save_steps": 7, "logging_steps": 5, "eval_steps": 10, "disable_tqdm": True}
        self.args = ds.TrainingArguments(output_dir, **{**chosen, **settings})
        self.callbacks = callbacks or (JsonLogger(), GradNormLogger(), DivergenceDetector(), DataOrder())

    def run(self, state: Mapping[str, Any] | None = None) -> ds.Run:
        return ds.Run(
            self.args,
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            loader=self.loader,
            callbacks=self.callbacks,
            evaluate=self.evaluate,
            state=state,
        )

    def train(self) -> ds.TrainResult | None:
        with self.run() as run:
            for batch in run.batches():
                run.step_end(loss=self.update(batch))
        return run.result

    def update(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self.model(**batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss

    def evaluate(self) -> dict[str, float]:
        self.model.eval()
        data = tiny_regression_data(20, seed=1)
        with torch.no_grad():
            losses = [self.model(**{key: value[None] for key, value in data[index].items()}) for index in range(20)]
        self.model.train()
        return {"eval_loss": float(torch.stack(losses).mean())}
