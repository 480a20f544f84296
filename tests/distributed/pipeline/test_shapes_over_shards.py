"""A pipeline over shards, whose ranks meet micro-batches of new shapes at different times, trains as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dalsegno as ds
from dalsegno.testing import run_ranks
from support.pipelined import Steps, Straight, weights_of
from support.small import arguments

SAMPLES = [[(4, 4), (4, 4)], [(4, 4), (4, 2)], [(4, 4), (2, 2)], [(3, 5), (2, 4)]]
"""Of each step, for each of two data ranks: the samples of its micro-batches."""
EVALUATED = [(4, 4), (3, 4)]
"""For each data rank: the samples of its batches of the evaluation."""
MODES = [ds.FSDP(), ds.FSDP(reshard_after_forward=True)]


def batches() -> tuple[list[list[dict[str, Tensor]]], list[list[dict[str, Tensor]]]]:
    """Of each data rank, the micro-batches of all steps; and those of an evaluation."""
    generator = torch.Generator().manual_seed(1)

    def batch(samples: int) -> dict[str, Tensor]:
        return {name: torch.randn(samples, 8, generator=generator) for name in ("x", "y")}

    steps = [[[batch(samples) for samples in rank] for rank in step] for step in SAMPLES]
    trained = [[each for step in steps for each in step[rank]] for rank in range(2)]
    return trained, [[batch(samples) for samples in rank] for rank in EVALUATED]


def train(folder: Path, mode: ds.FSDP | None) -> tuple[list[Any], float, dict[str, Any]]:
    """Loss and norm of each step, loss of the evaluation, and this rank's weights."""
    parallel: Any = "none" if mode is None else [ds.Pipeline(2, "gpipe"), mode]
    trained, evaluated = batches()
    if mode is None:  # each step takes the micro-batches of both data ranks
        pairs = [zip(each[::2], each[1::2], strict=True) for each in trained]
        own = [each for first, second in zip(*pairs, strict=True) for each in (*first, *second)]
        of_evaluation = [each for rank in evaluated for each in rank]
    else:
        rank = ds.Layout.of(parallel).data_rank
        own, of_evaluation = trained[rank], evaluated[rank]
    steps = Steps()
    trainer = ds.Trainer(
        Straight(),
        arguments(
            folder,
            parallel=parallel,
            max_steps=len(SAMPLES),
            gradient_accumulation_steps=4 if mode is None else 2,
            optim="sgd",
            learning_rate=0.5,
            lr_scheduler_type="constant",
            max_grad_norm=0,
        ),
        train_dataloader=own,
        eval_dataloader=of_evaluation,
        callbacks=[steps],
    )
    trainer.train()
    return steps.seen, trainer.evaluate()["eval_loss"], weights_of(trainer.model)


@pytest.mark.parametrize("mode", MODES, ids=["gathered for a step", "gathered for a micro-batch"])
def test_ranks_that_meet_new_shapes_apart_train_as_one_process(tmp_path: Path, mode: ds.FSDP) -> None:
    """A new shape makes torch call each stage once more, which gathers, and drop the gradients of sharded weights."""
    [(steps, loss, weights)] = run_ranks(train, 1, tmp_path / "one", None)
    for seen, evaluated, own in run_ranks(train, 4, tmp_path / "four", mode):
        assert np.array(seen) == pytest.approx(np.array(steps), rel=1e-5)
        assert evaluated == pytest.approx(loss, rel=1e-5)
        for name, weight in own.items():
            np.testing.assert_allclose(weight, weights[name], rtol=1e-5, atol=1e-6, err_msg=name)
