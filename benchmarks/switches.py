"""Switches: the memory that each switch for large models keeps, on a CPU; nothing is timed.

Kept for the backward pass is what the forward pass has made and still holds when it returns: each storage once, without
the parameters. Gathered are the parameters that FSDP puts together in it. An optimizer's state is that after its second
step. Peaks, which an allocator and the kernels' own buffers decide too, are not measured.
"""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dalsegno as ds
from dalsegno.system.progress import format_bytes
from dalsegno.testing import run_ranks

from .by_hand import Texts, Transformer
from .row import Row, three_digits

WIDTH, DEPTH, BATCH = 256, 8, 8
"""Of the transformer: 6.4 M parameters, texts of 64 tokens."""

SMALL = {"width": 16, "depth": 2}
"""Of ``run``: with these it takes a few seconds; the figures are those of a tiny model."""

CHECKPOINTED = {"gradient_checkpointing": True}
SHARDED: dict[str, Any] = {"parallel": "fsdp"}
STATES = ("adamw", "muon", "adafactor", "sgd")


def run(width: int = WIDTH, depth: int = DEPTH) -> list[Row]:
    alone: list[dict[str, Any]] = [{}, CHECKPOINTED, *({"optim": name} for name in STATES)]
    with TemporaryDirectory() as folder:
        plain, checked, *others = run_ranks(_trainings, 1, Path(folder, "alone"), width, depth, alone)[0]
        whole, halved = run_ranks(
            _trainings, 2, Path(folder, "fsdp"), width, depth, [SHARDED, SHARDED | {"bf16": True}]
        )[0]
    states = dict(zip(STATES, (each["state"] for each in others), strict=True))
    return [
        _row("kept for the backward pass, gradient_checkpointing=True", checked["kept"], "without", plain["kept"]),
        _row("gathered in a forward pass by FSDP, bf16=True", halved["gathered"], "without", whole["gathered"]),
        *(_row(f"state of optim={name!r}", states[name], "adamw", states["adamw"]) for name in STATES[1:]),
    ]


def _row(what: str, ours: int, other: str, its: int) -> Row:
    times = f"{three_digits(ours / its)} ×" if ours else ""
    return Row(what, format_bytes(ours), f"{other}: {format_bytes(its)}", times)


def _trainings(folder: Path, width: int, depth: int, settings: list[dict[str, Any]]) -> list[dict[str, int]]:
    """The bytes of each training of two steps, by what they are."""
    return [_training(folder / str(number), width, depth, each) for number, each in enumerate(settings)]


def _training(folder: Path, width: int, depth: int, settings: dict[str, Any]) -> dict[str, int]:
    measured = Measured()
    args = ds.TrainingArguments(
        folder,
        max_steps=2,
        per_device_train_batch_size=BATCH,
        logging_steps=0,
        save_steps=0,
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        trainer = ds.Trainer(Transformer(width, depth), args, train_dataset=Texts(8 * BATCH), callbacks=[measured])
        trainer.train()
    return {"kept": measured.kept, "gathered": measured.gathered, "state": measured.state}


class Measured(ds.Callback):
    """In bytes: what the last forward pass has kept and gathered, and the optimizer's state at the end."""

    sets_control_flags = False

    def __init__(self) -> None:
        self.kept = self.gathered = self.state = 0
        self._made = Made()

    def on_before_forward(self, ctx: ds.BeforeForwardContext) -> None:
        self._made = Made()
        self._made.__enter__()

    def on_after_forward(self, ctx: ds.AfterForwardContext) -> None:
        self._made.__exit__(None, None, None)
        self.kept = self._made.held({each.untyped_storage()._cdata for each in ctx.model.parameters()})
        self.gathered = self._made.gathered

    def on_train_end(self, ctx: ds.TrainEndContext) -> None:
        state = tree_leaves(ctx.optimizer.state_dict()["state"])
        self.state = sum(each.nbytes for each in state if isinstance(each, Tensor))


class Made(TorchDispatchMode):
    """Notes each storage that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = 0
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.c10d._allgather_base_.default:
            self.gathered += args[0].nbytes
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                self._sizes[StorageWeakRef(storage)] = storage.nbytes()
        return made

    def held(self, but: set[int]) -> int:
        """Bytes that are still in use, except in the storages ``but``."""
        return sum(size for each, size in self._sizes.items() if not each.expired() and each.cdata not in but)
