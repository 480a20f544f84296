"""What a training takes with all observers at once, beside the same training without any."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Semaphore

import torch
from torch import Tensor
from torch.utils.data import Dataset

import dalsegno as ds
from dalsegno import callbacks
from dalsegno.events.contexts import StepDoneContext, TrainBeginContext
from dalsegno.testing import TinyLanguageModel

from .row import Row, duration
from .timing import ratio

LOGGING_STEPS = 10
EVAL_STEPS = 100
BLOCKS = 5
"""Of ``EVAL_STEPS`` steps, after one that does not count."""
TURN = 2
"""Steps of one training before the next one takes its turn."""
PATIENCE = 120.0
"""Seconds after which another training is taken for dead."""
WIDTH, CONTEXT, VOCABULARY, BATCH = 384, 32, 2048, 8

LEFT_OUT = {
    "DumpActivations",  # these four do what takes its time because it is asked for
    "ProfilerCallback",
    "TextgenCallback",
    "TraceMalloc",
    "ExpertLoadBalance",  # there are no experts
    "GradientNoiseScale",  # needs several micro-batches in a step; here it has one
    "EMA",  # these two average all weights in every step
    "ModelMerge",
    "ScaleLoss",  # these change the training, or its data
    "ScopedFlags",
    "SkipSamples",
    "MLflowLogger",  # these need a tracker or a trial
    "OptunaPruning",
    "WandbLogger",
}


def _model_eval_metrics() -> ds.Callback:
    from torchmetrics import MeanMetric  # its import takes as long as torch's, and those without it do not need it

    return callbacks.ModelEvalMetrics({"mean": MeanMetric()}, lambda outputs, _: (outputs["loss"],))


BUILT: dict[str, Callable[[], ds.Callback]] = {
    "ComputeNorm": lambda: callbacks.ComputeNorm(per_layer=True),
    "EarlyStopping": lambda: callbacks.EarlyStopping(patience=1000),
    "LogOptimizerParamGroup": lambda: callbacks.LogOptimizerParamGroup(["lr", "weight_decay"]),
    "ModelEvalMetrics": _model_eval_metrics,
    "Notify": lambda: callbacks.Notify("json://127.0.0.1:9/", on="exception"),
    "PeakMemory": lambda: callbacks.PeakMemory(do_log=True),
}
OBSERVERS = sorted(set(callbacks.__all__) - LEFT_OUT)

DEAREST = "NaNChecker"  # reads every activation and its gradient: a tool for finding out

LIMIT = 1.03

SMALL = {"eval_steps": 2, "blocks": 1, "width": 48}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


def run(eval_steps: int = EVAL_STEPS, blocks: int = BLOCKS, width: int = WIDTH) -> list[Row]:
    others = [name for name in OBSERVERS if name != DEAREST]
    seconds, parameters = _in_turns({"all": OBSERVERS, "others": others, "none": []}, eval_steps, blocks, width)
    what = f"{eval_steps} steps"
    return [
        _row(f"{what} with {len(OBSERVERS)} observers at once, {parameters / 1e6:.1f} M parameters", "all", seconds),
        _row(f"{what} without {DEAREST}", "others", seconds),
    ]


def _row(what: str, side: str, blocks: dict[str, list[float]]) -> Row:
    measured = ratio(blocks[side], blocks["none"])
    return Row(
        what,
        duration(median(blocks[side])),
        f"without any: {duration(median(blocks['none']))}",
        f"{measured:.3f} ×",
        f"≤ {LIMIT} ×",
        measured <= LIMIT,
        measured.spread,
    )


def _in_turns(
    sides: dict[str, list[str]], eval_steps: int, blocks: int, width: int
) -> tuple[dict[str, list[float]], int]:
    """Seconds of each block of each side, and how many parameters there are.

    A process for each side, as users have it, so that none collects another's garbage or gets the memory that another
    has given back. Only one runs at a time, and they change every few steps: what is compared lies a moment apart.
    """
    server = multiprocessing.get_context("forkserver")
    with TemporaryDirectory() as folder, server.Manager() as manager, ProcessPoolExecutor(len(sides), server) as pool:
        turns = [manager.Semaphore(int(place == 0)) for place in range(len(sides))]
        trainings = {
            side: pool.submit(
                _train,
                Path(folder) / side,
                observers,
                eval_steps,
                blocks,
                width,
                turns[place],
                turns[(place + 1) % len(sides)],
            )
            for place, (side, observers) in enumerate(sides.items())
        }
        measured = {side: training.result() for side, training in trainings.items()}
    return {side: seconds for side, (seconds, _) in measured.items()}, measured["none"][1]


def _train(
    folder: Path,
    observers: list[str],
    eval_steps: int,
    blocks: int,
    width: int,
    mine: Semaphore,
    next_one: Semaphore,
) -> tuple[list[float], int]:
    """Seconds of each block, and how many parameters there are."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    watching = [BUILT[name]() if name in BUILT else getattr(callbacks, name)() for name in observers]
    turns = Turns(eval_steps, eval_steps * (1 + blocks), mine, next_one)
    args = ds.TrainingArguments(
        output_dir=folder,
        max_steps=turns.steps,
        per_device_train_batch_size=BATCH,
        logging_steps=LOGGING_STEPS,
        eval_steps=eval_steps,
        save_steps=0,
        use_cpu=True,
        disable_tqdm=True,
    )
    model = TinyLanguageModel(width=width, depth=5, heads=6, context=CONTEXT, vocabulary=VOCABULARY)
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        trainer = ds.Trainer(
            model, args, train_dataset=Sentences(4000), eval_dataset=Sentences(32), callbacks=[*watching, turns]
        )
        for callback in trainer.callbacks:
            if callback not in watching and callback is not turns:
                trainer.remove_callback(callback)
        trainer.train()
    return turns.blocks[1 : 1 + blocks], sum(parameter.numel() for parameter in model.parameters())


class Sentences(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self._ids = torch.randint(0, VOCABULARY, (count, CONTEXT), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


class Turns(ds.Callback):
    """A training's share of the machine: while it has its turn, the others wait."""

    sets_control_flags = False

    def __init__(self, block: int, steps: int, mine: Semaphore, next_one: Semaphore) -> None:
        self._block, self.steps = block, steps
        self._mine, self._next = mine, next_one
        self._done = 0
        self._began = 0.0
        self.blocks = [0.0]
        """Seconds of each block of steps, with its records and its evaluation."""

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        self._wait()

    def on_step_done(self, ctx: StepDoneContext) -> None:
        self._done += 1
        if self._done % TURN:
            return
        self.blocks[-1] += time.perf_counter() - self._began
        if self._done % self._block == 0:
            self.blocks.append(0.0)
        self._next.release()
        if self._done < self.steps:
            self._wait()

    def _wait(self) -> None:
        if not self._mine.acquire(timeout=PATIENCE):
            raise TimeoutError("another training has ended before its time")
        self._began = time.perf_counter()
