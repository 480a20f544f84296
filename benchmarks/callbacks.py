"""What the built-in callbacks cost: all at once in a training, and two of them beside what they stand on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from io import StringIO
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset
from torch.utils.tensorboard import SummaryWriter
from torchmetrics import MeanMetric

import dalsegno as ds
from dalsegno import callbacks
from dalsegno.contexts import Context, LogContext, StepDoneContext, TrainBeginContext
from dalsegno.gradients import GradientNorms
from dalsegno.state import TrainerState
from dalsegno.testing import TinyLanguageModel

from .row import Row, duration
from .timing import in_turns, ratio

LOGGING_STEPS = 10
EVAL_STEPS = 100
BLOCKS = 5
"""Of ``EVAL_STEPS`` steps, after one that does not count."""
TURN = 2
"""Steps of one training before the other one takes its turn."""
CONTEXT, VOCABULARY, BATCH = 32, 2048, 8

LEFT_OUT = {
    "DumpActivations",  # these three do what takes its time because it is asked for
    "ProfilerCallback",
    "TextgenCallback",
    "ExpertLoadBalance",  # there are no experts
    "EMA",  # these change the training, or its data
    "ScaleLoss",
    "ScopedFlags",
    "SkipSamples",
}
BUILT: dict[str, Callable[[], ds.Callback]] = {
    "ComputeNorm": lambda: callbacks.ComputeNorm(per_layer=True),
    "EarlyStopping": lambda: callbacks.EarlyStopping(patience=1000),
    "LogOptimizerParamGroup": lambda: callbacks.LogOptimizerParamGroup(["lr", "weight_decay"]),
    "ModelEvalMetrics": lambda: callbacks.ModelEvalMetrics(
        {"mean": MeanMetric()}, lambda outputs, _: (outputs["loss"],)
    ),
    "Notify": lambda: callbacks.Notify("json://127.0.0.1:9/", on="exception"),
    "PeakMemory": lambda: callbacks.PeakMemory(do_log=True),
}

OBSERVED, GRADIENTS, SCALARS = 1.03, 1.1, 1.1
ROUNDS = 101


def run() -> list[Row]:
    torch.set_num_threads(1)
    return [_observers(), *_gradient_norms(), _scalars()]


# --- all at once ------------------------------------------------------------------------------------------------------


class Sentences(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self._ids = torch.randint(0, VOCABULARY, (count, CONTEXT), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


class Turns(ds.Callback):
    """A training's share of the machine: while it has its turn, the other one waits.

    Two threads that never run at once; so the sides of a pair lie a moment apart.
    """

    makes_wishes = False

    def __init__(self, mine: threading.Semaphore, others: threading.Semaphore) -> None:
        self._mine, self._others = mine, others
        self._steps = 0
        self._began = 0.0
        self.blocks = [0.0]
        """Seconds of each block of steps, with its records and its evaluation."""

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        self._mine.acquire()
        self._began = time.perf_counter()

    def on_step_done(self, ctx: StepDoneContext) -> None:
        self._steps += 1
        if self._steps % TURN:
            return
        self.blocks[-1] += time.perf_counter() - self._began
        if self._steps % EVAL_STEPS == 0:
            self.blocks.append(0.0)
        self._others.release()
        if self._steps < EVAL_STEPS * (1 + BLOCKS):
            self._mine.acquire()
        self._began = time.perf_counter()


def _trainer(folder: Path, own: list[ds.Callback], turns: Turns) -> ds.Trainer:
    torch.manual_seed(0)
    args = ds.TrainingArguments(
        output_dir=folder,
        max_steps=EVAL_STEPS * (1 + BLOCKS),
        per_device_train_batch_size=BATCH,
        logging_steps=LOGGING_STEPS,
        eval_steps=EVAL_STEPS,
        save_steps=0,
        use_cpu=True,
        disable_tqdm=True,
    )
    model = TinyLanguageModel(width=384, depth=5, heads=6, context=CONTEXT, vocabulary=VOCABULARY)
    trainer = ds.Trainer(
        model, args, train_dataset=Sentences(4000), eval_dataset=Sentences(32), callbacks=[*own, turns]
    )
    for callback in trainer.callbacks:
        if callback not in own and callback is not turns:
            trainer.remove_callback(callback)
    return trainer


def _observers() -> Row:
    names = sorted(set(callbacks.__all__) - LEFT_OUT)
    watching = [BUILT[name]() if name in BUILT else getattr(callbacks, name)() for name in names]
    first, second = threading.Semaphore(1), threading.Semaphore(0)
    sides = {"watched": Turns(first, second), "alone": Turns(second, first)}
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        watched = _trainer(Path(folder) / "watched", watching, sides["watched"])
        alone = _trainer(Path(folder) / "alone", [], sides["alone"])
        parameters = sum(parameter.numel() for parameter in alone.model.parameters())
        beside = threading.Thread(target=alone.train)
        beside.start()
        watched.train()
        beside.join()
    ours, theirs = (side.blocks[1 : 1 + BLOCKS] for side in (sides["watched"], sides["alone"]))
    measured = ratio(ours, theirs)
    return Row(
        f"{EVAL_STEPS} steps with {len(names)} observers at once, {parameters / 1e6:.1f} M parameters",
        duration(median(ours)),
        f"without them: {duration(median(theirs))}",
        f"{measured:.3f} ×",
        f"≤ {OBSERVED} ×",
        measured <= OBSERVED,
    )


# --- gradient norms ---------------------------------------------------------------------------------------------------


class Many(nn.Module):
    """300 parameters, 10 M numbers in all."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(128, 256) for _ in range(300))
        for parameter in self.parts:
            parameter.grad = torch.randn(128, 256)


