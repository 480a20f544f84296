"""Runs that are asked to stop: by signals, by clocks, at any moment, on one rank. For processes of their own."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import dalsegno as ds
from dalsegno.callbacks import DivergenceDetector, GradNormLogger, JsonLogger
from dalsegno.distributed import collectives
from dalsegno.events.table import Event
from dalsegno.system import lock
from dalsegno.testing import DataOrder, FaultPlan, TinyRegression, tiny_regression_data
from support.listeners import Listener
from support.runs import Counts, RunningLoss
from support.small import small_trainer


class CountsWithoutSaves(Counts):
    """A stop saves once more, so how often that happens is not what an unbroken run would say.

    It draws a random number at each evaluation batch, so that one that happened twice, or not at all, would show.
    """

    name = "Counts"

    def on_before_save(self, ctx: Any) -> None:
        """Not counted."""

    def on_prediction_step(self, ctx: Any) -> None:
        self.counts["drawn"] = int(torch.randint(1 << 30, ()))


def stoppable_trainer(output_dir: Path, *callbacks: ds.Callback, quick: bool = True, **settings: Any) -> ds.Trainer:
    """Two evaluation sets of several batches every four steps, a record every three, a checkpoint every eight.

    ``quick``: callbacks may request a stop at any step, so the ranks agree at each.
    """
    torch.manual_seed(0)
    rank_count = collectives.world_size()
    chosen = {
        "max_steps": 60,
        "per_device_train_batch_size": 4 // rank_count,
        "per_device_eval_batch_size": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "logging_steps": 3,
        "eval_steps": 4,
        "save_steps": 8,
        "save_total_limit": 2,
        "metric_for_best_model": "eval_near_loss",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    counts = CountsWithoutSaves()
    counts.sets_control_flags = quick
    own = [JsonLogger(run="stopped"), GradNormLogger(), DivergenceDetector(), DataOrder(), counts, RunningLoss()]
    trainer = ds.Trainer(
        TinyRegression(),
        ds.TrainingArguments(output_dir, **{**chosen, **settings}),
        train_dataset=tiny_regression_data(44),
        eval_dataset={"near": tiny_regression_data(14, seed=1), "far": tiny_regression_data(10, seed=2)},
        callbacks=[*own, *callbacks],
    )
    for name in ("ProgressCallback", "InfoCallback"):
        trainer.remove_callback(name)
    return trainer


def moments(seed: int) -> list[FaultPlan]:
    """Instants at which SIGTERM comes, in any order: in each phase of a step, an evaluation and a save; at any time."""
    dice = random.Random(seed)
    events = [Event.STEP_BEGIN, Event.AFTER_BACKWARD, Event.OPTIMIZER_STEP, Event.STEP_END, Event.STEP_DONE]
    events += [Event.PREDICTION_STEP] * 4 + [Event.EVALUATE_BEGIN, Event.EVALUATE, Event.LOG, Event.EPOCH_END]
    events += [Event.BEFORE_SAVE, Event.SAVE, Event.TRAIN_BEGIN]
    operations = [("write", ".partial"), ("fsync", ".partial"), ("rename", "checkpoints/step-"), ("any", "run.json")]
    occasions: list[dict[str, Any]] = [{"event": event} for event in events]
    occasions += [{"operation": operation, "path": path} for operation, path in operations]
    plans = [
        FaultPlan(**occasion, count=1 if occasion.get("event") is Event.TRAIN_BEGIN else dice.randint(1, 3))
        for occasion in occasions
    ]
    plans += [FaultPlan(seconds=dice.uniform(0, 0.1)) for _ in range(2)]
    dice.shuffle(plans)
    return [replace(plan, sends=signal.SIGTERM) for plan in plans]


class Alarm(ds.Callback):
    """Arms a plan that goes by the clock, once the run listens: what comes before ends the process, as it should."""

    def __init__(self, plan: FaultPlan | None) -> None:
        self._plan = plan

    def on_before_load(self, ctx: Any) -> None:
        if self._plan is not None and self._plan.seconds is not None:
            self._plan.arm()


def stop_again_and_again(output_dir: Path, plans: Sequence[FaultPlan], quick: bool) -> list[Any]:
    """A leg for each plan, which another rank gets each time; then one to the end. How each leg ended, on this rank."""
    ends = []
    for number, plan in enumerate(plans):
        victim = (
            0 if plan.operation is not None else number % collectives.world_size()
        )  # files are mostly rank 0's affair
        mine = plan if collectives.rank() == victim else None
        trainer = stoppable_trainer(output_dir, Alarm(mine), quick=quick, max_steps=2000)
        disarm = mine.arm() if mine is not None and mine.seconds is None else lambda: None
        result = trainer.train()
        disarm()
        ends.append((result.global_step, result.reason, result.why, result.stopped_by, result.checkpoint))
    return ends


def train_to(output_dir: Path, steps: int, quick: bool) -> None:
    stoppable_trainer(output_dir, quick=quick, max_steps=steps).train()


class Slow(Dataset[dict[str, Tensor]]):
    """Samples that tell who has read them."""

    def __init__(self) -> None:
        self._data = tiny_regression_data(400)

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        assert torch.utils.data.get_worker_info() is not None
        return self._data[index]


def signal_the_group(output_dir: Path, number: signal.Signals) -> Any:
    """As torchrun and Slurm do it: this process and its data loader's workers are all sent the signal, at step 3."""
    os.setsid()

    def send(ctx: Any) -> None:
        if ctx.step == 3:
            subprocess.run(
                ["kill", f"-{number.name[3:]}", "--", f"-{os.getpgid(0)}"], check=True, start_new_session=True
            )
            workers = multiprocessing.active_children()
            assert len(workers) == 2
            assert multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=1) == []

    trainer = small_trainer(
        output_dir,
        Listener({"on_step_end": send}),
        parts={"train_dataset": Slow()},
        dataloader_num_workers=2,
        max_steps=90,
    )
    result = trainer.train()
    return result.global_step, result.reason, result.why, result.stopped_by


