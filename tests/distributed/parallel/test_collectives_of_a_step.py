"""From the end of one step to that of the next, the ranks exchange what a step written by hand with torch alone does,
and nothing else. A record adds one exchange, as it does by hand where several ranks read different data; and a second
if a handler of records may set a flag. A handler of each micro-batch's loss adds its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import pytest
import torch
from benchmarks.by_hand import MAX_GRAD_NORM, PARTS, Texts, Transformer, plan, steps_by_hand
from torch.distributed.device_mesh import DeviceMesh

import dalsegno as ds
from dalsegno.testing import run_ranks
from dalsegno.training import control_sync
from dalsegno.training.train_step import TrainStep
from support.exchanges import Exchanges
from support.small import arguments

BATCH, STEPS = 4, 4
OPTIM = "sgd"  # no optimizer exchanges anything; torch plans each of AdamW's operations on shards first
PLAIN, RECORD = 2, 3
"""A step that only trains, and one with a record."""

Steps = dict[int, Counter[str]]
"""What is exchanged, by the number of the step."""

OF_A_RECORD = {
    "allreduce": 1,  # sums of losses and tokens, speed and memory (DefaultMetrics), requests
}
FSDP = {
    "allgatherbase": 5,  # parameters of two blocks and of the rest; in the backward pass, of the blocks again
    "reducescatterbase": 3,  # gradients of each
    "allreduce": 1,  # norm
}
HSDP = FSDP | {"allreduce": 4}  # gradients of two blocks and of the rest between the copies; norm
TENSOR_PARALLEL = {"allreduce": 13}  # of each block, outputs of 2 split layers and gradients of the inputs of 4; norm
PIPELINE = {
    "send": PARTS,  # activations or their gradients, of each micro-batch
    "recv": PARTS,
    "allreduce": 1,  # norm and loss
}
PIPELINE_OF_SHARDS = {
    "send": PARTS,
    "recv": PARTS,
    "allgatherbase": 2,  # parameters of one block and of the rest of the stage
    "reducescatterbase": 2,  # gradients of each
    "allreduce": 3,  # whether micro-batches differ in shape between the copies; norm of the shards; norm and loss
}


class MayRequest(ds.Callback):
    """May set a flag at a record."""

    def on_log(self, ctx: ds.LogContext) -> None: ...


class Case(NamedTuple):
    parallel: Any
    data_ranks: int
    exchanged: dict[str, int]
    """In each step."""
    by_hand: str = ""
    """Name of the same loop with torch alone."""
    settings: dict[str, Any] = {}
    handlers: tuple[str, ...] = ()
    others: tuple[type[ds.Callback], ...] = ()
    of_a_record: dict[str, int] = OF_A_RECORD


PIPELINED = ds.Pipeline(2, microbatches=PARTS)
CASES: dict[int, dict[str, Case]] = {
    2: {
        "ddp": Case("ddp", 2, {"allreduce": 1}),  # gradients, in one bucket
        "ddp, with a handler of records that may request": Case(
            "ddp", 2, {"allreduce": 1}, others=(MayRequest,), of_a_record={"allreduce": 2}
        ),
        "fsdp": Case(ds.FSDP(), 2, FSDP, "fsdp"),
        "tp": Case(ds.TensorParallel(plan()), 1, TENSOR_PARALLEL, "tp"),
        "pp": Case(PIPELINED, 1, PIPELINE, "pp"),
        "pp, without clipping": Case(PIPELINED, 1, PIPELINE, settings={"max_grad_norm": 0.0}),  # loss only
        "pp, with a handler of each loss": Case(
            PIPELINED, 1, PIPELINE | {"broadcast": 1}, handlers=("on_microbatch_end",)
        ),
    },
    4: {
        "hsdp": Case(ds.HSDP(replicate=2), 4, HSDP, "hsdp"),
        "pp x fsdp": Case([PIPELINED, ds.FSDP()], 2, PIPELINE_OF_SHARDS),
    },
}
"""By number of ranks."""


class Counting(ds.Callback):
    """Counts what is exchanged from the end of each step to that of the next; and this rank's losses."""

    sets_control_flags = False

    def __init__(self, handlers: Collection[str]) -> None:
        self.steps: Steps = {}
        self.losses: list[float] = []
        self._exchanges = Exchanges()
        for handler in handlers:
            setattr(self, handler, MethodType(lambda _, ctx: None, self))

    def on_train_begin(self, ctx: ds.TrainBeginContext) -> None:
        self._exchanges.__enter__()

    def on_step_end(self, ctx: ds.StepEndContext) -> None:
        self.losses.append(ctx.loss)

    def on_step_done(self, ctx: ds.StepDoneContext) -> None:
        self.steps[ctx.step] = self._exchanges.counts
        self._exchanges.counts = Counter()

    def on_train_end(self, ctx: ds.TrainEndContext) -> None:
        self._exchanges.__exit__(None, None, None)


