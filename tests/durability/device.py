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
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import dalsegno as ds
from dalsegno.callbacks import EMA, DivergenceDetector, GradNormLogger, JsonLogger, NaNChecker
from dalsegno.checkpoint import CheckpointManager, read_tensors
from dalsegno.distributed import accelerator
from dalsegno.testing import DataOrder, FaultPlan, TinyLanguageModel, compare_runs
from support.listeners import Listener
from support.runs import Counts, RunningLoss

from . import memory, soak

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
SECONDS = 240  # that a check may take
STEPS = 24
PAGE = Path(__file__).parents[2] / "docs" / "why" / "gpu.md"


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
    said = f"{tally.kills} kills, {tally.resumes} resumes: no bit differs"
    return f"{said}, {tally.proofs['exact']} have proven it themselves"


# --- what a save contains -----------------------------------------------------------------------------------------


class Wide(nn.Module):
    """About ``blocks`` times 4 MB; a buffer changes in each forward. A sample is computed ``rows`` times."""

    def __init__(self, blocks: int, width: int = 1024, rows: int = 1) -> None:
        super().__init__()
        self.rows = rows
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))
        self.register_buffer("calls", torch.zeros(width * width))

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, width)."""
        self.calls.add_(1.0)
        x = x.repeat(self.rows, 1)
        for layer in self.layers:
            x = x + layer(x).tanh() * 0.1
        return x.square().mean()


class Vectors(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, width: int = 1024) -> None:
        self.width = width

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(self.width, generator=torch.Generator().manual_seed(index))}


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


def contents(
    output_dir: Path,
    changes: dict[str, Any],
    handlers: Callable[[], dict[str, Any]],
    blocks: int = 48,
    width: int = 1024,
) -> str:
    """Each checkpoint contains what the model and the optimizer were at the end of its step, bit by bit."""
    expected: dict[int, dict[str, Tensor]] = {}

    def remember(ctx: Any) -> None:
        expected[ctx.step] = all_of(ctx.model, ctx.optimizer)

    model = Wide(blocks, width)
    args: dict[str, Any] = {"max_steps": 24, "save_steps": 3, "logging_steps": 0, "optim": "adamw_fused"}
    ds.Trainer(
        model,
        ds.TrainingArguments(output_dir, disable_tqdm=True, learning_rate=1e-2, **args | changes),
        train_dataset=Vectors(width),
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

        def note(message: Warning | str, category: type[Warning], file: str, line: int, *_: Any) -> None:
            if "called a synchronizing" in str(message):
                found.append(f"{file}:{line}")

        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = former


def synchronizations(output_dir: Path) -> str:
    """Steps without a record, an evaluation or a save wait for nothing; a record's numbers arrive without a wait."""
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
    assert not quiet, sorted(set(quiet))
    return f"no wait in 45 steps without a record, {len(recorded)} in 5 with one"


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


