"""What a run promises, shown on this machine's accelerator: ``python -m durability.device``.

Each check is a process of its own. A check that cannot be run here says why.

Args on the command line: names of checks; without any, all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dalsegno as ds
from dalsegno.callbacks import EMA, DivergenceDetector, GradNormLogger, JsonLogger, NaNChecker
from dalsegno.checkpoint import CheckpointManager, read_tensors
from dalsegno.testing import DataOrder, FaultPlan, TinyLanguageModel, compare_runs
from support.listeners import Listener
from support.runs import Counts, RunningLoss

from . import memory, soak

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
SECONDS = 240  # that a check may take
STEPS = 24


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random bytes, 64 a sample."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 256, (65,), generator=generator)
        return {"input_ids": ids[:-1], "labels": ids[1:]}


def trainer(output_dir: Path, model: nn.Module | None = None, **changes: Any) -> ds.Trainer:
    """A transformer with dropout under bf16 autocast, fused AdamW, and callbacks with state on the device."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    callbacks = changes.pop("callbacks", [])
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "optim": "adamw_fused",
        "bf16": True,
        "logging_steps": 3,
        "eval_steps": 8,
        "save_steps": 4,
        "disable_tqdm": True,
    }
    return ds.Trainer(
        model or TinyLanguageModel(width=128, depth=4),
        ds.TrainingArguments(output_dir, **settings | changes),
        train_dataset=Texts(),
        eval_dataset=torch.utils.data.Subset(Texts(), range(24)),
        callbacks=[
            JsonLogger(),
            GradNormLogger(),
            DivergenceDetector(),
            *([] if changes.get("torch_compile") else [NaNChecker()]),
            EMA(0.9),
            DataOrder(),
            Counts(),
            RunningLoss(),
            *callbacks,
        ],
    )


# --- killed runs --------------------------------------------------------------------------------------------------


def transformer_leg(output_dir: Path, plan: FaultPlan | None, victim: int) -> None:
    if plan is not None:
        plan.arm()
    trainer(output_dir).train()


def compiled_leg(output_dir: Path, plan: FaultPlan | None, victim: int) -> None:
    if plan is not None:
        plan.arm()
    trainer(output_dir, torch_compile=True, fp16=True, bf16=False).train()


def remembering_leg(output_dir: Path, plan: FaultPlan | None, victim: int) -> None:
    if plan is not None:
        plan.arm()
    trainer(output_dir, save_in_memory="Every(steps=1)", save_steps=8).train()


def frozen_leg(output_dir: Path, plan: FaultPlan | None, victim: int) -> None:
    if plan is not None:
        plan.arm()
    model = TinyLanguageModel(width=128, depth=4)
    model.blocks.requires_grad_(False)

    def change(ctx: Any) -> None:
        if ctx.state.global_step == STEPS // 2:
            ctx.model.blocks[0].qkv.weight.data.mul_(1.5)

    trainer(
        output_dir,
        model,
        save_in_memory="Every(steps=1)",
        callbacks=[Listener({"on_step_end": change}, name="changes a frozen layer")],
    ).train()


def killed(leg: soak.Leg, kills: int, files: Any = soak.FILES) -> str:
    with tempfile.TemporaryDirectory(prefix="dalsegno-device-") as folder:
        tally = soak.soak(kills, 1, Path(folder), 7, lambda _: None, leg=leg, files=files)
    print(soak.table([tally]), *tally.alarms, *tally.differences, sep="\n")
    assert tally.is_flawless
    return f"{tally.kills} kills, {tally.resumes} resumes, proofs {dict(tally.proofs)}"


# --- what a save contains -----------------------------------------------------------------------------------------