def exchanged(folder: Path, ranks: int) -> dict[str, tuple[Steps, Steps, list[float]]]:
    """By each step of the trainer's, and by hand; the losses that this rank has."""
    torch.set_num_threads(1)
    found = {}
    for name, case in CASES[ranks].items():
        counting = Counting(case.handlers)
        by_hand: Steps = {}
        texts = Texts(STEPS * BATCH * case.data_ranks)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(control_sync, "_SECONDS_APART", 1e9)  # else the ranks agree now and then, by the clock
            others = [other() for other in case.others]
            train(folder / name, case.parallel, texts, counting, *others, logging_steps=RECORD, **case.settings)
        if case.by_hand:
            steps = steps_by_hand(case.by_hand, 16, 2, BATCH, texts, RECORD, OPTIM)
            for step in range(1, RECORD + 1):
                with Exchanges() as exchanges:
                    next(steps)
                by_hand[step] = exchanges.counts
        found[name] = counting.steps, by_hand, counting.losses
    return found


def train(folder: Path, parallel: Any, texts: Texts, *callbacks: ds.Callback, **settings: Any) -> None:
    given: dict[str, Any] = {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "optim": OPTIM}
    given |= {"max_grad_norm": MAX_GRAD_NORM} | settings
    trainer = ds.Trainer(
        Transformer(16, 2), arguments(folder, parallel=parallel, **given), train_dataset=texts, callbacks=callbacks
    )
    trainer.remove_callback("ProgressCallback")
    trainer.remove_callback("InfoCallback")
    trainer.train()


@pytest.mark.parametrize("ranks", CASES)
def test_a_step_exchanges_what_one_by_hand_does(tmp_path: Path, ranks: int) -> None:
    by_rank = run_ranks(exchanged, ranks, tmp_path, ranks)
    for name, case in CASES[ranks].items():
        for steps, by_hand, losses in (each[name] for each in by_rank):
            assert steps[PLAIN] == case.exchanged, name
            assert steps[RECORD] == Counter(case.exchanged) + Counter(case.of_a_record), name
            if case.by_hand:
                of_a_record = {"allreduce": 1} if case.data_ranks > 1 else {}
                assert by_hand[PLAIN] == case.exchanged, name
                assert by_hand[RECORD] == Counter(case.exchanged) + Counter(of_a_record), name
            assert case.data_ranks > 1 or losses == by_rank[0][name][2], name
            assert min(losses) > 0, name


def mesh_lookups(folder: Path) -> list[int]:
    """Process groups that each step looks up in a mesh."""
    torch.set_num_threads(1)
    call, get_group = TrainStep.__call__, DeviceMesh.get_group
    found: list[int] = []

    def looking_up(*arguments: Any, **named: Any) -> Any:
        found[-1] += 1
        return get_group(*arguments, **named)

    def counted(self: TrainStep, step_batch: Any) -> Any:
        found.append(0)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(DeviceMesh, "get_group", looking_up)
            return call(self, step_batch)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainStep, "__call__", counted)
        train(folder, ds.FSDP(), Texts(STEPS * BATCH * 2))
    return found


def test_a_step_does_not_look_up_how_each_parameter_is_sharded(tmp_path: Path) -> None:
    """One look-up for each parameter, 2 % of a small step, before clipping found them once."""
    for found in run_ranks(mesh_lookups, 2, tmp_path):
        assert len(found) == STEPS
        assert found[-1] == 0