def standstill(output_dir: Path) -> str:
    """What a background save of 8 GB costs the training, beside a bare copy of as many bytes; and a step meanwhile.

    The cost is what the three steps after the save take beyond three quiet ones, with the device settled at the end of
    each: the first one's update waits for the copies, on the device.
    """
    width, every = 4096, 60
    ends: dict[int, float] = {}

    def end(ctx: Any) -> None:
        settle()
        ends[ctx.state.global_step] = time.perf_counter()

    model = Wide(40, width, rows=256)
    ds.Trainer(
        model,
        ds.TrainingArguments(
            output_dir,
            max_steps=5 * every,
            per_device_train_batch_size=8,
            optim="adamw_fused",
            logging_steps=0,
            save_steps=every,
            save_total_limit=1,
            disable_tqdm=True,
        ),
        train_dataset=Vectors(width),
        callbacks=[Listener({"on_step_end": end}, name="clock")],
    ).train()
    times = {step: ends[step] - ends[step - 1] for step in ends if step - 1 in ends}
    quiet = median(times[step] for step in range(every // 2, every + 1))
    saves = range(every, 4 * every + 1, every)
    costs = [sum(times[step + after] for after in (1, 2, 3)) - 3 * quiet for step in saves]
    beside = median(times[step + after] for step in saves[1:] for after in range(4, 12))
    tensors = [each.detach() for each in model.parameters()]
    place = torch.empty(tensors[0].shape, pin_memory=True)
    copies = []
    for _ in range(7):
        settle()
        began = time.perf_counter()
        for each in tensors * 3:  # weights, and two moments
            place.copy_(each, non_blocking=True)
        settle()
        copies.append(time.perf_counter() - began)
    size = 3 * sum(each.numel() * each.element_size() for each in tensors)
    copy, cost = median(copies), median(costs[1:])
    return (
        f"a background save of {size / 1e9:.1f} GB costs {1e3 * cost:.0f} ms, the first of a run "
        f"{1e3 * costs[0]:.0f} ms; a bare copy to the host {1e3 * copy:.0f} ms ({size / copy / 1e9:.0f} GB/s): "
        f"{cost / copy:.2f} ×. A step meanwhile {1e3 * beside:.1f} ms, quiet {1e3 * quiet:.1f} ms: "
        f"{beside / quiet:.3f} ×"
    )


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
    "rollback": rollback,
    "ddp": under_torchrun("ddp"),
    "fsdp": under_torchrun("fsdp"),
    "standstill": standstill,
}
TIMED = ("standstill",)
"""Run alone, after the others."""


def separately(name: str) -> tuple[bool, str]:
    """Run a check in a process of its own. Returns whether it held, and what it says."""
    command = [sys.executable, "-m", "durability.device", "--here", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        return False, f"not done after {SECONDS} s\n{error.stdout!r}\n{error.stderr!r}"
    said = done.stdout.partition("RESULT ")[2].strip()
    return (True, said) if done.returncode == 0 else (False, (done.stdout + done.stderr)[-3000:])


def page(results: dict[str, str]) -> str:
    """``docs/why/gpu.md``."""
    device = accelerator.name_of(accelerator.current_device())
    version = torch.__version__.partition("+")[0]
    rows = "\n".join(f"| {name} | {said} |" for name, said in results.items())
    return f"""# On a GPU

What `make gpu` showed on {date.today().isoformat()}, on one {device} with {os.cpu_count()} cores and
torch {version}; it writes this page. Transformers in bf16 with dropout, EMA, a detector and loggers are killed at
random instants and compared with the same run uninterrupted, bit by bit. What a checkpoint contains is compared with
copies that were made while nothing else happened on the device. Several GPUs
with NCCL have not been tried. Every machine runs much of it on [a simulated accelerator](simulated.md).

| check | result |
|---|---|
{rows}
"""


def main() -> int:
    if sys.argv[1:2] == ["--train"]:
        train_once(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK")
    parser.add_argument("--here", action="store_true", help="in this process")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--write", action="store_true", help="write docs/why/gpu.md")
    arguments = parser.parse_args()
    if not torch.accelerator.is_available():
        print("no accelerator here")
        return 2
    if arguments.here:
        with tempfile.TemporaryDirectory(prefix="dalsegno-device-") as folder:
            print(f"RESULT {CHECKS[arguments.checks[0]](Path(folder))}")
        return 0
    names = arguments.checks or list(CHECKS)
    results: dict[str, str] = {}

    def show(name: str, held: bool, said: str) -> None:
        print(f"{'ok    ' if held else 'FAILED'} {name}: {said}", flush=True)
        if held:
            results[name] = said

    together = [name for name in names if name not in TIMED]
    with ThreadPoolExecutor(arguments.at_once) as pool:
        for name, answer in zip(together, pool.map(separately, together), strict=True):
            show(name, *answer)
    for name in names:
        if name in TIMED:
            show(name, *separately(name))
    if arguments.write and len(results) == len(CHECKS):
        PAGE.write_text(page(results))
    return 0 if len(results) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
