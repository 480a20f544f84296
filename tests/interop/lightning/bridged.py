"""Runs of Lightning's Trainer with a Bridge in it. At the top of a module, so that ranks can import it."""

from __future__ import annotations

import importlib
import os
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import frexp, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dalsegno.callbacks import GradientNoiseScale, JsonLogger
from dalsegno.interop.lightning import Bridge
from dalsegno.interop.lightning import bridge as bridge_module
from dalsegno.interop.states import unpack
from dalsegno.testing import tiny_regression_data
from interop.bridges import Reader, alone, pages, several, states_in
from support.listeners import Trace

PACKAGE = os.environ.get("LIGHTNING_PACKAGE", "pytorch_lightning")
"""Or ``lightning.pytorch``."""

pl: Any = importlib.import_module(PACKAGE)


class Module(pl.LightningModule):  # type: ignore[misc]
    """Without random numbers, which Lightning does not restore."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.lr = lr

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(batch["x"]), batch["y"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def trainer(output_dir: Path, *callbacks: Any, saver: Any = None, **settings: Any) -> Any:
    """Five steps an epoch, each epoch is evaluated and saved at its end."""
    saver = pl.callbacks.ModelCheckpoint(save_top_k=-1, save_on_train_epoch_end=True) if saver is None else saver
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(
        default_root_dir=output_dir,
        accelerator="cpu",
        callbacks=[*callbacks, saver],
        **{"max_epochs": 4, "log_every_n_steps": 2, "gradient_clip_val": 0.5, **quiet, **settings},
    )


def data() -> tuple[Any, Any]:
    return DataLoader(tiny_regression_data(20), batch_size=4), DataLoader(tiny_regression_data(8, seed=1), batch_size=4)


def fit(output_dir: Path, callbacks: Iterable[Any], *others: Any, ckpt: Any = None, **settings: Any) -> Any:
    one = trainer(output_dir, *others, Bridge(callbacks), **settings)
    one.fit(Module(), *data(), ckpt_path=ckpt)
    return one


class At(pl.Callback):  # type: ignore[misc]
    """Does something after a step."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        self.step, self.act = step, act

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            self.act()


def train_until_killed(output_dir: Path, step: int) -> None:
    alone()
    fit(output_dir, several(), At(step, lambda: os.kill(os.getpid(), signal.SIGKILL)))


def newest(output_dir: Path) -> Path:
    return max((output_dir / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


def states(checkpoint: Path) -> dict[str, Any]:
    """Read without unpickling any object."""
    content = torch.load(checkpoint, weights_only=True)["callbacks"]["Bridge"]["dalsegno"]
    with tempfile.TemporaryDirectory() as folder:
        unpack(content, Path(folder))
        return states_in(Path(folder))


class Auditor(pl.Callback):  # type: ignore[misc]
    """Computes what dalsegno's callbacks compute, in a plain way."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.average: dict[str, torch.Tensor] = {}
        self.norms: dict[int, dict[str, float]] = {}
        self.bins: dict[int, dict[str, Counter[int]]] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = {name: each.detach().clone() for name, each in pl_module.named_parameters()}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Before clipping: to the norm 0.5."""
        gradients = {name: each.grad.flatten().tolist() for name, each in pl_module.named_parameters()}
        step = trainer.global_step + 1
        norms = {name: sqrt(sum(x * x for x in each)) for name, each in gradients.items()}
        factor = min(1.0, 0.5 / (sqrt(sum(norm * norm for norm in norms.values())) + 1e-6))
        self.norms[step] = {name: norm * factor for name, norm in norms.items()}
        self.bins[step] = {
            name: Counter(min(max(frexp(x)[1] - 1, -40), 15) for x in each if x) for name, each in gradients.items()
        }

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step in self.norms:
            for name, each in pl_module.named_parameters():
                self.average[name].lerp_(each.detach(), 1 - self.decay)


class Trained(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, model: Reader) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return self.model(input_ids, labels)

    def training_step(self, batch: Any, index: int) -> Any:
        return self(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def read(folder: Path, callbacks: Sequence[Any], model: Reader, steps: int) -> None:
    saved = folder / "saved" / "four.ckpt"
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=steps,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        callbacks=[
            Bridge(callbacks),
            pl.callbacks.ModelCheckpoint(saved.parent, filename="four", every_n_train_steps=4),
        ],
        **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False),
    )
    loader = DataLoader(pages(), batch_size=4)  # type: ignore[arg-type]
    trainer.fit(Trained(model), loader, ckpt_path=saved if saved.exists() else None)


# --- the contract of every bridge -------------------------------------------------------------------------------------

PAGE = "lightning"
UNSUPPORTED_EVENTS = bridge_module.UNSUPPORTED_EVENTS
REFUSED = GradientNoiseScale, "GradientNoiseScale needs on_before_backward, which Lightning"
EVALUATIONS = "pass val_dataloaders="
KILLED_AT, REPEATED = 13, "11 to 12"
"""A step, and those that a resume repeats."""
EXAMPLE = "runs/pl", range(2, 21, 2)
"""Where the page's example writes, and the steps that it logs."""
READS = {"": read}
"""Train a :class:`Reader`, for so many steps altogether; saved after four."""
COUNTS = {""}
"""Those that count tokens and FLOPs."""


def bridge(callbacks: list[object], output_dir: Path) -> Bridge:
    return Bridge(callbacks)


def train(output_dir: Path, callbacks: Iterable[Any], *, resume: Path | None = None, evaluates: bool = True) -> int:
    one = trainer(output_dir, Bridge(callbacks))
    loaders = data() if evaluates else data()[:1]
    one.fit(Module(), *loaders, ckpt_path=resume)
    return int(one.global_step)


def train_with_two(output_dir: Path) -> None:
    class Second(Bridge):  # Lightning itself refuses two callbacks of one class with state
        pass

    trainer(output_dir, Bridge([Trace()]), Second([JsonLogger()])).fit(Module(), *data())


def train_without(output_dir: Path) -> int:
    """Save a checkpoint without a Bridge. Returns the step at which the library itself resumes from it."""
    trainer(output_dir, max_epochs=2).fit(Module(), *data())
    return 10


def checkpoints(output_dir: Path) -> dict[int, Path]:
    """By their step; of several, the newest."""
    paths = sorted((output_dir / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    return {int(re.findall(r"step=(\d+)", path.stem)[0]): path for path in paths}


def damage(checkpoint: Path) -> None:
    content = torch.load(checkpoint, weights_only=True)
    content["callbacks"]["Bridge"]["dalsegno"]["shared.json"][20] ^= 1
    torch.save(content, checkpoint)
