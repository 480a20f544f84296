"""Lightning's Trainer over the workload: CSVLogger, no checkpoints, no progress bar."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from benchmarks.pairs import Turns, against_bare
from benchmarks.workload import BATCH, LOGGING_STEPS, MAX_GRAD_NORM, STEPS, Rows, parts


class TakingTurns(Callback):
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._turns.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._turns.step()


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model, self._optimizer, self._scheduler = parts()

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.model(**batch)["loss"]
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return {"optimizer": self._optimizer, "lr_scheduler": {"scheduler": self._scheduler, "interval": "step"}}


def train(rows: Rows, folder: Path, turns: Turns) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        gradient_clip_val=MAX_GRAD_NORM,
        log_every_n_steps=LOGGING_STEPS,
        logger=CSVLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[TakingTurns(turns)],
    )
    trainer.fit(Module(), DataLoader(rows, batch_size=BATCH, shuffle=True))


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(json.dumps(against_bare(train)))