class Wide(nn.Module):
    """About ``blocks`` times 4 MB; a buffer changes in each forward."""

    def __init__(self, blocks: int, width: int = 1024) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))
        self.register_buffer("calls", torch.zeros(width * width))

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, width)."""
        self.calls.add_(1.0)
        for layer in self.layers:
            x = x + layer(x).tanh() * 0.1
        return x.square().mean()


class Vectors(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(1024, generator=torch.Generator().manual_seed(index))}


def settle() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def all_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies on the host, made while nothing else happens on the device."""
    settle()
    found = {f"model.{name}": value.detach().cpu().clone() for name, value in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        found |= {f"optimizer.{names[parameter]}.{k}": v.cpu().clone() for k, v in state.items() if v.dim()}
    settle()
    return found


def contents(output_dir: Path, changes: dict[str, Any], handlers: Callable[[], dict[str, Any]]) -> str:
    """Each checkpoint contains what the model and the optimizer were at the end of its step, bit by bit."""
    expected: dict[int, dict[str, Tensor]] = {}

    def remember(ctx: Any) -> None:
        expected[ctx.step] = all_of(ctx.model, ctx.optimizer)

    model = Wide(48)
    args: dict[str, Any] = {"max_steps": 24, "save_steps": 3, "logging_steps": 0, "optim": "adamw_fused"}
    ds.Trainer(
        model,
        ds.TrainingArguments(output_dir, disable_tqdm=True, learning_rate=1e-2, **args | changes),
        train_dataset=Vectors(),
        callbacks=[Listener({"on_before_save": remember, **handlers()}, name="remembers")],
    ).train()
    compared = 0
    for step, tensors in expected.items():
        checkpoint = CheckpointManager(output_dir).find(CheckpointManager(output_dir).path_of(step))
        assert checkpoint is not None
        saved = {
            f"{component}.{name}": value
            for component, values in read_tensors(checkpoint).items()
            for name, value in values.items()
        }
        for name, value in tensors.items():
            there = [key for key in saved if key == name or key.replace("state.", "") == name]
            assert len(there) == 1, (name, sorted(saved)[:8])
            if not torch.equal(saved[there[0]], value):
                different = int((saved[there[0]] != value).sum())
                raise AssertionError(f"step {step}: {name}: {different} of {value.numel()} elements differ")
            compared += 1
    return f"{len(expected)} checkpoints, {compared} tensors the same"


def no_handlers() -> dict[str, Any]:
    return {}


def changing_weights() -> dict[str, Any]:
    """A callback of the user's that changes weights outside of the optimizer, right after a save."""

    def scale(ctx: Any) -> None:
        with torch.no_grad():
            for parameter in ctx.model.parameters():
                parameter.mul_(0.999)

    return {"on_step_begin": scale}


# --- what a step costs --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """Where the program waits for the device, by torch's own count."""
    found: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        former = warnings.showwarning
        warnings.showwarning = lambda message, category, file, line, *_: found.append(f"{file}:{line}: {message}")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = former


def synchronizations(output_dir: Path) -> str:
    """Steps without a record, an evaluation or a save wait for nothing; a record waits once."""
    quiet: list[str] = []
    recorded: list[str] = []
    inside = contextlib.ExitStack()

    def begin(ctx: Any) -> None:
        if ctx.state.global_step >= 10:
            inside.found = inside.enter_context(waits())  # type: ignore[attr-defined]

    def end(ctx: Any) -> None:
        if ctx.state.global_step > 10:
            (recorded if ctx.state.global_step % 10 == 0 else quiet).extend(inside.found)  # type: ignore[attr-defined]
            inside.close()

    ds.Trainer(
        Wide(4),
        ds.TrainingArguments(output_dir, max_steps=60, logging_steps=10, save_steps=0, disable_tqdm=True),
        train_dataset=Vectors(),
        callbacks=[JsonLogger(), GradNormLogger(), Listener({"on_step_begin": begin, "on_step_done": end}, name="w")],
    ).train()
    places = sorted(set(quiet + recorded))
    return f"{len(quiet)} waits in 45 steps without a record, {len(recorded)} in 5 with one\n  " + "\n  ".join(places)


def peak(output_dir: Path) -> str:
    """Memory of the device: a save takes none."""
    peaks = []
    for save_steps in (0, 2):
        gc.collect()  # the former trainer's
        torch.cuda.reset_peak_memory_stats()
        ds.Trainer(
            Wide(48),
            ds.TrainingArguments(
                output_dir / str(save_steps), max_steps=12, logging_steps=0, save_steps=save_steps, disable_tqdm=True
            ),
            train_dataset=Vectors(),
        ).train()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < 1.01 * peaks[0], peaks
    return f"peak {peaks[0] / 1e6:.0f} MB without, {peaks[1] / 1e6:.0f} MB with background saves"


def step_times(output_dir: Path) -> str:
    """Seconds of a step, quiet and beside a background save; and how long a save stops the training."""
    times: dict[int, float] = {}
    last = [0.0]
    pauses: list[float] = []

    def end(ctx: Any) -> None:
        settle()
        now = time.perf_counter()
        times[ctx.state.global_step], last[0] = now - last[0], now

    def before(ctx: Any) -> None:
        settle()
        pauses.append(-time.perf_counter())

    def after(ctx: Any) -> None:
        if pauses and pauses[-1] < 0:
            pauses[-1] += time.perf_counter()

    handlers = {"on_step_end": end, "on_before_save": before, "on_step_begin": after}
    ds.Trainer(
        Wide(160),
        ds.TrainingArguments(output_dir, max_steps=120, logging_steps=0, save_steps=30, disable_tqdm=True),
        train_dataset=Vectors(),
        callbacks=[Listener(handlers, name="clock")],
    ).train()
    quiet = sorted(times[step] for step in range(15, 29))
    beside = sorted(times[step] for step in (32, 33, 34, 62, 63, 64, 92, 93, 94))
    milliseconds = ", ".join(f"{1e3 * each:.0f}" for each in pauses)
    return f"quiet {1e3 * quiet[7]:.1f} ms, beside a save of 2 GB {1e3 * beside[4]:.1f} ms; pauses {milliseconds} ms"


# --- other ways to train ------------------------------------------------------------------------------------------


def rollback(output_dir: Path) -> str:
    once = []

    def back(ctx: Any) -> None:
        if ctx.state.global_step == 14 and not once:
            once.append(ctx.state.global_step)
            ctx.control.roll_back("to see what happens")

    made = trainer(
        output_dir / "back", recovery="RecoveryPolicy(margin=2)", callbacks=[Listener({"on_step_end": back}, name="b")]
    )
    result = made.train()
    assert result.global_step == STEPS and once
    return f"rolled back once, ended at {result.global_step}"


def under_torchrun(parallel: str) -> Callable[[Path], str]:
    def check(output_dir: Path) -> str:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        own = [*command, "-m", "durability.device", "--train", parallel]
        subprocess.run([*own, str(output_dir / "whole"), "0"], check=True)
        subprocess.run([*own, str(output_dir / "parts"), "11"], check=False, stderr=subprocess.DEVNULL)
        subprocess.run([*own, str(output_dir / "parts"), "0"], check=True)
        comparison = compare_runs(output_dir / "whole", output_dir / "parts")
        assert comparison.identical, comparison.table()
        return "identical after a kill"

    return check


def train_once(parallel: str, output_dir: Path, kill_at: int) -> None:
    def kill(ctx: Any) -> None:
        if ctx.state.global_step == kill_at:
            os.kill(os.getpid(), 9)

    trainer(output_dir, parallel=parallel, callbacks=[Listener({"on_step_end": kill}, name="k")]).train()


CHECKS: dict[str, Callable[[Path], str]] = {
    "killed": lambda _: killed(transformer_leg, 12),
    "killed, compiled, fp16": lambda _: killed(compiled_leg, 4),
    "killed, in memory": lambda _: killed(remembering_leg, 12, memory.FILES),
    "killed, frozen, in memory": lambda _: killed(frozen_leg, 10, memory.FILES),
    "background saves": lambda place: contents(place, {}, no_handlers),
    "foreground saves": lambda place: contents(place, {"save_in_background": False}, no_handlers),
    "fused with backward": lambda place: contents(
        place, {"fuse_optim_with_backward": True, "max_grad_norm": 0, "optim": "adamw"}, no_handlers
    ),
    "weights changed by a callback": lambda place: contents(place, {}, changing_weights),
    "synchronizations": synchronizations,
    "peak memory": peak,
    "step times": step_times,
    "rollback": rollback,
    "ddp": under_torchrun("ddp"),
    "fsdp": under_torchrun("fsdp"),
}


def main() -> int:
    if sys.argv[1:2] == ["--train"]:
        train_once(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK")
    parser.add_argument("--anyway", action="store_true", help="on the CPU, where there is no accelerator")
    parser.add_argument("--here", action="store_true", help="in this process")
    parser.add_argument("--at-once", type=int, default=4)
    arguments = parser.parse_args()
    names = arguments.checks or list(CHECKS)
    if not torch.accelerator.is_available() and not arguments.anyway:
        print("no accelerator here")
        return 2
    if arguments.here:
        with tempfile.TemporaryDirectory(prefix="dalsegno-device-") as folder:
            print(f"RESULT {CHECKS[names[0]](Path(folder))}")
        return 0

    def separately(name: str) -> tuple[str, int, str]:
        command = [sys.executable, "-m", "durability.device", "--here", "--anyway", name]
        began = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            status, output = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            status, output = 124, f"{error.stdout!r}\n{error.stderr!r}"
        output = output.partition("RESULT ")[2] if status == 0 else output[-3000:]
        return name, status, f"{output.strip()} ({time.monotonic() - began:.0f} s)"

    failed = 0
    with ThreadPoolExecutor(arguments.at_once) as pool:
        for name, status, output in pool.map(separately, names):
            failed += status != 0
            print(f"{'ok    ' if status == 0 else 'FAILED'} {name}: {output}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
