"""All built-ins in one run, killed with SIGKILL: on one process and in shards on two ranks, as if it had never been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dalsegno as ds
from dalsegno.distributed import collectives
from dalsegno.events.table import Event
from dalsegno.testing import FaultPlan, assert_resume_equivalent, tiny_regression_data
from support.builtins import NAMES, Model, build
from support.languages import Letters
from support.small import arguments

# ProfilerCallback reports each leg separately. Notify needs a receiver, HangWatchdog a hang, GradientNoiseScale refuses
# shards, and TraceMalloc slows all others down: they have tests of their own.
ALONE = {"ProfilerCallback", "Notify", "HangWatchdog", "GradientNoiseScale", "TraceMalloc"}
TOGETHER = sorted(set(NAMES) - ALONE)


def everything(output_dir: Path) -> ds.Trainer:
    """A record every two steps, an evaluation every three, a checkpoint every four; on two ranks there is padding."""
    torch.manual_seed(0)
    world_size = collectives.world_size()
    return ds.Trainer(
        Model(),
        arguments(
            output_dir,
            parallel="none" if world_size == 1 else "fsdp",
            per_device_train_batch_size=4 // world_size,
            max_steps=14,
            logging_steps=2,
            eval_steps=3,
            save_steps=4,
            gradient_accumulation_steps=2,
            disable_tqdm=True,
        ),
        train_dataset=tiny_regression_data(21),
        eval_dataset=tiny_regression_data(7, seed=1),
        processing_class=Letters(),
        callbacks=[build(name) for name in TOGETHER],
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_again_and_again(tmp_path: Path, world_size: int) -> None:
    """Before the first checkpoint, behind a step that logs and evaluates, in the middle of an evaluation, in a save."""
    kills = [
        FaultPlan(event=Event.STEP_DONE, count=2),
        FaultPlan(event=Event.STEP_DONE, count=6),
        FaultPlan(event=Event.PREDICTION_STEP, count=5),
        FaultPlan(operation="write", path="step-00000012.partial"),
    ]
    assert_resume_equivalent(everything, kills, world_size=world_size, folder=tmp_path)