class Operations(TorchDispatchMode):
    """Counts what is done with tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return operation(*args, **(kwargs or {}))


def _gradient_norms() -> list[Row]:
    model = Many()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients = [parameter.grad for parameter in model.parameters()]
    is_due = [True]
    watch = GradientNorms(model, optimizer, lambda: is_due[0])

    def ours() -> None:
        watch.look_at(optimizer)
        watch.take().read()

    seconds = in_turns(
        {"ours": lambda: _seconds(ours), "torch": lambda: _seconds(lambda: torch._foreach_norm(gradients))}, ROUNDS
    )
    measured = ratio(seconds["ours"], seconds["torch"])
    is_due[0] = False
    with Operations() as operations:
        watch._before_step(optimizer, (), {})
    idle = min(_seconds(lambda: watch._before_step(optimizer, (), {})) for _ in range(ROUNDS))
    return [
        Row(
            "gradient norms of 300 tensors, when due, one wait",
            duration(median(seconds["ours"])),
            f"torch._foreach_norm alone: {duration(median(seconds['torch']))}",
            f"{measured:.2f} ×",
            f"≤ {GRADIENTS} ×",
            measured <= GRADIENTS,
        ),
        Row(
            "the same in a step that is not due",
            f"{operations.count} operations, {duration(idle)}",
            "",
            "",
            "0 operations",
            operations.count == 0,
        ),
    ]


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def _scalars() -> Row:
    names = [f"value-{number}" for number in range(10)]
    logs = {name: number / 7 for number, name in enumerate(names)}
    defaults = dict.fromkeys(["train-loss", "learning-rate", "grad-norm", "eval-loss", "eval-perplexity"])
    records = 20
    with TemporaryDirectory() as folder:
        logger = callbacks.TBLogger(scalars={**defaults, **{name: name for name in names}})
        begin, record = _context(TrainBeginContext, folder), _context(LogContext, folder)
        begin.fill(None)
        record.fill(logs, "train")
        logger.on_train_begin(begin)
        theirs = SummaryWriter(f"{folder}/theirs")

        def write_ours() -> None:
            for step in range(records):
                record.state.global_step = step
                logger.on_log(record)

        def write_theirs() -> None:
            for step in range(records):
                for name, value in logs.items():
                    theirs.add_scalar(name, value, step)

        seconds = in_turns({"ours": lambda: _seconds(write_ours), "theirs": lambda: _seconds(write_theirs)}, ROUNDS)
        theirs.close()
        logger._writer.on_train_end(None)
    measured = ratio(seconds["ours"], seconds["theirs"])
    return Row(
        "TensorBoard, 10 scalars of a record",
        duration(median(seconds["ours"]) / records),
        f"SummaryWriter: {duration(median(seconds['theirs']) / records)}",
        f"{measured:.2f} ×",
        f"≤ {SCALARS} ×",
        measured <= SCALARS,
    )


def _context(kind: type[Any], folder: str) -> Any:
    """As the dispatcher would make it, of what TBLogger looks at."""
    given: dict[str, Any] = {field.name: None for field in fields(Context)}
    return kind(**given | {"args": ds.TrainingArguments(folder), "state": TrainerState(is_world_process_zero=True)})
