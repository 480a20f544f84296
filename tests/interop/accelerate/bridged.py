"""A loop around an Accelerator with a Bridge in it. At the top of a module, so that ranks can import it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterable, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import dalsegno as ds
from dalsegno.callbacks import CheckLoss, GradNormLogger, JsonLogger
from dalsegno.interop import accelerate as bridge_module
from dalsegno.interop.accelerate import Bridge
from dalsegno.testing import TinyRegression, tiny_regression_data
from interop.bridges import Reader, alone, pages, several, states_in
from support.listeners import Trace


def loop(
    output_dir: Path,
    callbacks: Iterable[Any],
    *,
    resume: Path | None = None,
    skips: bool = True,
    dropout: bool = False,
    kill_at: int = -1,
    **settings: Any,
) -> dict[str, Any]:
    """Five steps an epoch on one rank. Returns the step at which it ended, and norms computed in a plain way."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = DataLoader(tiny_regression_data(40), batch_size=4)
    module = TinyRegression()
    if not dropout:  # a new iterator of a loader draws a random number
        module.layers[2] = torch.nn.Identity()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    raw = accelerator.unwrap_model(model)
    valid = next(iter(DataLoader(tiny_regression_data(8, seed=1), batch_size=8)))
    args = ds.TrainingArguments(
        output_dir, **{"max_steps": 8, "logging_steps": 2, "eval_steps": 2, "save_steps": 4, **settings}
    )
    bridge = Bridge(args, callbacks, accelerator, model=model, optimizer=optimizer, loader=loader)
    if resume is not None:
        accelerator.load_state(str(resume))
    norms: dict[int, dict[str, float]] = {}
    with bridge:
        while not bridge.should_stop:
            done = bridge.step % -(-len(loader) // 2) * 2
            for batch in accelerator.skip_first_batches(loader, done) if done and skips else loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                        norms[bridge.step + 1] = {
                            name: sqrt(float((each.grad.double() ** 2).sum())) for name, each in raw.named_parameters()
                        }
                    optimizer.step()
                    optimizer.zero_grad()
                bridge.batch_end()
                if bridge.should_evaluate:
                    raw.eval()
                    with bridge.evaluating(), torch.no_grad():
                        loss = float(raw(**valid))
                    bridge.evaluated({"eval_loss": loss})
                    raw.train()
                if bridge.should_save:
                    accelerator.save_state(str(output_dir / f"checkpoint-{bridge.step}"))
                if bridge.step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if bridge.should_stop:
                    break
        return {"ended at": bridge.step, "norms": norms}


def train_until_killed(output_dir: Path, step: int) -> None:
    alone()
    loop(output_dir, several(), kill_at=step)


def loop_on_a_rank(output_dir: Path) -> dict[str, Any]:
    rank = int(os.environ["RANK"])

    class OnRankOne(ds.Callback):
        def on_step_end(self, ctx: Any) -> None:
            if rank == 1 and ctx.step == 5:
                ctx.control.stop("seen by rank 1")

    return loop(output_dir, [JsonLogger(), GradNormLogger(), OnRankOne()], max_steps=6)


def read(folder: Path, callbacks: Sequence[Any], model: Reader, steps: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = DataLoader(pages(), batch_size=4)  # type: ignore[arg-type]
    wrapped, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    args = ds.TrainingArguments(folder, max_steps=steps, logging_steps=1, save_steps=4)
    bridge = Bridge(args, callbacks, accelerator, model=wrapped, optimizer=optimizer, loader=loader)
    if (folder / "four").exists():
        accelerator.load_state(str(folder / "four"))
    with bridge:
        done = bridge.step % 3 * 2 if os.environ.get("WORLD_SIZE", "1") == "1" else 0
        while not bridge.should_stop:
            for batch in accelerator.skip_first_batches(loader, done) if done else loader:
                with accelerator.accumulate(wrapped):
                    accelerator.backward(wrapped(**batch)["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
                bridge.batch_end()
                if bridge.should_save and bridge.step == 4:
                    accelerator.save_state(str(folder / "four"))
                if bridge.should_stop:
                    break
            done = 0


# --- the contract of every bridge -------------------------------------------------------------------------------------

PAGE = "accelerate"
UNSUPPORTED_EVENTS = bridge_module.UNSUPPORTED_EVENTS
REFUSED = CheckLoss, "CheckLoss needs on_microbatch_end, which a loop around"
EVALUATIONS = "set eval_steps"
KILLED_AT, REPEATED = 7, "5 to 7"
"""A step, and those that a resume repeats."""
EXAMPLE = "runs/ac", range(2, 13, 2)
"""Where the page's example writes, and the steps that it logs."""
READS = {"": read}
"""Train a :class:`Reader`, for so many steps altogether; saved after four."""
COUNTS: set[str] = set()
"""Those that count tokens and FLOPs."""


def bridge(callbacks: list[object], output_dir: Path) -> Bridge:
    module = TinyRegression()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    args = ds.TrainingArguments(output_dir, max_steps=1)
    return Bridge(args, callbacks, Accelerator(cpu=True), model=module, optimizer=optimizer, loader=[1])


def train(output_dir: Path, callbacks: Iterable[Any], *, resume: Path | None = None, evaluates: bool = True) -> int:
    settings = {} if evaluates else {"eval_strategy": "no"}
    return int(loop(output_dir, callbacks, resume=resume, **settings)["ended at"])


def train_without(output_dir: Path) -> int:
    """Save a checkpoint without a Bridge's states. Accelerate itself does not count steps."""
    loop(output_dir, [Trace()], max_steps=4)
    shutil.rmtree(output_dir / "checkpoint-4" / "dalsegno")
    return 0


def checkpoints(output_dir: Path) -> dict[int, Path]:
    """By their step."""
    return {int(path.name.partition("-")[2]): path for path in output_dir.glob("checkpoint-*")}


def states(checkpoint: Path) -> dict[str, Any]:
    return states_in(checkpoint / "dalsegno")


def damage(checkpoint: Path) -> None:
    path = checkpoint / "dalsegno" / "shared.json"
    path.write_bytes(path.read_bytes().replace(b"JsonLogger", b"JsonLooger"))
