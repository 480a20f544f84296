"""What two of the built-in callbacks take, beside what they stand on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.tensorboard import SummaryWriter

import dalsegno as ds
from dalsegno import callbacks
from dalsegno.distributed.gradients import GradientNorms
from dalsegno.events.contexts import Context
from dalsegno.events.dispatcher import Dispatcher
from dalsegno.state import TrainerControl, TrainerState

from .row import Row, duration
from .timing import in_turns, ratio

GRADIENTS, SCALARS = 1.1, 1.1
ROUNDS = 101

SMALL = {"rounds": 1}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


def run(rounds: int = ROUNDS) -> list[Row]:
    torch.set_num_threads(1)
    return [*_gradient_norms(rounds), _scalars(rounds)]


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


def _gradient_norms(rounds: int) -> list[Row]:
    model = Many()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients = [parameter.grad for parameter in model.parameters()]
    is_due = [True]
    watch = GradientNorms(model, optimizer, lambda: is_due[0])

    def ours() -> None:
        watch.measure(optimizer)
        watch.take().read()

    def seconds_in_a_step(work: Callable[[], object]) -> float:
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))  # comes just before, and has them all in its hands
        return _seconds(work)

    def theirs() -> None:
        torch.stack(torch._foreach_norm(gradients)).tolist()

    seconds = in_turns({"ours": partial(seconds_in_a_step, ours), "torch": partial(seconds_in_a_step, theirs)}, rounds)
    measured = ratio(seconds["ours"], seconds["torch"])
    is_due[0] = False
    with Operations() as operations:
        watch._before_step(optimizer, (), {})
    idle = min(_seconds(lambda: watch._before_step(optimizer, (), {})) for _ in range(rounds))
    return [
        Row(
            "gradient norms of 300 tensors, when due, one wait",
            duration(median(seconds["ours"])),
            f"torch._foreach_norm, stacked and read: {duration(median(seconds['torch']))}",
            f"{measured:.2f} ×",
            f"≤ {GRADIENTS} ×",
            measured <= GRADIENTS,
            measured.spread,
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


def _scalars(rounds: int) -> Row:
    names = [f"value-{number}" for number in range(10)]
    logs = {name: number / 7 for number, name in enumerate(names)}
    defaults = dict.fromkeys(["train-loss", "learning-rate", "grad-norm", "eval-loss", "eval-perplexity"])
    records = 20
    with TemporaryDirectory() as folder:
        logger = callbacks.TBLogger(scalars={**defaults, **{name: name for name in names}})
        run = Dispatcher(_common(folder), is_rank_zero=True)
        run.bind([logger])
        run.log.fill(logs, "train")
        record = run.log.context
        run.train_begin.fill(None, None)
        run.train_begin.fire()
        theirs = SummaryWriter(f"{folder}/theirs")

        def write_ours() -> None:
            for step in range(records):
                record.state.global_step = step
                logger.on_log(record)

        def write_theirs() -> None:
            for step in range(records):
                for name, value in logs.items():
                    theirs.add_scalar(name, value, step)

        seconds = in_turns({"ours": lambda: _seconds(write_ours), "theirs": lambda: _seconds(write_theirs)}, rounds)
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
        measured.spread,
    )


def _common(folder: str) -> dict[str, Any]:
    """Fields of a context, as far as TBLogger looks at them."""
    given: dict[str, Any] = {field.name: None for field in fields(Context)}
    state, control = TrainerState(is_world_process_zero=True), TrainerControl()
    return given | {"args": ds.TrainingArguments(folder), "state": state, "control": control}