def save_by_the_clock(output_dir: Path) -> Any:
    """Train until two checkpoints are there. At which steps this rank has saved, and, on rank 0, when."""
    steps: list[int] = []
    times: list[float] = []

    def note(ctx: Any) -> None:
        steps.append(ctx.step)
        times.append(time.monotonic())
        if len(steps) == 2:
            ctx.control.stop("seen")

    trainer = small_trainer(
        output_dir, Listener({"on_before_save": note}), save_steps=500, save="Every(seconds=0.1)", max_steps=1_000_000
    )
    trainer.train()
    return steps, collectives.broadcast(times, "times")


def train_in_folders(of_rank_zero: Path, of_rank_one: Path, comes_late: bool = False) -> str:
    """Each rank in a folder of its own; one that comes late turns out to be the other's. The reason, or the error."""
    lock.VISIBLE_WITHIN_S = 20.0 if comes_late else 0.2
    mine = of_rank_zero if collectives.rank() == 0 else of_rank_one
    if comes_late and collectives.rank() == 1:
        threading.Timer(0.5, lambda: mine.symlink_to(of_rank_zero, target_is_directory=True)).start()
    try:
        return small_trainer(mine, max_steps=2, save_steps=2).train().reason
    except ds.ConfigurationError as error:
        return str(error)


def train_until(output_dir: Path, plan: FaultPlan | None) -> None:
    """Alone, to the end, or until the plan strikes."""
    if plan is not None:
        plan.arm()
    small_trainer(output_dir, max_steps=4).train()


def train_and_leave_a_worker(output_dir: Path, end: Path) -> None:
    """Killed in the first step; a process forked from it, named in ``worker``, lives until ``end`` is written."""

    def leave(ctx: Any) -> None:
        if (worker := os.fork()) == 0:
            for descriptor in Path("/proc/self/fd").iterdir():  # else whoever waits for its parent waits for it
                if output_dir not in descriptor.resolve().parents:
                    with contextlib.suppress(OSError):
                        os.close(int(descriptor.name))
            end.read_text()
            os._exit(0)
        (output_dir / "worker").write_text(str(worker))
        os.kill(os.getpid(), signal.SIGKILL)

    small_trainer(output_dir, Listener({"on_step_begin": leave}), max_steps=1).train()
